"""How fast the environments are, against the targets; `--fuzz N` feeds each N hostile replies.

    python benchmarks/envs.py [--json FILE] [--fuzz 10000] [--only sokoban]

Exit code 1 when a target is missed. One process, one core, wall clock (time.perf_counter);
rates are the best of three:
reset+render   median of 300 resets of different tasks: draw the task, write both messages
replies/s      `step`: parse a reply of the oracle, act, score, render (reset not counted)
actions/s      in whole replies: the same, counted in actions; board alone: `act` on random actions
rooms/s        Sokoban rooms: `make_task` alone, and whole resets (which also draw for the split)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from moored.envs import Environment, format_reply
from moored.envs.check.nasty import EXECUTED, fuzz_replies
from moored.envs.check.probe import Probe, play_oracle, shorten, time_reply
from moored.envs.check.types import Broken
from moored.envs.describe import playable_names
from moored.envs.game import Game
from moored.envs.mix import make_env, open_env
from moored.reply import parse_reply

NUM_RESETS = 300
REPEATS = 3
RESET_LIMIT_MS = 1.0
SLOW_RESET_LIMIT_MS = {"sudoku": 5.0, "metamath": 5.0}
ACTIONS_PER_S = {"sokoban": 100_000.0}
ROOMS = {"6x6, 1 box": (6, 1, 2_000.0), "8x8, 2 boxes": (8, 2, 200.0)}
"""Name -> side, boxes, rooms per second to reach."""
REPLY_LIMIT_S = 0.05


@dataclass(frozen=True)
class Measurement:
    """One number, and the target it should reach, if any."""

    env: str
    what: str
    value: float
    unit: str
    target: float | None = None
    more_is_better: bool = True

    @property
    def is_missed(self) -> bool:
        if self.target is None:
            return False
        return self.value < self.target if self.more_is_better else self.value > self.target


def measure_reset(name: str) -> Measurement:
    env = make_env(name)
    for seed in range(NUM_RESETS, NUM_RESETS + 20):
        env.reset(seed)  # warm-up, on tasks that are not measured
    times = [_seconds(lambda seed=seed: env.reset(seed)) for seed in range(NUM_RESETS)]
    limit = SLOW_RESET_LIMIT_MS.get(name, RESET_LIMIT_MS)
    value = median(times) * 1e3
    return Measurement(name, "reset+render", value, "ms", limit, more_is_better=False)


def measure_replies(name: str, env: Environment) -> list[Measurement]:
    scripts = [(seed, _oracle_replies(env, seed)) for seed in range(50)]

    def rates() -> tuple[float, float]:
        elapsed, num_replies, num_actions = 0.0, 0, 0.0
        for seed, replies in scripts:
            env.reset(seed)
            start = time.perf_counter()
            results = [env.step(reply) for reply in replies]
            elapsed += time.perf_counter() - start
            num_replies += len(replies)
            num_actions += sum(result.metrics.get("num_actions", 0.0) for result in results)
        return num_replies / elapsed, num_actions / elapsed

    replies, actions = (max(best) for best in zip(*(rates() for _ in range(REPEATS)), strict=True))
    found = [Measurement(name, "replies/s", replies, "1/s")]
    if actions:
        found.append(Measurement(name, "actions/s, whole replies", actions, "1/s"))
    return found


def measure_actions(name: str, game: Game) -> Measurement:
    def rate(repeat: int) -> float:
        elapsed, num_actions, rng = 0.0, 0, random.Random(repeat)
        for seed in range(100):
            game.reset(seed)
            actions = rng.choices(game.actions, k=50)
            start = time.perf_counter()
            for action in actions:
                num_actions += 1
                if game.act(action).terminated:
                    break
            elapsed += time.perf_counter() - start
        return num_actions / elapsed

    best = max(rate(repeat) for repeat in range(REPEATS))
    return Measurement(name, "actions/s, board alone", best, "1/s", ACTIONS_PER_S.get(name))


def measure_rooms(label: str) -> list[Measurement]:
    side, boxes, target = ROOMS[label]
    env = make_env("sokoban", rows=side, cols=side, boxes=boxes)
    assert isinstance(env, Game)
    count = int(target)

    def draw(repeat: int) -> None:
        rng = random.Random(repeat)
        for _ in range(count):
            env.make_task(rng)

    def reset(repeat: int) -> None:
        for seed in range(count * repeat, count * (repeat + 1)):
            env.reset(seed)

    drawn, resets = (
        max(count / _seconds(lambda call=call, k=k: call(k)) for k in range(REPEATS))
        for call in (draw, reset)
    )
    return [
        Measurement("sokoban", f"rooms/s {label}", drawn, "1/s", target),
        Measurement("sokoban", f"resets/s {label}", resets, "1/s"),
    ]


def measure_fuzz(name: str, count: int) -> Measurement:
    """Slowest of `count` hostile replies in ms; any exception ends the program."""
    with open_env(name) as env:
        slowest_s = time_fuzzed_replies(Probe(env), count, REPLY_LIMIT_S)
    what = f"slowest of {count} replies"
    return Measurement(name, what, slowest_s * 1e3, "ms", REPLY_LIMIT_S * 1e3, False)


def measure_env(name: str, num_fuzz: int | None) -> list[Measurement]:
    with open_env(name) as env:
        found = [measure_reset(name), *measure_replies(name, env)]
    if isinstance(env, Game):
        found.append(measure_actions(name, env))
    if name == "sokoban":
        found += [row for label in ROOMS for row in measure_rooms(label)]
    if num_fuzz:
        found.append(measure_fuzz(name, num_fuzz))
    return found


def time_fuzzed_replies(env: Probe, count: int, limit_s: float) -> float:
    """Seconds the slowest of `count` hostile replies took, over many tasks and turns.

    Raises whatever the environment raises, and Broken when it ran one of them.
    """
    scripts = [play_oracle(env, seed)[0] for seed in range(5)]
    answers = [parse_reply(reply).answer or "" for replies in scripts for reply in replies]
    slowest_s, seed, played = 0.0, 0, []
    env.reset(seed)
    for reply in fuzz_replies(random.Random(0), count, answers=answers):
        start = time.perf_counter()
        result = env.step(reply)
        elapsed_s = time.perf_counter() - start
        if not math.isfinite(result.reward) or EXECUTED:
            raise Broken(f"step({shorten(reply)}) earned {result.reward}, or ran code of the reply")
        is_slow = elapsed_s > limit_s
        if is_slow:  # the machine may have been busy: once more, by itself
            elapsed_s = time_reply(env, seed, reply, limit_s, played)
        slowest_s = max(slowest_s, elapsed_s)
        played.append(reply)
        if result.is_over or is_slow:
            seed, played = seed + 1, []
            env.reset(seed)
    return slowest_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the environments against the targets.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--fuzz", type=_count, metavar="N", help="hostile replies per environment")
    parser.add_argument("--only", choices=playable_names(), help="measure one environment")
    args = parser.parse_args()
    names = [args.only] if args.only else playable_names()
    console = Console()
    rows: list[Measurement] = []
    for name in names:
        with Console(stderr=True).status(f"measuring {name}"):
            rows += measure_env(name, args.fuzz)
    console.print(__doc__, style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(rows))
    if args.json:
        args.json.write_text(json.dumps(_record(rows), indent=2) + "\n", encoding="utf-8")
    missed = [row for row in rows if row.is_missed]
    console.print(f"{len(missed)} targets missed." if missed else "All targets reached.")
    return 1 if missed else 0


def _table(rows: list[Measurement]) -> Table:
    table = Table("environment", "what", title=f"Python {platform.python_version()}, one core")
    for column in ("measured", "target"):
        table.add_column(column, justify="right")
    for row in rows:
        sign = "≥" if row.more_is_better else "≤"
        target = "" if row.target is None else f"{sign} {row.target:,.0f} {row.unit}"
        number = f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.3f}"
        style = "red" if row.is_missed else None
        table.add_row(row.env, row.what, f"{number} {row.unit}", target, style=style)
    return table


def _record(rows: list[Measurement]) -> dict[str, object]:
    numbers = [asdict(row) | {"is_missed": row.is_missed} for row in rows]
    return {
        "command": f"python benchmarks/envs.py {' '.join(sys.argv[1:])}".strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "measurements": numbers,
    }


def _oracle_replies(env: Environment, seed: int) -> list[str]:
    env.reset(seed)
    replies: list[str] = []
    for _ in range(env.max_turns):
        replies.append(format_reply("I think so.", env.oracle()))
        if env.step(replies[-1]).is_over:
            break
    return replies


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
