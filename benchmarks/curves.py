"""Start and end of every curve of a curve file: means over seeds with their 95 % intervals.

    python benchmarks/curves.py benchmarks/results/bottle_cpu_task.json

The start is the first 5 % of the steps, the end the last 20 %. Runs are compared up to the step
that all of them have reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from figure import interval
from rich.console import Console
from rich.table import Table

from moored.analysis.curve_files import Curve, StoredRun, read_curve_file, up_to_shortest

START, END = 0.05, 0.2
"""Shares of the steps."""


def start_of(curve: Curve) -> float:
    last = curve[-1][0]
    return mean([value for step, value in curve if step <= START * last] or [curve[0][1]])


def end_of(curve: Curve) -> float:
    last = curve[-1][0]
    return mean([value for step, value in curve if step > (1 - END) * last] or [curve[-1][1]])


def table_of(runs: Mapping[str, Sequence[StoredRun]]) -> list[list[str]]:
    """Header, then one line for each curve that all runs have."""
    runs = up_to_shortest(runs)
    everything = [run for of_arm in runs.values() for run in of_arm]
    names = [
        name
        for name in everything[0].curves
        if all(run.curves.get(name) for run in everything) and not name.endswith("error")
    ]
    lines = [["start → end", *runs]]
    for name in names:
        cells = []
        for of_arm in runs.values():
            curves = [run.curves[name] for run in of_arm]
            ends = (interval([of(curve) for curve in curves]) for of in (start_of, end_of))
            cells.append(" → ".join(f"{centre:.2f} ± {half:.2f}" for centre, half in ends))
        lines.append([name, *cells])
    lines.append(["last step", *(str(of_arm[0].last_step) for of_arm in runs.values())])
    alarms = [", ".join(str(run.alarm_step or "–") for run in of_arm) for of_arm in runs.values()]
    return [*lines, ["alarm at step", *alarms]]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Start and end of every curve.")
    parser.add_argument("file", type=Path)
    header, *lines = table_of(read_curve_file(parser.parse_args(words).file))
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
