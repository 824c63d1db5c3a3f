"""`moored gradients`: what groups of low and of high reward variance push the policy towards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from moored.cli.console import make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import AsJson, check_config, read_config, split_words
from moored.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from moored.config import Config, GradientsConfig
    from moored.runlog.log import RunLog

WIDE = 130
"""Columns a terminal needs for all terms side by side."""

Source = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|PRESET… [KEY=VALUE]…",
        help="A run directory, or presets as for `train`, and options.",
    ),
]
Checkpoint = Annotated[
    int | None,
    typer.Option(help="Step of the run's checkpoint; default: the newest.", min=1),
]
NumGroups = Annotated[int, typer.Option("--groups", help="Fresh groups to roll out.", min=1)]
GroupSize = Annotated[int, typer.Option(help="Trajectories of each group.", min=2)]
NumBuckets = Annotated[
    int, typer.Option("--buckets", help="Of equal numbers of groups, by RV.", min=1)
]
Params = Annotated[str, typer.Option(help="Which weights: all, lora or last-block.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FOLDER",
        help="Where gradients.jsonl is written; default: the run directory, for presets nowhere.",
    ),
]


@dataclass(frozen=True, slots=True)
class _Policy:
    """What is measured: a configuration, and the checkpoint of a run or none."""

    config: Config
    run: Path | None
    checkpoint: Path | None

    @property
    def num_steps_done(self) -> int:
        from moored.engine.checkpoint import checkpoint_step

        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint)


def gradients_command(
    source: Source,
    checkpoint: Checkpoint = None,
    num_groups: NumGroups = 64,
    group_size: GroupSize = 16,
    num_buckets: NumBuckets = 6,
    params: Params = "all",
    out: Output = None,
    as_json: AsJson = False,
) -> None:
    """Measure task and regulariser gradients by reward variance.

    Rolls out fresh groups, ranks them by reward variance (RV), and compares the gradient of every
    term of the loss between buckets: norm, noise, cosines. Nothing is trained.
    """
    from moored.runlog.log import RunLog, check_folder

    options = _options(num_groups, num_buckets, params)
    policy = _find_policy(source, checkpoint, group_size)
    if params == "lora" and not policy.config.optimizer.lora_rank:
        raise ConfigError(
            "--params lora needs LoRA weights, but optimizer.lora_rank is 0; choose all or "
            "last-block"
        )
    folder = out or policy.run
    if folder is not None:
        check_folder(folder, resume=True)
    check_config(policy.config)
    log = None if folder is None else RunLog(folder, resume=True)
    record = _measure(policy, options, num_groups)
    if log is not None:
        log.append("gradients", policy.num_steps_done, record)
    if as_json:
        print_json({"step": policy.num_steps_done, **record})
        return
    _show(policy, record, log)


def _options(num_groups: int, num_buckets: int, params: str) -> GradientsConfig:
    from moored.config import GradientsConfig
    from moored.names import check_name

    check_name("--params", params, get_args(GradientsConfig.model_fields["params"].annotation))
    if num_groups < num_buckets:
        raise ConfigError(
            f"--groups {num_groups} do not fill --buckets {num_buckets}; give --groups "
            f"{num_buckets} or more, or fewer buckets"
        )
    return GradientsConfig.model_validate({"num_buckets": num_buckets, "params": params})


def _find_policy(words: Sequence[str], checkpoint: int | None, group_size: int) -> _Policy:
    """The run or presets that the words name, with groups of this size."""
    from moored.config import load_config
    from moored.engine.checkpoint import find_checkpoint, newest_checkpoint
    from moored.models.paths import resolve_paths
    from moored.models.rates import with_rates
    from moored.runlog.changes import changes_since

    names, overrides = split_words(words)
    run = Path(names[0]) if len(names) == 1 and (Path(names[0]) / "config.yaml").is_file() else None
    size = f"rollout.group_size={group_size}"
    if run is None:
        if checkpoint is not None:
            raise ConfigError(
                f"--checkpoint {checkpoint} needs a run directory, got {' '.join(words)!r}"
            )
        return _Policy(read_config([*words, size]), None, None)
    config = with_rates(resolve_paths(load_config(run / "config.yaml", [*overrides, size])))
    changes_since(run, config)
    saved = newest_checkpoint(run) if checkpoint is None else find_checkpoint(run, checkpoint)
    return _Policy(config, run, saved)


def _measure(policy: _Policy, options: GradientsConfig, num_groups: int) -> dict[str, object]:
    """Roll out what training would play next, and measure."""
    # Only now, because they import torch.
    from moored.cli.progress import EpisodeBar
    from moored.engine.build import build_engine
    from moored.envs.mix import EnvMix
    from moored.rollout.episodes import roll_out
    from moored.rollout.pool import make_pool
    from moored.train import plan_tasks
    from moored.training.algorithms import load_algorithm
    from moored.training.gradients import check_measures_gradients, measure_gradients

    config, step = policy.config, policy.num_steps_done + 1
    rollout = config.rollout
    with (
        closing(build_engine(config)) as engine,
        closing(make_pool(engine, rollout)) as pool,
    ):
        check_measures_gradients(engine.learner)
        if policy.checkpoint is not None:
            engine.learner.load(policy.checkpoint)
            engine.publish()
        with EpisodeBar(num_groups * rollout.group_size) as bar:
            groups = roll_out(
                plan_tasks(config, EnvMix(config.env), step, num_groups),
                engine=engine,
                options=rollout,
                seed=(config.seed, step),
                pool=pool,
                on_replies=bar.on_replies,
            )
        algorithm = load_algorithm(config.algorithm)
        with make_console(stderr=True).status(f"gradients of {num_groups} groups"):
            return measure_gradients(config, algorithm, engine.learner, groups, options)


def _show(policy: _Policy, record: Mapping[str, Any], log: RunLog | None) -> None:
    console = make_console()
    where = "the start" if policy.checkpoint is None else f"step {policy.num_steps_done}"
    print_line(
        console,
        f"{record['algorithm']} at {where}: {record['num_groups']} groups of "
        f"{record['group_size']}, {record['num_parameters']:,} weights ({record['params']})",
        style="bold",
    )
    for table in tables(record, console.width):
        console.print(table)
    print_line(
        console,
        "norms are of the mean gradient per token, ± 95 %; SNR is norm / standard error, about 1 "
        "for noise alone; cos is the cosine of a term's gradient with the task's, of the task's "
        "with that of the other buckets",
    )
    projection = record["projection"]
    if projection is not None:
        print_line(
            console,
            f"gradients were projected to {projection['dimensions']:,} dimensions: norms are right "
            f"to {projection['relative_error']:.1%}",
        )
    if log is not None:
        print_line(console, f"written to {log.path / 'gradients.jsonl'}")


def tables(record: Mapping[str, Any], width: int) -> list[Table]:
    """One row per bucket, all groups last; on a narrow terminal one table for each term."""
    terms = list(record["whole"]["terms"])
    if width < WIDE:
        return [_table(record, [term], ["norm", "SNR", "cos"], title=term) for term in terms]
    heads = [head for term in terms for head in (f"{term} norm", f"{term} SNR")]
    heads += [f"cos {'rest' if term == 'task' else term}" for term in terms]
    return [_table(record, terms, ["groups", "tokens", *heads], has_sizes=True)]


def _table(
    record: Mapping[str, Any],
    terms: Sequence[str],
    heads: Sequence[str],
    *,
    title: str | None = None,
    has_sizes: bool = False,
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", title=title)
    for head in ("RV", *heads):
        table.add_column(head, justify="right", overflow="fold")
    for bucket in record["buckets"]:
        span = f"{bucket['rv_low']:.2g}–{bucket['rv_high']:.2g}"
        table.add_row(span, *_cells(bucket, terms, has_sizes))
    table.add_section()
    table.add_row("all", *_cells(record["whole"], terms, has_sizes))
    return table


def _cells(bucket: Mapping[str, Any], terms: Sequence[str], has_sizes: bool) -> list[str]:
    cells = [f"{bucket['num_groups']:,}", f"{bucket['num_tokens']:,}"] if has_sizes else []
    for term in terms:
        found = bucket["terms"][term]
        half = found["norm_interval"][1] - found["norm"]
        spread = f" ± {half:.1g}" if half > 0.0 else ""
        cells += [f"{_text(found['norm'], '.2g')}{spread}", _text(found["snr"], ".1f")]
    keys = ["task_with_rest" if term == "task" else f"task_{term}" for term in terms]
    return [*cells, *(_text(bucket["cosines"][key], "+.2f") for key in keys)]


def _text(value: float, spec: str) -> str:
    """A dash for what is not known."""
    return "–" if value != value else format(value, spec)
