"""Start and end of every curve of a curve file: means over seeds with their 95 % intervals.

    python benchmarks/curves.py benchmarks/results/bottle_cpu_task.json
    python benchmarks/curves.py benchmarks/results/smollm2_sokoban_grpo.json --each
    python benchmarks/curves.py benchmarks/results/{bottle,curves}_*.json --growth "reply tokens"

The start is the first 5 % of the steps, the end the last 20 %. Runs are compared up to the step
that all of them have reached. `--each` prints every run instead: means over the first and the last
10 steps, the first and the last look, the mean of each arm, and by seed the filter against none,
no division against GRPO, moored's engine and LoRA against the model's own code. `--growth` counts
the runs of several files in which a curve ends higher than it starts, those that collapsed apart; a
run that two files have counts once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from moored.analysis.compare import half_width
from moored.analysis.curves import (
    LOOK_CURVES,
    STEP_CURVES,
    Curve,
    StoredRun,
    read_all,
    read_curve_file,
)
from moored.analysis.study_table import has_collapsed
from moored.cli.console import counted
from moored.errors import ConfigError

START, END = 0.05, 0.2
"""Shares of the steps."""
FEW_STEPS = 10
EACH = {
    "success": STEP_CURVES,
    "MI, swap": LOOK_CURVES,
    "MI": LOOK_CURVES,
    "H(Z|X)": LOOK_CURVES,
    "retrieval": LOOK_CURVES,
    "validity": STEP_CURVES,
    "reply tokens": STEP_CURVES,
}
"""What `--each` shows, and where it comes from."""
PAIRS = (
    *(("top_p", "none"), ("outcome", "none"), ("no_division", "grpo")),
    *(("moored", "plain"), ("lora", "plain")),
)
"""Arms of one factor that `--each` compares by seed, where the others are the same."""


def up_to_shortest(runs: Mapping[str, Sequence[StoredRun]]) -> dict[str, list[StoredRun]]:
    """All runs up to the step that every one of them has reached."""
    last = min(run.last_step for of_arm in runs.values() for run in of_arm)
    return {arm: [_cut(run, last) for run in of_arm] for arm, of_arm in runs.items()}


def _cut(run: StoredRun, last: int) -> StoredRun:
    curves = {
        name: [(step, value) for step, value in curve if step <= last]
        for name, curve in run.curves.items()
    }
    alarm = run.alarm_step if run.alarm_step is not None and run.alarm_step <= last else None
    return replace(run, curves=curves, alarm_step=alarm)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval; nan with one seed."""
    half = half_width(values)
    return mean(values), math.nan if half is None else half


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


def lines_of_runs(runs: Mapping[str, Sequence[StoredRun]]) -> list[list[str]]:
    """Header, a line for each run, and the mean of each arm; a dash where nothing was measured."""
    lines = [["first → last", "seed", *EACH]]
    for arm, of_arm in runs.items():
        lines += [[arm, str(run.seed), *(_shown([run], name) for name in EACH)] for run in of_arm]
        if len(of_arm) > 1:
            lines.append([arm, "mean", *(_shown(of_arm, name) for name in EACH)])
    return lines


def paired_line(runs: Mapping[str, Sequence[StoredRun]], one: str, other: str) -> list[str]:
    """The end of one arm minus that of another, by seed: means with their 95 % intervals."""
    ends = [{run.seed: run for run in runs[arm]} for arm in (one, other)]
    seeds = sorted(set.intersection(*map(set, ends)))
    cells = []
    for name in EACH:
        pairs = [[ends_of(by_seed[seed], name) for by_seed in ends] for seed in seeds]
        found = [a[1] - b[1] for a, b in pairs if a is not None and b is not None]
        centre, half = interval(found) if found else (math.nan, math.nan)
        spread = "" if math.isnan(half) else f" ± {half:.2f}"
        cells.append(f"{centre:+.2f}{spread}" if found else "–")
    return [f"{one} − {other}", counted(len(seeds), "pair"), *cells]


def pairs_of(names: Collection[str]) -> list[tuple[str, str]]:
    """`a/top_p` and `a/none` of all combinations of arms, and so on."""
    found = []
    for name in names:
        arms = name.split("/")
        for one, other in PAIRS:
            partner = "/".join(other if arm == one else arm for arm in arms)
            if partner != name and partner in names:
                found.append((name, partner))
    return found


def growth_lines(files: Sequence[Path], name: str) -> list[list[str]]:
    """Header, and by arm (of the last factor) how many runs end with more than they start with."""
    counts: dict[str, dict[bool, list[bool]]] = {}
    for run in read_all(files)[0]:
        if curve := list(run.diagnostics.get(name, {}).items()):
            mi = list(run.diagnostics["MI"].values())
            by_end = counts.setdefault(run.arm, {True: [], False: []})
            by_end[has_collapsed(mi)].append(end_of(curve) > start_of(curve))
    lines = [[f"{name} grows in", "of those that collapsed", "of the others"]]
    for arm, by_end in counts.items():
        lines.append([arm, *(f"{sum(by_end[k])} of {len(by_end[k])}" for k in (True, False))])
    return lines


def ends_of(run: StoredRun, name: str) -> tuple[float, float] | None:
    """Means over the first and last steps of a curve; of looks the first and the last one."""
    values = [value for _, value in run.curves.get(name, ())]
    count = FEW_STEPS if EACH[name] is STEP_CURVES else 1
    return (mean(values[:count]), mean(values[-count:])) if values else None


def _shown(runs: Sequence[StoredRun], name: str) -> str:
    found = [ends for run in runs if (ends := ends_of(run, name)) is not None]
    if not found:
        return "–"
    first, last = (mean(part) for part in zip(*found, strict=True))
    digits = 0 if max(first, last) > 10 else 2
    return f"{first:.{digits}f} → {last:.{digits}f}"


def _lines(options: argparse.Namespace) -> list[list[str]]:
    if options.growth:
        return growth_lines(options.files, options.growth)
    runs = read_curve_file(options.files[0])
    if not options.each:
        return table_of(runs)
    return [*lines_of_runs(runs), *(paired_line(runs, *pair) for pair in pairs_of(runs))]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Start and end of every curve.")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--each", action="store_true", help="every run, not means over seeds")
    parser.add_argument("--growth", metavar="CURVE", help="count the runs in which it grows")
    options = parser.parse_args(words)
    if len(options.files) > 1 and not options.growth:
        parser.error("several files are for --growth only")
    try:
        header, *lines = _lines(options)
    except ConfigError as error:
        parser.error(str(error))
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
