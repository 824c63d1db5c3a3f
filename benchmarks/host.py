"""What a rollout costs the host, per turn: everything except the model.

    python benchmarks/host.py [--model mini] [--groups 8] [--group-size 16] [--out FILE]

Sokoban is played for exactly `--turns` turns with a stream that returns canned replies at once, so
no model runs. The table splits a turn's microseconds: the renderer's calls, the environment, the
stand-in for the sampler, and the rest of the loop (requests, records, trajectories).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table
from rollout import MAX_CONTEXT, EndlessSokoban, Pen, make_tasks

from moored.config import RolloutConfig
from moored.engine.base import LockstepStream, Request, SamplingParams
from moored.envs.base import StepResult
from moored.models.load import load_model
from moored.reply import format_reply
from moored.rollout.episodes import roll_out
from moored.rollout.pool import EnvPool
from moored.rollout.render import Renderer
from moored.types import Completion, FinishReason, Message

ACTIONS = ("Up", "Down", "Left", "Right")
THOUGHTS = (
    "The box is right of me and the target is below it.",
    "I am above the box. Pushing down moves it onto the target, so I go down twice.",
    "The wall is on the left, so I walk around the box first.",
    "Box at row 3, column 2; target at row 3, column 4. Push right.",
)


class Clock:
    """Adds up the processor seconds of named calls, so that other processes do not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.is_running = False

    def timed(self, name: str, call: Callable) -> Callable:
        def wrapped(*args: object) -> object:
            if not self.is_running:
                return call(*args)
            start = time.thread_time()
            found = call(*args)
            self.seconds[name] += time.thread_time() - start
            return found

        return wrapped


class TimedSokoban(EndlessSokoban):
    """Sokoban whose calls are timed."""

    def __init__(self, max_turns: int, clock: Clock) -> None:
        super().__init__(max_turns)
        self._timed_reset = clock.timed("environment: reset", super().reset)
        self._timed_step = clock.timed("environment: step", super().step)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        return self._timed_reset(task_seed, episode_seed)

    def step(self, reply: str) -> StepResult:
        return self._timed_step(reply)


class CannedSampler:
    """Gives one of a few replies, chosen by the request's seed."""

    def __init__(self, renderer: Renderer, clock: Clock) -> None:
        self._replies = [_completion(renderer, text) for text in canned_replies()]
        self.generate = clock.timed("canned replies", self._generate)

    def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        return [self._replies[request.seed % len(self._replies)] for request in requests]

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Nothing is kept."""


def canned_replies() -> list[str]:
    """64 replies: every thought before every pair of actions."""
    return [
        format_reply(thought, f"{first} || {second}")
        for thought in THOUGHTS
        for first in ACTIONS
        for second in ACTIONS
    ]


def _completion(renderer: Renderer, text: str) -> Completion:
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    ids = np.array([*ids, renderer.stop_ids[0]], dtype=np.int64)
    return Completion(ids, np.zeros(len(ids), np.float32), FinishReason.STOP)


def measure(renderer: Renderer, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Play all episodes again and again; seconds of each part, and of everything."""
    clock = Clock()
    play = partial(
        roll_out,
        make_tasks(
            arguments.groups, arguments.group_size, partial(TimedSokoban, arguments.turns, clock)
        ),
        engine=Pen(CannedSampler(renderer, clock), _timed_renderer(renderer, clock)),
        options=RolloutConfig(max_response_tokens=80, max_context=MAX_CONTEXT),
    )
    rounds = []
    with EnvPool() as pool:
        # In the first round environments are made and caches filled. The parts and everything are
        # timed in turn, because reading clocks takes time too.
        for number in range(2 * (arguments.repeats + 1)):
            clock.is_running = number % 2 == 0
            start = time.process_time()
            play(seed=(number,), pool=pool)
            total = time.process_time() - start
            if not clock.is_running:
                rest = total - sum(clock.seconds.values())
                rounds.append({**clock.seconds, "the loop itself": rest, "everything": total})
                clock.seconds.clear()
    return rounds[1:]


def _timed_renderer(renderer: Renderer, clock: Clock) -> Renderer:
    """The same renderer, its public calls timed."""
    timed = object.__new__(Renderer)
    timed.__dict__.update(renderer.__dict__)
    for name in ("start", "expect", "extend", "decode", "spans"):
        setattr(timed, name, clock.timed(f"renderer: {name}", getattr(renderer, name)))
    return timed


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The host's share of a rollout.")
    parser.add_argument("--model", default="mini", help="whose tokenizer: nano, mini, a folder")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds, after one apart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    renderer = Renderer(load_model(arguments.model, torch.device("cpu")).tokenizer)
    rounds = measure(renderer, arguments)
    num_turns = arguments.groups * arguments.group_size * arguments.turns
    figures = {
        part: 1e6 * statistics.median(found[part] for found in rounds) / num_turns
        for part in rounds[0]
    }
    title = f"{num_turns} turns of sokoban, {arguments.model}"
    table = Table("part", title=title)
    table.add_column("µs a turn", justify="right")
    for part, microseconds in sorted(figures.items(), key=lambda item: item[1]):
        table.add_row(part, f"{microseconds:.1f}")
    console, machine = make_console(), describe_machine(torch.device("cpu"), bf16=False)
    console.print(table)
    show_machine(console, machine)
    write_record(arguments.out, machine, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
