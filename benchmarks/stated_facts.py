"""Are the facts right that replies to Sokoban state, and do right ones help?

    python benchmarks/stated_facts.py MODEL [MODEL …] [--tasks 512] [--out FILE]

The demonstrations of the embedded models name the places of player, box and target in some replies
and none in others. One reply for each of the first validation tasks at temperature 1, in the form
of the model cards: one turn with a plan of up to 10 moves. Successes have 95 % Wilson intervals.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table

from moored.config import Config, load_config
from moored.diagnostics.resampling import wilson_interval
from moored.engine.build import build_engine
from moored.engine.device import pick_device
from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import EnvMix
from moored.rollout.episodes import Task, roll_out

ENV = {"name": "sokoban", "options": {"max_turns": 1, "max_actions_per_turn": 10}}
CELL = r"\((\d+), (\d+)\)"
STATED = (rf"(?:Player|I am) at {CELL}", rf"box at {CELL}", rf"target at {CELL}")
TRUE = (rf"Player: \[?{CELL}", rf"Boxes: \[?{CELL}", rf"Targets: \[?{CELL}")


class Reply(NamedTuple):
    has_facts: bool
    """It names the places of all three."""
    is_right: bool
    """All of them are where it says."""
    succeeds: bool


def places(patterns: Sequence[str], text: str) -> list[tuple[str, ...]] | None:
    """Rows and columns of player, box and target; None unless all are there."""
    found = [re.search(pattern, text) for pattern in patterns]
    return [match.groups() for match in found if match] if all(found) else None


def judge(observation: str, reply: str, *, succeeds: bool) -> Reply:
    """What a reply says, beside what it was shown."""
    stated, true = places(STATED, reply), places(TRUE, observation)
    assert true is not None, observation
    return Reply(stated is not None, stated == true, succeeds)


def validation_tasks(config: Config, numbers: Iterable[int], group_size: int = 1) -> list[Task]:
    """Validation tasks of the only environment of a configuration, by number."""
    mix, first = EnvMix(config.env), SPLIT_SEEDS["validation"].start
    return [
        Task(
            group_id=number,
            env=mix.names[0],
            make_env=mix.makers[0],
            task_seed=first + number,
            episode_seeds=tuple(range(group_size)),
        )
        for number in numbers
    ]


def replies_of(model: str, num_tasks: int) -> list[Reply]:
    """One for each task."""
    config = load_config(
        {
            "model": model,
            "env": ENV,
            "rollout": {"max_response_tokens": 128, "max_context": 2048},
        }
    )
    tasks = validation_tasks(config, range(num_tasks))
    with closing(build_engine(config, trains=False)) as engine:
        groups = roll_out(tasks, engine=engine, options=config.rollout, temperature=1.0, seed=(0,))
    found = []
    with closing(tasks[0].make_env()) as env:
        for group in groups:
            (trajectory,) = group.trajectories
            seen = env.reset(group.task_seed)[-1].text
            found.append(judge(seen, trajectory.turns[0].reply, succeeds=trajectory.success))
    return found


def summarize(replies: Sequence[Reply]) -> dict[str, list[float]]:
    """Shares, and the successes of each kind of reply with their intervals."""
    stating = [reply for reply in replies if reply.has_facts]
    kinds = {
        "right facts": [reply for reply in stating if reply.is_right],
        "wrong facts": [reply for reply in stating if not reply.is_right],
        "no facts": [reply for reply in replies if not reply.has_facts],
    }
    found = {}
    for name, own in kinds.items():
        found[f"replies with {name}"] = [len(own) / len(replies)]
        if own:
            succeeded = sum(reply.succeeds for reply in own)
            found[f"success of these, {name}"] = [
                succeeded / len(own),
                *wilson_interval(succeeded, len(own)),
            ]
    return found


def shown(figures: Sequence[float] | None) -> str:
    """A share, and its interval where it has one."""
    if figures is None:
        return ""
    share, *interval = (f"{figure:.3f}" for figure in figures)
    return f"{share} [{', '.join(interval)}]" if interval else share


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Are facts right that replies state?")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name or a folder")
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(words)
    figures = {name: summarize(replies_of(name, options.tasks)) for name in options.models}
    table = Table("share", *figures)
    for row in dict.fromkeys(row for own in figures.values() for row in own):
        table.add_row(row, *(shown(own.get(row)) for own in figures.values()))
    console, machine = make_console(), describe_machine(pick_device("auto"), bf16=False)
    console.print(table)
    show_machine(console, machine)
    write_record(options.out, machine, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
