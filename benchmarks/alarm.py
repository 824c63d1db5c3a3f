"""The operating curve of the collapse alarm: simulated series, then finished runs of the bottle.

    python benchmarks/alarm.py

False alarms are counted over 100 looks at series that do not change; falls go to a fifth. The delay
runs from the first look at which the true MI is at most half. `--seed` draws other series: the
bars were chosen on seeds 1 to 9. A finished run *collapses* when MI over its last four looks
averages below a third of its highest. MI *has fallen* at the first look from which on it stays
below half of what it had reached. Success *has fallen* at the first step at which its mean over the
last 20 steps is below 60 % of the highest such mean so far, and stays below 80 %. The lead is the
time from the alarm to that step. Writes `--out`, which
`benchmarks/figure.py` draws.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from curves import up_to_shortest
from rich.console import Console
from rich.table import Table

from moored import __version__
from moored.analysis.curves import Curve, StoredRun, read_curve_file
from moored.analysis.study_table import has_collapsed
from moored.diagnostics.alarm import MIN_LOOKS, AlarmRule, CollapseAlarm

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = ("bottle_*.json", "division_*.json")
NUM_LOOKS, FALL_TO = 100, 0.2
FALLS_AT = (15, 40)
"""Looks before a fall begins."""
FALLEN_MI = 1 / 2
WINDOW, FALLEN, STAYS = 20, 0.6, 0.8


@dataclass(frozen=True, slots=True)
class Noise:
    """Scatter around a mean of 1: standard deviation, and correlation of neighbours."""

    std: float
    correlation: float = 0.0

    def series(self, num_series: int, rng: np.random.Generator) -> np.ndarray:
        fresh = rng.normal(size=(num_series, NUM_LOOKS))
        kept, noise = math.sqrt(1.0 - self.correlation**2), fresh.copy()
        for look in range(1, NUM_LOOKS):
            noise[:, look] = self.correlation * noise[:, look - 1] + kept * fresh[:, look]
        return self.std * noise

    @property
    def standard_error(self) -> float:
        """What a look knows of its own noise: the part that the look before did not have."""
        return self.std * math.sqrt(1.0 - self.correlation**2)


PROMISED = tuple(Noise(std, phi) for phi in (0.0, 0.5, 0.8) for std in (0.05, 0.1, 0.2))
BEYOND = tuple(Noise(std, phi) for phi in (0.0, 0.5, 0.8) for std in (0.3, 0.4))
"""Noisier than what is promised."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of series and what the alarm does on it."""

    kind: str
    std: float
    correlation: float
    knows_errors: bool
    alarms: float
    """Share of series with an alarm: false ones, or after the fall began."""
    early: float = 0.0
    """Share of falling series with an alarm before the fall."""
    delay: float | None = None
    """Median, in looks."""


def bars(size: int, seed: int) -> Iterator[dict[str, float]]:
    """False and timely alarms where the bar stands elsewhere, at the worst noise."""
    rng, worst, true = np.random.default_rng(seed), Noise(0.2, 0.8), falling(40, 20)
    quiet, fallen = (base + worst.series(size, rng) for base in (1.0, true))
    halved = int(np.argmax(true <= 0.5))
    for bar in np.arange(0.2, 0.61, 0.04).round(2).tolist():
        rule = AlarmRule(max_share=bar)
        false = float((first_alarms(quiet, None, rule) < NUM_LOOKS).mean())
        timely = float((first_alarms(fallen, None, rule) <= halved + 4).mean())
        yield {"bar": bar, "false": false, "timely": timely}


def first_alarms(mi_ST: np.ndarray, errors_ST: np.ndarray | None, rule: AlarmRule) -> np.ndarray:
    """Look of the first alarm of each series; NUM_LOOKS where there is none."""
    first = np.full(len(mi_ST), NUM_LOOKS)
    for look in range(MIN_LOOKS - 1, NUM_LOOKS):
        errors = None if errors_ST is None else errors_ST[:, : look + 1]
        found = rule.apply(mi_ST[:, : look + 1], errors)
        first[(first == NUM_LOOKS) & (found.level_S <= found.limit_S)] = look
    return first


def falling(start: int, over: int) -> np.ndarray:
    """True MI: 1 before the look `start`, `FALL_TO` from `over` looks later on."""
    looks = np.arange(NUM_LOOKS)
    return 1.0 - (1.0 - FALL_TO) * np.clip((looks - start + 1) / over, 0.0, 1.0)


def still(kind: str, noise: Noise, knows: bool, size: int, rng: np.random.Generator) -> Cell:
    mi = 1.0 + noise.series(size, rng)
    if kind == "outlying first look":
        mi[:, 0] = 2.2
    if kind == "rising":
        mi *= 1.0 - 2 / 3 * np.exp(-np.arange(NUM_LOOKS) / 10)
    errors = np.full(mi.shape, noise.standard_error) if knows else None
    alarms = first_alarms(mi, errors, AlarmRule()) < NUM_LOOKS
    return Cell(kind, noise.std, noise.correlation, knows, float(alarms.mean()))


def fall(
    over: int, noise: Noise, knows: bool, size: int, rng: np.random.Generator, start: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First alarms, where the falls began, where MI was halved; half the series scale their noise
    with MI, as measured series do, and half keep it."""
    true = falling(start, over)
    scale = np.where(np.arange(size)[:, None] % 2, true, 1.0)
    mi = true + scale * noise.series(size, rng)
    errors = scale * np.full(mi.shape, noise.standard_error) if knows else None
    halved = int(np.argmax(true <= 0.5))
    return first_alarms(mi, errors, AlarmRule()), np.full(size, start), np.full(size, halved)


def falls(
    over: int,
    noise: Noise,
    knows: bool,
    size: int,
    rng: np.random.Generator,
    starts: Sequence[int] = FALLS_AT,
) -> Cell:
    parts = [fall(over, noise, knows, size // len(starts), rng, start) for start in starts]
    first, began, halved = (np.concatenate(part) for part in zip(*parts, strict=True))
    seen = (first >= began) & (first < NUM_LOOKS)
    return Cell(
        f"fall over {over}" + (f" from look {starts[0] + 1}" if len(starts) == 1 else ""),
        noise.std,
        noise.correlation,
        knows,
        float(seen.mean()),
        float((first < began).mean()),
        float(np.median(first[seen] - halved[seen])) if seen.any() else None,
    )


def simulate(size: int, seed: int) -> Iterator[Cell]:
    rng = np.random.default_rng(seed)
    for knows in (True, False):
        for noise in (*PROMISED, *BEYOND):
            yield still("still", noise, knows, size, rng)
        for noise in (Noise(0.2), Noise(0.2, 0.8)):
            yield still("rising", noise, knows, size, rng)
            yield still("outlying first look", noise, knows, size, rng)
        for noise in (Noise(0.05), Noise(0.2), Noise(0.2, 0.5), Noise(0.2, 0.8)):
            for over in (1, 5, 20):
                yield falls(over, noise, knows, size, rng)
        for noise in (Noise(0.05), Noise(0.1), Noise(0.2)):
            yield falls(1, noise, knows, size, rng, starts=(1,))


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


def outcome(study: str, arm: str, run: StoredRun) -> Outcome:
    """Judge a run in the view that its alarm follows: a swap's where it was measured."""
    entropies, errors = dict(run.followed("H(Z|X)")), dict(run.followed("MI, error"))
    lengths = dict(run.curves.get("reply tokens", ()))  # those of reasonings are not stored
    alarm = CollapseAlarm()
    for step, mi in run.followed("MI"):
        alarm.update(step, mi, entropies[step], errors.get(step), lengths.get(step))
    values = [mi for _, mi in run.followed("MI")]
    return Outcome(
        study=study,
        arm=arm,
        seed=run.seed,
        collapsed=has_collapsed(values),
        mi_fell=mi_fell(run.followed("MI")),
        success_fell=success_fell(run.curves["success"]),
        alarm=None if alarm.alarm is None else alarm.alarm.step,
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


def curve_table(cells: Sequence[Cell]) -> Table:
    table = Table("series", "noise/mean", "AR(1)", "errors known", "alarms", "too early", "delay")
    for cell in cells:
        table.add_row(
            cell.kind,
            f"{cell.std:g}",
            f"{cell.correlation:g}",
            "yes" if cell.knows_errors else "no",
            f"{cell.alarms:.1%}",
            f"{cell.early:.1%}" if cell.delay is not None else "–",
            "–" if cell.delay is None else f"{cell.delay:g}",
        )
    return table


def run_table(found: dict[str, list[Outcome]], everything: Sequence[Outcome]) -> Table:
    table = Table(
        *("", "alarms in collapsing runs", "false alarms", "steps after MI fell"),
        *("before success fell", "lead, steps"),
    )
    for study, runs in [*found.items(), ("all", everything)]:
        table.add_row(*summarise(study, runs))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="The operating curve of the alarm.")
    parser.add_argument("records", nargs="*", type=Path, help="default: all bottles stored")
    parser.add_argument("--series", type=int, default=4000, help="simulated series in each cell")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--runs", action="store_true", help="also list every run")
    parser.add_argument("--out", type=Path, default=RESULTS / "alarm.json")
    given = parser.parse_args()
    console = Console(width=140)
    cells = list(simulate(given.series, given.seed))
    console.print(curve_table(cells))
    found = {
        file.stem: [
            outcome(file.stem, arm, run)
            for arm, runs in up_to_shortest(read_curve_file(file)).items()
            for run in runs
        ]
        for file in given.records or sorted(file for p in RECORDS for file in RESULTS.glob(p))
    }
    everything = [run for runs in found.values() for run in runs]
    console.print(run_table(found, everything))
    if given.runs:
        listing = Table("study", "arm", "seed", "collapsed", "MI fell", "success fell", "alarm")
        for run in everything:
            listing.add_row(*("–" if x is None else str(x) for x in asdict(run).values()))
        console.print(listing)
    record = {
        "command": " ".join(["python", "benchmarks/alarm.py", *sys.argv[1:]]),
        "versions": {
            "moored": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "rule": asdict(AlarmRule()),
        "series": given.series,
        "seed": given.seed,
        "cells": [asdict(cell) for cell in cells],
        "bars": list(bars(given.series, given.seed)),
        "runs": [asdict(run) for run in everything],
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
