"""The alarm on finished runs of the bottle: does it go off, when, and where it should not?

    python benchmarks/alarm.py benchmarks/results/bottle_*.json

A run *collapses* when MI over its last four looks averages below a third of its highest. MI *has
fallen* at the first look from which on it stays below half of what it had reached. Success *has
fallen* at the first step at which its mean over the last 20 steps is below 60 % of the highest such
mean so far, and stays below 80 %. The lead is the time from the alarm to that step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from bottle import up_to_shortest
from harness import make_console
from rich.table import Table

from moored.diagnostics.alarm import find_alarm

LAST_LOOKS, COLLAPSED, FALLEN_MI = 4, 1 / 3, 1 / 2
WINDOW, FALLEN, STAYS = 20, 0.6, 0.8

Curve = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in a run, and at which step; None: it did not happen."""

    study: str
    arm: str
    seed: int
    collapsed: bool
    mi_fell: int | None
    success_fell: int | None
    alarm: int | None


def mi_fell(curve: Curve) -> int | None:
    values = np.array([value for _, value in curve])
    best = np.maximum.accumulate(values)
    for place, (step, _) in enumerate(curve):
        if (values[place:] <= FALLEN_MI * best[place]).all():
            return int(step)
    return None


def success_fell(curve: Curve) -> int | None:
    values = np.array([value for _, value in curve])
    means = np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid")
    best = np.maximum.accumulate(means)
    for place in range(len(means)):
        if means[place] <= FALLEN * best[place] and (means[place:] <= STAYS * best[place]).all():
            return int(curve[place + WINDOW - 1][0])
    return None


def outcome(study: str, arm: str, run: dict) -> Outcome:
    curves = run["curves"]
    entropies = dict(map(tuple, curves["H(Z|X)"]))
    series = [(int(step), mi, entropies[step]) for step, mi in curves["MI"]]
    alarm = find_alarm(series)
    values = [mi for _, mi, _ in series]
    return Outcome(
        study=study,
        arm=arm,
        seed=run["seed"],
        collapsed=bool(np.mean(values[-LAST_LOOKS:]) < COLLAPSED * max(values)),
        mi_fell=mi_fell(curves["MI"]),
        success_fell=success_fell(curves["success"]),
        alarm=None if alarm is None else alarm.step,
    )


def summarise(study: str, found: Sequence[Outcome]) -> list[str]:
    """One row of the table."""
    collapsed = [run for run in found if run.collapsed]
    seen = [run for run in collapsed if run.alarm is not None]
    false = sum(run.alarm is not None for run in found if not run.collapsed)
    delays = [run.alarm - run.mi_fell for run in seen if run.alarm and run.mi_fell]
    leads = [run.success_fell - run.alarm for run in seen if run.alarm and run.success_fell]
    both = [run for run in collapsed if run.success_fell]
    return [
        study,
        f"{len(seen)} of {len(collapsed)}",
        f"{false} of {len(found) - len(collapsed)}",
        f"{median(delays):g} ({min(delays)} to {max(delays)})" if delays else "–",
        f"{sum(lead > 0 for lead in leads)} of {len(both)}",
        f"{median(leads):g} ({min(leads)} to {max(leads)})" if leads else "–",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The alarm on finished runs.")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--runs", action="store_true", help="also list every run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {
        file.stem: [
            outcome(file.stem, arm, run)
            for arm, runs in up_to_shortest(json.loads(file.read_text())["runs"]).items()
            for run in runs
        ]
        for file in given.records
    }
    everything = [run for runs in found.values() for run in runs]
    table = Table(
        *("", "alarms in collapsing runs", "false alarms", "steps after MI fell"),
        *("before success fell", "lead, steps"),
    )
    for study, runs in [*found.items(), ("all", everything)]:
        table.add_row(*summarise(study, runs))
    console = make_console()
    console.print(table)
    if given.runs:
        listing = Table("study", "arm", "seed", "collapsed", "MI fell", "success fell", "alarm")
        for run in everything:
            listing.add_row(*("–" if x is None else str(x) for x in asdict(run).values()))
        console.print(listing)
    if given.out:
        given.out.write_text(json.dumps([asdict(run) for run in everything], indent=1) + "\n")


if __name__ == "__main__":
    main()
