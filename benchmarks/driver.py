"""The driver's own cost: training steps whose sampler and learner cost nothing.

    python benchmarks/driver.py [--env sokoban] [--groups 8 63] [--env-workers 1] [--out FILE]

Everything of `moored train` is real (environments, tokenizer, rollouts, filter, advantages,
minibatches, logs) except the engine (`instant.py`): its sampler returns stored replies, at most
`--per-poll` at a time, and its learner returns zeros. The process is bound to one core. The table
has turns a second of the rollout and seconds of each phase, by the clock on the wall and by that of
the processor, which counts neither other processes nor waiting. `other` is metrics, logs and what
has no phase.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from harness import describe_machine, make_console, show_machine, write_record
from instant import InstantSampler
from rich.table import Table

from moored.cli.options import read_config
from moored.config import Config
from moored.train import Run, build_run, start, train_step

OPTIONS = [
    *("ppo", "model=mini", "optimizer.lr=1e-4", "rollout.max_response_tokens=80"),
    *("engine.kind=instant:InstantEngine", "log.rollouts_every=0", "collapse.every=0"),
    *("stop.low_variance=0", "stop.min_success=0"),
]
WARM_UP = 2
"""Steps before measuring: environments are made, and caches filled."""
CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "processor": time.process_time,
}


@contextmanager
def timed(run: Run, phase: str) -> Iterator[None]:
    """As `Run.timed`, by both clocks."""
    starts = {name: clock() for name, clock in CLOCKS.items()}
    yield
    for name, clock in CLOCKS.items():
        key = f"{name} {phase}"
        run.seconds[key] = run.seconds.get(key, 0.0) + clock() - starts[name]


def measure(config: Config, per_poll: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over steps, for each clock: turns a second, seconds of a step and of its phases."""
    with tempfile.TemporaryDirectory() as folder, patch.object(Run, "timed", timed):
        run = build_run(config, Path(folder) / "run")
        assert isinstance(run.engine.sampler, InstantSampler)
        run.engine.sampler.per_poll = per_poll
        try:
            start(run)
            steps = [_measure_step(run, step) for step in range(1, WARM_UP + repeats + 1)]
        finally:
            run.close()
    return {
        clock: {
            name: median(step[clock][name] for step in steps[WARM_UP:]) for name in steps[-1][clock]
        }
        for clock in CLOCKS
    }


def _measure_step(run: Run, step: int) -> dict[str, dict[str, float]]:
    begins = {name: clock() for name, clock in CLOCKS.items()}
    record = train_step(run, step)
    found = {name: {"step": clock() - begins[name]} for name, clock in CLOCKS.items()}
    for key, seconds in record.seconds.items():
        name, _, phase = key.partition(" ")
        found[name][phase] = seconds
    num_turns = record.metrics["rollout/turns_mean"] * run.config.rollout.num_groups
    num_turns *= run.config.rollout.group_size
    return {
        name: {
            "turns": num_turns,
            "turns_per_s": num_turns / seconds["rollout"],
            **{f"{phase}_s": part for phase, part in seconds.items()},
            "other_s": 2 * seconds["step"] - sum(seconds.values()),
        }
        for name, seconds in found.items()
    }


def bind_to_one_core() -> None:
    """All threads of this process on one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def profile(config: Config, per_poll: int, repeats: int) -> None:
    """Print where the time goes, but for calls of environments, which run in another thread."""
    profiler = cProfile.Profile()
    profiler.runcall(measure, config, per_poll, repeats)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a training step costs the driver.")
    parser.add_argument("--env", nargs="+", default=["sokoban"], help="presets of environments")
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 63])
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--env-workers", type=int, nargs="+", default=[1])
    parser.add_argument("--per-poll", type=int, default=64, help="most replies that end at once")
    parser.add_argument("--repeats", type=int, default=9, help="measured steps")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more options")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(words)


def make_config(given: argparse.Namespace, env: str, num_groups: int, workers: int) -> Config:
    rollout = {"num_groups": num_groups, "group_size": given.group_size, "env_workers": workers}
    options = [f"rollout.{name}={value}" for name, value in rollout.items()]
    return read_config([env, *OPTIONS, *options, *given.set])


def make_table(title: str, found: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("", title=title, min_width=len(title))
    for clock in found:
        table.add_column(clock, justify="right")
    for name in found["wall"]:
        values = (figures[name] for figures in found.values())
        table.add_row(name, *(f"{v:,.0f}" if "turns" in name else f"{v:.4f}" for v in values))
    return table


def main(words: Sequence[str] | None = None) -> int:
    given = parse_arguments(words)
    bind_to_one_core()
    console, figures = make_console(), {}
    for case in itertools.product(given.env, given.groups, given.env_workers):
        config = make_config(given, *case)
        if given.profile:
            profile(config, given.per_poll, given.repeats)
            continue
        name = "{}, {} x {} episodes, env_workers={}".format(*case[:2], given.group_size, case[2])
        figures[name] = measure(config, given.per_poll, given.repeats)
        console.print(make_table(name, figures[name]))
    machine = describe_machine(torch.device("cpu"), bf16=False)
    show_machine(console, machine)
    write_record(given.out, machine, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
