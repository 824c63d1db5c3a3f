"""`moored plan`: memory and seconds of a configuration on a GPU, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import AsJson, ConfigWords, read_config
from moored.errors import ConfigError, MooredError

if TYPE_CHECKING:
    from moored.config import Config
    from moored.plan import Gpu, Lengths, Plan
    from moored.plan.plan import LengthsOf

DEFAULT_GPU = "h200"
CLUSTER_KINDS = ("torchrun", "ray")
NAME_WIDTH, NUMBER_WIDTH = 18, 10
LEFT_OUT = "not counted: environments, looks at collapse, evaluations, logging"
PLAIN_LEFT_OUT = "nor rollouts: the plain sampler writes at the speed of the model's own code"


Gpus = Annotated[int | None, typer.Option(help="Plan for a cluster of this many GPUs.", min=1)]
GpusPerNode = Annotated[int | None, typer.Option(help="With --gpus; default 8.", min=1)]
Samplers = Annotated[
    int | None, typer.Option(help="With --gpus: how many of them sample; default: the best.")
]
TensorParallel = Annotated[
    int | None, typer.Option(help="With --gpus: GPUs of a sampler; default: the best.")
]
Nvlink = Annotated[float | None, typer.Option(help="With --gpus: GB/s of a GPU within its node.")]
Network = Annotated[
    float | None, typer.Option(help="With --gpus: Gbit/s of a node; default 400 per GPU.")
]


def plan_command(
    what: ConfigWords = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="h200, h100, a100-40, rtx-4090, …; default: the one here."
        ),
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of the GPU.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Its dense bfloat16 rate.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Of its memory, in TB/s.")] = None,
    turns: Annotated[
        int | None, typer.Option(help="Turns of an episode; default: all that are allowed.", min=1)
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a first prompt; default 300.", min=1)
    ] = None,
    reply_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a reply; default: the longest allowed.", min=1)
    ] = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    samplers: Samplers = None,
    tensor_parallel: TensorParallel = None,
    nvlink: Nvlink = None,
    network: Network = None,
    as_json: AsJson = False,
) -> None:
    """Plan the memory and seconds of a run; nothing is downloaded.

    Takes a configuration as `moored train` does: `moored plan sokoban ppo qwen2.5-3b --gpu h100`.
    With `--gpus N`, how to divide a cluster between samplers and learners. Exit code 1 when it does
    not fit.
    """
    from moored.cli.plan_lengths import as_given
    from moored.engine.check import check_context

    config = read_config(what or [])
    cluster = _Cluster(gpus, gpus_per_node, samplers, tensor_parallel, nvlink, network)
    _check_is_planned(config, cluster)
    _check_algorithm(config)
    check_context(config)
    chosen, note = _choose_gpu(config, gpu, memory_gib, tflops, bandwidth)
    lengths_of = as_given(config, turns, prompt_tokens, reply_tokens)
    fits = (
        _plan_one(config, chosen, note, lengths_of, as_json=as_json)
        if gpus is None
        else _plan_cluster(config, chosen, lengths_of(config), cluster, as_json=as_json)
    )
    if not fits:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What was said of a cluster."""

    gpus: int | None
    gpus_per_node: int | None
    samplers: int | None
    tensor_parallel: int | None
    nvlink: float | None
    network: float | None


def _check_algorithm(config: Config) -> None:
    """Refuse code that the configuration names: whether there is a critic is all a plan needs."""
    from moored.names import ALGORITHMS, ESTIMATORS

    options = config.algorithm
    for name, known in ((options.name, ALGORITHMS), (options.advantage, ESTIMATORS)):
        if name is not None and name not in known:
            raise ConfigError(
                f"a plan runs no code that a configuration names, as {name!r} does; give "
                f"algorithm.name=ppo algorithm.advantage=null if it trains a critic, else grpo"
            )


def _plan_one(config: Config, gpu: Gpu, note: str, lengths_of: LengthsOf, *, as_json: bool) -> bool:
    from moored.plan import plan, shape_of

    found = plan(config, shape_of(config.model), gpu, lengths_of=lengths_of)
    if as_json:
        _print_json(found)
    else:
        _print(found, note)
    return found.fits


def _plan_cluster(
    config: Config, gpu: Gpu, lengths: Lengths, given: _Cluster, *, as_json: bool
) -> bool:
    from moored.cli.plan_cluster import print_cluster
    from moored.plan import shape_of
    from moored.plan.cluster import plan_cluster
    from moored.plan.links import make_cluster

    cluster = make_cluster(
        gpu,
        given.gpus or 1,
        gpus_per_node=given.gpus_per_node or 8,
        node_gbs=given.nvlink,
        network_gbits=given.network,
    )
    found = plan_cluster(
        config,
        shape_of(config.model),
        cluster,
        lengths,
        samplers=given.samplers,
        ways=given.tensor_parallel,
    )
    print_cluster(found, as_json=as_json)
    return found.fits


def _check_is_planned(config: Config, cluster: _Cluster) -> None:
    kind, gpus = config.engine.kind, cluster.gpus
    given = [
        f"--{name.replace('_', '-')}" for name, value in _options(cluster) if value is not None
    ]
    if gpus is None and given:
        raise MooredError(f"{given[0]} describes a cluster; give the number of GPUs too: --gpus 64")
    if gpus is None and kind in CLUSTER_KINDS:
        raise ConfigError(f"engine.kind = {kind} runs on several GPUs; say how many: --gpus 8")
    if kind != "local" and kind not in CLUSTER_KINDS:
        raise ConfigError(f"engine.kind = {kind} computes elsewhere; plans are made for local")
    device = config.engine.device
    if device != "auto" and re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise ConfigError(f"engine.device is {device}, and plans are made for GPUs; leave it out")


def _options(cluster: _Cluster) -> list[tuple[str, object]]:
    return [(field.name, getattr(cluster, field.name)) for field in fields(cluster)]


def _choose_gpu(
    config: Config,
    name: str | None,
    memory_gib: float | None,
    tflops: float | None,
    bandwidth: float | None,
) -> tuple[Gpu, str]:
    """The GPU that was named, or is here, or is assumed, and how it was chosen."""
    from dataclasses import replace

    from moored.plan import Gpu, find_gpu, known_gpu

    figures = {"memory_gib": memory_gib, "tflops": tflops, "bandwidth_tbs": bandwidth}
    given = [figure for figure in figures.values() if figure is not None]
    if name is not None:
        return find_gpu(name, **figures), "as given"
    if len(given) == len(figures):
        return find_gpu("unnamed", **figures), "as given"
    if given:
        raise MooredError(
            "--memory-gib, --tflops and --bandwidth describe a GPU together; give all three, or "
            "name one with --gpu and only what differs"
        )
    from moored.engine.gpu import present_gpu

    here = present_gpu(config.engine.device)
    if here is not None:
        known = known_gpu(here[0]) or Gpu(here[0], 1.0)
        return replace(known, memory_gib=here[1] / 2**30), "the one here"
    return find_gpu(DEFAULT_GPU), "assumed, because there is none here; --gpu names another"


def _print_json(found: Plan) -> None:
    from moored.plan import advice, gib_refused_by_train

    pieces = [
        {"options": dict(piece.options), "peak_gib": round(piece.peak_gib, 3), "cost": piece.why}
        for piece in advice(found)
    ]
    refused = gib_refused_by_train(found) if found.fits else None
    print_json({**found.record(), "gib_refused_by_train": refused, "advice": pieces})


def _print(found: Plan, note: str) -> None:
    from moored.plan import advice, gib_refused_by_train, remedy, verdict

    console = make_console()
    lines = [*_head(found, note), "", *_memory_table(found), "", *_seconds_table(found), ""]
    lines.append(verdict(found))
    if not found.fits:
        pieces = [f"  set {piece.text()}" for piece in advice(found)]
        lines += pieces or [f"  {remedy(found)}"]
    elif (refused := gib_refused_by_train(found)) is not None:
        lines.append(
            f"but `moored train` refuses it: it does not know these lengths, and assumes full "
            f"micro-batches ({refused:.1f} GiB); leave engine.micro_batch_tokens unset"
        )
    for line in lines:
        print_line(console, line)


def _head(found: Plan, note: str) -> list[str]:
    setup, lengths, memory = found.setup, found.lengths, found.memory
    again = ", with gradient checkpointing" if found.checkpointing else ""
    lines = [
        f"model: {found.config.model}, {setup.shape.size_text} parameters, "
        f"{'bfloat16' if setup.bf16 else 'float32'}",
        f"GPU: {found.gpu.name}, {found.gpu.memory_gib:.1f} GiB ({note})",
        f"each step: {setup.num_groups} prompts x {setup.group_size} = {setup.num_episodes} "
        f"{lengths.text}",
        f"micro-batches: {found.micro_batch_tokens:,} tokens{again}",
    ]
    if memory.rows < setup.most_rows:
        lines.append(
            f"keys and values of {memory.rows} of {setup.most_rows} episodes fit at a time; others "
            f"wait"
        )
    if memory.host:
        parts = (f"{size / 2**30:.1f} GiB for the {part}" for part, size in memory.host.items())
        lines.append(f"main memory: {', '.join(parts)}")
    return lines


def _memory_table(found: Plan) -> list[str]:
    """One line for each part, one column for each phase."""
    phases = found.memory.phases
    parts = list(dict.fromkeys(part for own in phases.values() for part in own))
    last = [part for part in ("CUDA", "reserve") if part in parts]
    parts = [part for part in parts if part not in last] + last
    lines = [_line("memory, GiB", phases)]
    for part in parts:
        sizes = [own.get(part) for own in phases.values()]
        lines.append(_line(part, ["" if s is None else f"{s / 2**30:.2f}" for s in sizes]))
    totals = (sum(own.values()) / 2**30 for own in phases.values())
    return [*lines, _line("total", [f"{total:.2f}" for total in totals])]


def _seconds_table(found: Plan) -> list[str]:
    from moored.plan.coefficients import MEASURED
    from moored.plan.seconds import why_untimed

    if not found.fits:
        return ["seconds: planned only for what fits"]
    why = why_untimed(found.setup, MEASURED.speed)
    if why is not None:
        return [f"seconds: {why}"]
    if found.seconds is None:
        return [f"seconds: the rates of {found.gpu.name} are not known; name one with --gpu"]
    lines = [_line("seconds", [])]
    lines += [_line(phase, [f"{s:.2f}"]) for phase, s in found.seconds.items()]
    if found.step_s is None:
        return [*lines, LEFT_OUT, PLAIN_LEFT_OUT]
    return [*lines, _line("step", [f"{found.step_s:.2f}"]), LEFT_OUT]


def _line(name: str, cells: object) -> str:
    numbers = "".join(f"{cell:>{NUMBER_WIDTH}}" for cell in cells)  # pyright: ignore
    return f"{name:<{NAME_WIDTH}}{numbers}".rstrip()
