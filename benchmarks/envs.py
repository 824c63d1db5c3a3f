"""How fast the environments are, against the targets; `--fuzz N` feeds each N hostile replies.

    python benchmarks/envs.py [--json FILE] [--fuzz 10000] [--only sokoban]

Exit code 1 when a target is missed. One process, one core, wall clock (time.perf_counter);
rates are the best of three:
reset+render   median of 300 resets of different tasks: draw the task, write both messages
replies/s      whole steps: parse a reply of the oracle, act, score, render (reset not counted)
actions/s      `act` alone, random actions: the board's dynamics without text
rooms/s        Sokoban rooms: `make_task` alone, and whole resets (which also draw for the split)
"""

from __future__ import annotations

import argparse
import json
import math
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

from moored.envs import ENVIRONMENTS, Environment, format_reply
from moored.envs.check_probe import expect_result, time_reply
from moored.envs.game import Game
from moored.envs.mix import make_env
from moored.envs.nasty import EXECUTED, fuzz_replies

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


def measure_replies(name: str) -> Measurement:
    env = make_env(name)
    scripts = [(seed, _oracle_replies(env, seed)) for seed in range(50)]

    def rate() -> float:
        elapsed, num_replies = 0.0, 0
        for seed, replies in scripts:
            env.reset(seed)
            elapsed += _seconds(lambda replies=replies: [env.step(reply) for reply in replies])
            num_replies += len(replies)
        return num_replies / elapsed

    return Measurement(name, "replies/s", max(rate() for _ in range(REPEATS)), "1/s")


def measure_actions(name: str, game: Game) -> Measurement:
    def rate(repeat: int) -> float:
        elapsed, num_actions, rng = 0.0, 0, random.Random(repeat)
        for seed in range(100):
            game.reset(seed)
            actions = rng.choices(game.actions, k=50)
            start = time.perf_counter()
            for action in actions:
                num_actions += 1
                if game.act(action).done:
                    break
            elapsed += time.perf_counter() - start
        return num_actions / elapsed

    best = max(rate(repeat) for repeat in range(REPEATS))
    return Measurement(name, "actions/s", best, "1/s", ACTIONS_PER_S.get(name))


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
    env = make_env(name)
    answers = [reply.partition("<answer>")[2][:-9] for reply in _oracle_replies(env, 0)]
    slowest_s, seed, done = 0.0, 0, True
    for reply in fuzz_replies(random.Random(0), count, answers=answers):
        if done:
            seed += 1
            env.reset(seed)
        start = time.perf_counter()
        result = env.step(reply)
        elapsed_s = time.perf_counter() - start
        if elapsed_s > REPLY_LIMIT_S:  # the machine may have been busy: once more, by itself
            elapsed_s = time_reply(env, seed, reply, REPLY_LIMIT_S)
            done = True
        else:
            done = expect_result(result).done
        assert math.isfinite(result.reward) and not EXECUTED, (name, reply[:200])
        slowest_s = max(slowest_s, elapsed_s)
    what = f"slowest of {count} replies"
    return Measurement(name, what, slowest_s * 1e3, "ms", REPLY_LIMIT_S * 1e3, False)


def measure_env(name: str, num_fuzz: int) -> list[Measurement]:
    found = [measure_reset(name), measure_replies(name)]
    env = make_env(name)
    if isinstance(env, Game):
        found.append(measure_actions(name, env))
    if name == "sokoban":
        found += [row for label in ROOMS for row in measure_rooms(label)]
    if num_fuzz:
        found.append(measure_fuzz(name, num_fuzz))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the environments against the targets.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="hostile replies per env")
    parser.add_argument("--only", choices=list(ENVIRONMENTS), help="measure one environment")
    args = parser.parse_args()
    names = [args.only] if args.only else list(ENVIRONMENTS)
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
    return {"python": platform.python_version(), "measurements": numbers}


def _oracle_replies(env: Environment, seed: int) -> list[str]:
    env.reset(seed)
    replies: list[str] = []
    for _ in range(env.max_turns):
        replies.append(format_reply("I think so.", env.oracle()))
        if env.step(replies[-1]).done:
            break
    return replies


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
