"""Multi-turn rollouts: moored against `model.generate` that reads the whole dialogue every turn.

    python benchmarks/rollout.py [--model nano] [--device cpu] [--free] [--out FILE]

Both sides play the same Sokoban tasks in the same loop (rendering, parsing and environment steps
are inside the clock) with the same weights, precision, temperature and limits; only the sampler
differs. Replies are forced to `--reply-tokens` tokens and episodes to `--turns` turns, so both
write exactly as many tokens: the ratio is of that. `--free` also lets replies and episodes end
where they end; then the work differs by chance, and tokens per second are what to compare.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from harness import (
    PlainSampler,
    Timing,
    add_common_options,
    describe_machine,
    device_of,
    interleave,
    make_console,
    make_sampler,
    plain_model,
    show_machine,
    timing_table,
    write_record,
)

from moored.config import RolloutConfig
from moored.engine.base import Sampler
from moored.envs.base import Environment, StepResult
from moored.envs.mix import make_env
from moored.models.load import LoadedModel, load_model
from moored.rollout.episodes import Task, roll_out
from moored.rollout.pool import EnvPool
from moored.rollout.render import Renderer
from moored.types import Message

MAX_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Pen:
    """What episodes need of an engine."""

    sampler: Sampler
    renderer: Renderer


class EndlessSokoban:
    """Sokoban that always goes on to its last turn: a game that ends is started again."""

    name: ClassVar[str] = "sokoban"
    is_stochastic = False

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        # The game itself never reaches a limit of its own.
        self._game = make_env("sokoban", max_turns=max_turns + 1, max_actions=1000)
        self._task_seed, self._over = 0, False

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._task_seed, self._over = task_seed, False
        return self._game.reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        if self._over:
            self._game.reset(self._task_seed)
        result = self._game.step(reply)
        self._over = result.is_over
        return replace(result, terminated=False, truncated=False)

    def oracle(self) -> str:
        return self._game.oracle()

    def close(self) -> None:
        self._game.close()


def make_tasks(num_groups: int, group_size: int, make: Callable[[], Environment]) -> list[Task]:
    return [
        Task(
            group_id=seed,
            env="sokoban",
            make_env=make,
            task_seed=seed,
            episode_seeds=tuple(range(group_size)),
        )
        for seed in range(num_groups)
    ]


def compare(
    loaded: LoadedModel, arguments: argparse.Namespace, *, bf16: bool, forced: bool
) -> dict[str, Timing]:
    """Time both samplers on the same episodes."""
    renderer = Renderer(loaded.tokenizer)
    if forced:
        renderer.stop_ids = ()
    make: Callable[[], Environment] = partial(make_env, "sokoban", max_turns=arguments.turns)
    if forced:
        make = partial(EndlessSokoban, arguments.turns)
    tasks = make_tasks(arguments.groups, arguments.group_size, make)
    options = RolloutConfig(max_response_tokens=arguments.reply_tokens, max_context=MAX_CONTEXT)
    samplers: dict[str, Sampler] = {
        "moored": make_sampler(loaded.model, bf16=bf16, max_context=MAX_CONTEXT),
        "plain generate": PlainSampler(plain_model(loaded.model, bf16=bf16)),
    }
    torch.manual_seed(0)
    with EnvPool() as pool:
        calls = {
            name: _rollout_call(Pen(sampler, renderer), tasks, options, pool)
            for name, sampler in samplers.items()
        }
        return interleave(calls, arguments.repeats, loaded.model.device)


def _rollout_call(
    engine: Pen, tasks: Sequence[Task], options: RolloutConfig, pool: EnvPool
) -> Callable[[], int]:
    """A function that plays all tasks with fresh randomness and counts the sampled tokens."""
    numbers = itertools.count()

    def call() -> int:
        groups = roll_out(
            tasks,
            engine=engine,
            options=options,
            seed=(next(numbers),),
            pool=pool,
        )
        turns = (turn for g in groups for t in g.trajectories for turn in t.turns)
        return sum(len(turn.completion_ids) for turn in turns)

    return call


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Multi-turn rollouts against plain generate.")
    parser.add_argument("--model", default="nano", help="nano, mini, a folder or a hub id")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply-tokens", type=int, default=48)
    parser.add_argument("--free", action="store_true", help="also with replies that end themselves")
    add_common_options(parser, repeats=3)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    device, bf16 = device_of(arguments)
    machine = describe_machine(device, bf16=bf16)
    loaded = load_model(arguments.model, device)
    console, figures = make_console(), {}
    for forced in (True, False) if arguments.free else (True,):
        timings = compare(loaded, arguments, bf16=bf16, forced=forced)
        plain = timings["plain generate"].tokens_per_s
        speed_up = timings["moored"].tokens_per_s / plain
        name = "forced" if forced else "free"
        episodes = arguments.groups * arguments.group_size
        title = f"{arguments.model}, {episodes} episodes, {name} replies"
        console.print(timing_table(title, timings, {"plain generate": speed_up}))
        figures[name] = {sampler: timing.record() for sampler, timing in timings.items()}
        figures[name]["speed_up"] = speed_up
    show_machine(console, machine)
    write_record(arguments.out, machine, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
