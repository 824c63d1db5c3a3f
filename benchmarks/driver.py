"""The driver's own cost: training steps whose sampler and learner cost nothing.

    python benchmarks/driver.py [--env sokoban] [--groups 8 63] [--env-workers 1] [--out FILE]
    python benchmarks/driver.py --env sokoban env=burning:Burning --env-actors 0 2

Everything of `moored train` is real (environments, tokenizer, rollouts, filter, advantages,
minibatches, logs) except the engine (`instant.py`): its sampler returns stored replies, at most
`--per-poll` at a time, and its learner returns zeros. The process is bound to one core. The table
has turns a second of the rollout and seconds of each phase, by the clock on the wall and by that of
the processor, which counts neither other processes nor waiting. `other` is metrics, logs and what
has no phase. `--env-actors` puts environments into processes of a Ray cluster on this machine,
which may use all cores; `burning:Burning` is Sokoban with 2 ms of processor time in every call.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from harness import describe_machine, make_console, show_machine, write_record
from instant import InstantSampler
from rich.table import Table

from moored.cli.options import read_config
from moored.config import Config
from moored.engine.ray.cluster import Cluster
from moored.engine.ray.env_pool import ActorPool
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
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.object(Run, "timed", timed))
        run = build_run(config, Path(folder) / "run")
        assert isinstance(run.engine.sampler, InstantSampler)
        run.engine.sampler.per_poll = per_poll
        num_actors = config.engine.ray.env_actors
        if num_actors:
            cluster = Cluster(config, num_learners=0, num_env_actors=num_actors)
            stack.callback(cluster.close)
            run.pool = ActorPool(cluster, config, lambda event: print(event.text))
        stack.callback(run.close)
        start(run)
        steps = [_measure_step(run, step) for step in range(1, WARM_UP + repeats + 1)]
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
    parser.add_argument("--env-actors", type=int, nargs="+", default=[0])
    parser.add_argument("--per-poll", type=int, default=64, help="most replies that end at once")
    parser.add_argument("--repeats", type=int, default=9, help="measured steps")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more options")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(words)


def make_config(
    given: argparse.Namespace, env: str, num_groups: int, workers: int, actors: int
) -> Config:
    rollout = {"num_groups": num_groups, "group_size": given.group_size, "env_workers": workers}
    options = [f"rollout.{name}={value}" for name, value in rollout.items()]
    options.append(f"engine.ray.env_actors={actors}")
    return read_config([env, *OPTIONS, *options, *given.set])


@contextmanager
def cluster_here(is_needed: bool) -> Iterator[list[str]]:
    """A Ray cluster on this machine, begun before this process is bound to a core; its options."""
    if not is_needed:
        yield []
        return
    from ray.cluster_utils import Cluster as Nodes

    head: dict[str, Any] = {"num_cpus": 16, "object_store_memory": 100_000_000}
    # Ray's own default is 15: whatever else runs on the machine would come first.
    head["_system_config"] = {"worker_niceness": 0}
    nodes = Nodes(initialize_head=True, head_node_args=head)
    try:
        yield [f"engine.ray.address={nodes.address}"]
    finally:
        nodes.shutdown()


def name_case(
    given: argparse.Namespace, env: str, num_groups: int, workers: int, actors: int
) -> str:
    place = f", env_actors={actors}" if actors else ""
    return f"{env}, {num_groups} x {given.group_size} episodes, env_workers={workers}{place}"


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
    console, figures = make_console(), {}
    with cluster_here(any(given.env_actors)) as options:
        bind_to_one_core()
        given.set += options
        for case in itertools.product(given.env, given.groups, given.env_workers, given.env_actors):
            config = make_config(given, *case)
            if given.profile:
                profile(config, given.per_poll, given.repeats)
                continue
            name = name_case(given, *case)
            figures[name] = measure(config, given.per_poll, given.repeats)
            console.print(make_table(name, figures[name]))
    machine = describe_machine(torch.device("cpu"), bf16=False)
    show_machine(console, machine)
    write_record(given.out, machine, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
