"""What `moored plan --gpus N` prints: layouts of a cluster side by side, memory of its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moored.cli.console import make_console, print_line
from moored.cli.json_output import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moored.plan.layouts import ClusterPlan, Layout

GIB = 2**30
COLUMNS = ("learners", "samplers", "rollout", "learn", "publish", "step", "tokens/s", "bound by")
WIDTHS = (9, 9, 9, 8, 8, 8, 11)
NAME_WIDTH = 19
NOTE = (
    "seconds of one GPU are from measurements on one H200; links between GPUs are from data "
    "sheets, and no run on several GPUs was measured; not counted: environments, looks at collapse"
)


PLAIN = (
    "rollouts are planned as those of vLLM; the plain sampler, which writes at the speed of the "
    "model's own code, takes many times as long"
)
ENVIRONMENTS = (
    "environments run in the driver; with Ray, engine.ray.env_actors puts those that compute much "
    "or hold much memory, such as sandboxes and indexes, into processes on CPU nodes"
)


def print_cluster(found: ClusterPlan, *, as_json: bool) -> None:
    """Everything as lines, or as JSON with what to do about a cluster that is too small."""
    from moored.plan.cluster_advice import cluster_remedy

    remedy = None if found.fits else cluster_remedy(found)
    if as_json:
        print_json({**found.record(), "remedy": remedy})
        return
    lines = [*_head(found), ""]
    if remedy is None:
        lines += [*_layouts(found), "", *_memory(found.best), "", *_verdict(found)]
    else:
        lines += [f"{name}: {why}" for name, why in found.misfits.items()]
        lines += ["", f"does not fit: {remedy}"]
    console = make_console()
    for line in lines:
        print_line(console, line)


def _head(found: ClusterPlan) -> list[str]:
    cluster, setup, lengths = found.cluster, found.setup, found.lengths
    nodes = f"{cluster.num_nodes:,} nodes" if cluster.num_nodes > 1 else "1 node"
    links = f"{cluster.node_gbs:g} GB/s within a node"
    if cluster.num_nodes > 1:
        links += f", {cluster.network_gbits:,g} Gbit/s between nodes"
    return [
        f"model: {found.config.model}, {setup.shape.size_text} parameters",
        f"cluster: {cluster.num_gpus:,} x {cluster.gpu.name} in {nodes}, {links}",
        f"each step: {setup.num_groups} prompts x {setup.group_size} = {setup.num_episodes:,} "
        f"{lengths.text}",
    ]


def _layouts(found: ClusterPlan) -> list[str]:
    """One line for each layout."""
    cells = "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=False))
    lines = [f"{'layout, seconds':<{NAME_WIDTH}}{cells}  {COLUMNS[-1]}"]
    for name, layout in found.layouts.items():
        lines.append(_layout_line(name, layout))
    misfits = found.misfits.items()
    return lines + [f"{name:<{NAME_WIDTH}} does not fit: {why}" for name, why in misfits]


def _layout_line(name: str, layout: Layout) -> str:
    samplers = f"{layout.replicas}" + (f" x {layout.ways}" if layout.ways > 1 else "")
    values = (
        f"{layout.learners}",
        samplers,
        f"{layout.rollout_s:.2f}",
        f"{layout.learn_s:.2f}",
        f"{layout.seconds['publish']:.2f}",
        f"{layout.step_s:.2f}",
        f"{layout.tokens_per_s:,.0f}",
    )
    cells = "".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True))
    return f"{name:<{NAME_WIDTH}}{cells}  {layout.bound}"


def _memory(best: Layout) -> list[str]:
    """Of both kinds of GPU of the best layout, side by side."""
    learner, sampler = best.learner.peak, best.sampler.parts
    again = ", with gradient checkpointing" if best.learner.checkpointing else ""
    lines = [
        f"best: {best.name}; micro-batches of {best.learner.micro_batch_tokens:,} tokens{again}; "
        f"{_episodes(best)} at a time on a replica",
        f"{'memory, GiB':<{NAME_WIDTH}}{'learner':>9}{'sampler':>9}",
    ]
    for part in dict.fromkeys([*learner, *sampler]):
        lines.append(f"{part:<{NAME_WIDTH}}{_size(learner, part)}{_size(sampler, part)}".rstrip())
    totals = (sum(own.values()) / GIB for own in (learner, sampler))
    return [*lines, f"{'total':<{NAME_WIDTH}}" + "".join(f"{total:>9.2f}" for total in totals)]


def _episodes(layout: Layout) -> str:
    rows = layout.sampler.rows
    return f"{rows:,} episodes" if rows > 1 else "1 episode"


def _size(parts: Mapping[str, int], part: str) -> str:
    return f"{parts[part] / GIB:>9.2f}" if part in parts else " " * 9


def _verdict(found: ClusterPlan) -> list[str]:
    from moored.plan.coefficients import MEASURED
    from moored.plan.layouts import TOGETHER
    from moored.plan.seconds import why_untimed

    best = found.best
    lines = [f"{best.step_s:.2f} s a step; longest: {best.bound} ({_why(best)})"]
    if best.idle:
        lines.append(_left_over(found))
    words = (f"{name}={str(value).lower()}" for name, value in best.options.items())
    lines.append(f"set {' '.join(words)}")
    if any(layout.name != TOGETHER for layout in found.layouts.values()):
        lines.append(ENVIRONMENTS)
    why = why_untimed(found.setup, MEASURED.speed)
    if why is not None:
        lines.append(f"these seconds only compare layouts: those of one GPU are {why}")
    if found.setup.has_plain_sampler and best.name == TOGETHER:
        lines.append(PLAIN)
    return [*lines, NOTE]


def _left_over(found: ClusterPlan) -> str:
    best = found.best
    gpus = f"{best.idle:,} GPUs are" if best.idle > 1 else "1 GPU is"
    if best.replicas == found.setup.num_episodes:
        return f"{gpus} left over: each of the {best.replicas:,} episodes has a replica already"
    return f"{gpus} left over: no whole replica fits there"


def _why(best: Layout) -> str:
    """What makes the longest part long, and what would make it shorter."""
    reasons = {
        "decode": f"a replica reads its weights for {_episodes(best)} at a time: more "
        f"episodes in a step cost little",
        "prefill": "prompts are long: fewer replicas read each of them less often",
        "driver": "one driver hands on all turns",
        "advantages": "passes without gradients; PPO's critic and the learner's log-probabilities",
        "update": "bound by arithmetic: more learners or a smaller model",
        "links of the update": "gathering weights takes longer than computing with them: larger "
        "micro-batches, fewer learners or faster links",
        "publish": "weights go through main memory and Ray's object store; "
        "engine.ray.publish=direct sends them from GPU to GPU",
    }
    return reasons[best.bound]
