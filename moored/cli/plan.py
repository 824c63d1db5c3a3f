"""`moored plan`: memory and seconds of a configuration on a GPU, before anything is loaded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import AsJson, ConfigWords, read_config
from moored.errors import ConfigError, EnvError, MooredError

if TYPE_CHECKING:
    from moored.config import Config
    from moored.plan import Gpu, Lengths, Plan

NAME_WIDTH, NUMBER_WIDTH = 18, 10
LEFT_OUT = "not counted: environments, looks at collapse, evaluations, logging"
REMEDY = (
    "what helps, from what costs least: a smaller engine.micro_batch_tokens, "
    "engine.gradient_checkpointing=true, optimizer.states=host, optimizer.kind=adamw_8bit, "
    "algorithm.kl_coef=0, optimizer.lora_rank=64, algorithm.name=grpo, a shorter "
    "rollout.max_context, several GPUs (engine.kind=torchrun)"
)


def plan_command(
    what: ConfigWords = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="h200, h100, a100-40, rtx-4090, …; default: the one here."
        ),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory of the GPU, if not the table's.", min=0.1)
    ] = None,
    gpus: Annotated[
        int, typer.Option(help="Ranks of torchrun on one machine, a GPU each.", min=1)
    ] = 1,
    turns: Annotated[
        int | None, typer.Option(help="Turns of an episode; default: all that are allowed.", min=1)
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a first prompt; default 300.", min=1)
    ] = None,
    reply_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a reply; default: the longest allowed.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan the memory and seconds of a run; nothing is downloaded.

    Takes a configuration as `moored train` does: `moored plan sokoban ppo qwen2.5-3b --gpu h100`.
    Exit code 1 when it does not fit.
    """
    from moored.engine.check import check_context
    from moored.models.shapes import shape_of
    from moored.plan import plan

    config = read_config(what or [])
    _check_is_planned(config, gpus)
    check_context(config)
    chosen, note = _choose_gpu(config, gpu, memory_gib)
    lengths = _lengths(config, turns, prompt_tokens, reply_tokens)
    found = plan(config, shape_of(config.model), chosen, lengths, ranks=gpus)
    if as_json:
        print_json(found.record())
    else:
        print_line(make_console(), "\n".join([*_head(found, note), "", *_table(found), ""]))
        print_line(make_console(), _verdict(found))
    if found.over > 0.0:
        raise typer.Exit(1)


def _check_is_planned(config: Config, gpus: int) -> None:
    """Refuse other engines and devices, and code that the configuration names."""
    from moored.names import ALGORITHMS, ESTIMATORS

    kind, device, options = config.engine.kind, config.engine.device, config.algorithm
    if kind not in ("local", "torchrun"):
        raise ConfigError(f"engine.kind = {kind} is not planned; plans are for local and torchrun")
    if kind == "torchrun" and gpus == 1:
        raise ConfigError("engine.kind = torchrun runs on several GPUs; say how many: --gpus 8")
    if device != "auto" and not device.startswith("cuda"):
        raise ConfigError(f"engine.device is {device}, and plans are made for GPUs; leave it out")
    for name, known in ((options.name, ALGORITHMS), (options.advantage, ESTIMATORS)):
        if name is not None and name not in known:
            raise ConfigError(
                f"a plan runs no code that a configuration names, as {name!r} does; give "
                f"algorithm.name=ppo algorithm.advantage=null if it trains a critic, else grpo"
            )


def _choose_gpu(config: Config, name: str | None, memory_gib: float | None) -> tuple[Gpu, str]:
    """The GPU that was named, or is here, or is assumed, and how it was chosen."""
    from moored.engine.gpu import GIB, present_gpu
    from moored.plan import find_gpu

    if name is not None or memory_gib is not None:
        return find_gpu(name or "unnamed", memory_gib), "as given"
    here = present_gpu(config.engine.device)
    if here is not None:
        return find_gpu(here[0], here[1] / GIB), "the one here"
    return find_gpu("h200"), "assumed, because there is none here; --gpu names another"


def _lengths(
    config: Config, turns: int | None, prompt_tokens: int | None, reply_tokens: int | None
) -> Lengths:
    """What was given, and the longest that is allowed for the rest."""
    from moored.plan import longest_lengths

    given = {} if prompt_tokens is None else {"prompt": prompt_tokens}
    most = _max_turns(config) if turns is None else turns
    found = longest_lengths(config, turns=most, reply=reply_tokens, **given)
    found = replace(found, **given, turns=found.turns if turns is None else turns)
    rollout = config.rollout
    if found.trajectory > rollout.max_context or found.reply > rollout.max_response_tokens:
        raise MooredError(
            f"an episode of {found.trajectory:,} tokens with replies of {found.reply} is longer "
            f"than rollout.max_context = {rollout.max_context} or rollout.max_response_tokens = "
            f"{rollout.max_response_tokens} allow; raise these, or lower --turns, --prompt-tokens "
            f"or --reply-tokens"
        )
    return found


def _max_turns(config: Config) -> int:
    """Of the environment that has most."""
    from moored.envs.mix import EnvMix, is_foreign

    mix, most = EnvMix(config.env), 1
    try:
        for spec, make in zip(mix.specs, mix.makers, strict=True):
            if is_foreign(spec.name, spec.options):
                raise EnvError(
                    f"a plan runs no code that a configuration names, as {spec.name!r} does"
                )
            with closing(make()) as env:
                most = max(most, env.max_turns)
    except EnvError as error:
        # A run is often planned where it will not be made, and only its turns are needed.
        raise EnvError(f"{error}; to plan all the same, give --turns") from error
    return most


def _head(found: Plan, note: str) -> list[str]:
    setup, lengths, memory = found.setup, found.lengths, found.memory
    rollout, ranks = setup.config.rollout, setup.ranks
    many = f"{ranks} x " if ranks > 1 else ""
    again = ", with gradient checkpointing" if found.checkpointing else ""
    lines = [
        f"model: {setup.config.model}, {setup.shape.size_text} parameters, "
        f"{'bfloat16' if setup.bf16 else 'float32'}",
        f"GPU: {many}{found.gpu.name}, {found.gpu.memory_gib:.1f} GiB ({note})",
        f"each step: {rollout.num_groups} prompts x {rollout.group_size} episodes of "
        f"{lengths.trajectory:,} tokens: a prompt of {lengths.prompt}, {lengths.turns} x "
        f"{lengths.reply} and {lengths.turns - 1} x {lengths.observation} between them",
        f"micro-batches: {found.micro_batch_tokens:,} tokens{again}",
    ]
    if memory.rows < setup.most_rows:
        lines.append(
            f"keys and values of {memory.rows} of {setup.most_rows} episodes fit at a time; others "
            f"wait"
        )
    lines += [f"main memory: {s / 2**30:.1f} GiB for the {part}" for part, s in memory.host.items()]
    return lines


def _table(found: Plan) -> list[str]:
    """One line for each part, one column for each phase; and the seconds."""
    from moored.plan.seconds import why_untimed

    phases = found.memory.phases
    parts = list(dict.fromkeys(part for own in phases.values() for part in own))
    parts.sort(key=lambda part: part in ("CUDA", "reserve"))
    lines = [_line("GiB", list(phases))]
    for part in parts:
        sizes = [own.get(part) for own in phases.values()]
        lines.append(_line(part, ["" if s is None else f"{s / 2**30:.2f}" for s in sizes]))
    lines.append(_line("total", [f"{sum(own.values()) / 2**30:.2f}" for own in phases.values()]))
    if found.seconds is None:
        why = why_untimed(found.setup, found.gpu) or "planned only for what fits"
        return [*lines, f"seconds: {why}"]
    of = found.seconds
    cells = {
        "rollout": of.get("prefill", 0.0) + of.get("decode", 0.0),
        "scoring": of["advantages"],
        "update": of["update"] + of["publish"],
    }
    shown = [f"{cells[phase]:.2f}" if cells.get(phase) else "" for phase in phases]
    whole = "" if found.step_s is None else f"a step: {found.step_s:.2f} s; "
    ranks = ", what ranks send each other" if found.setup.ranks > 1 else ""
    return [*lines, _line("seconds", shown), f"{whole}{LEFT_OUT}{ranks}"]


def _line(name: str, cells: list[str]) -> str:
    return f"{name:<{NAME_WIDTH}}{''.join(f'{cell:>{NUMBER_WIDTH}}' for cell in cells)}".rstrip()


def _verdict(found: Plan) -> str:
    """Fits, or does not and by how much."""
    memory, gpu = found.memory, found.gpu
    peak = f"{memory.peak_bytes / 2**30:.1f} GiB in the {memory.peak_phase} phase"
    has = f"{gpu.memory_gib:.1f} GiB of {gpu.name}"
    if found.over <= 0.0:
        return f"fits: {peak}, {100 * (1 + found.over):.0f} % of the {has}"
    return f"does not fit: {peak}, {100 * found.over:.0f} % more than the {has}\n{REMEDY}"
