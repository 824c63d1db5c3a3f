"""The report on a study: its question, table and differences, results by arm, curves of all arms.

Reads the folder that `moored study` leaves: `study.json` declares the grid, `progress.json` says
which runs failed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moored.analysis.figures import about_cuts, arm_chart
from moored.analysis.findings import Grid, Kind
from moored.analysis.report import STUDY_FILE, Drawn, Report, Section, empty_report
from moored.analysis.report_data import FIGURES
from moored.analysis.report_runs import curve_sections, list_runs, read_curves, slug_of
from moored.analysis.study_table import (
    DEFAULT_FIGURES,
    StudyTable,
    read_table,
    table_lines,
    table_notes,
)
from moored.errors import RunLogError

AXES = {
    "peak success": "share",
    "tokens generated": "tokens",
    "tokens trained": "tokens",
    "filter, % of a step": "%",
}
"""Of figures that have no curve."""

Cells = Mapping[tuple[str, ...], Mapping[int, Path]]
"""Arms -> seed -> run directory."""


def report_of_study(folder: Path, on_run: Callable[[], None] | None = None) -> Report:
    """All arms and seeds that the study was last asked for, as far as they went."""
    declared = _read_json(folder / STUDY_FILE)
    if not declared.get("factors"):
        raise RunLogError(f"{str(folder)!r} is an analysis; its tables are in results.md")
    failed = _failed(folder)
    planned = _planned(folder, declared)
    cells = {
        arms: {
            seed: run
            for seed, run in by_seed.items()
            if str(run) not in failed and (run / "config.yaml").is_file()
        }
        for arms, by_seed in planned.items()
    }
    against = declared.get("against")
    table = read_table(
        cells,
        factors=list(declared["factors"]),
        figures=declared.get("report", DEFAULT_FIGURES),
        against=(against[0], against[1]) if against else None,
    )
    left_out = {**failed, **table.left_out}
    if not any(row.runs for row in table.rows):
        return empty_report(left_out or {str(folder): "no run has begun"})
    num_arms, num_planned = len(planned), sum(map(len, planned.values()))
    num_runs = sum(len(row.runs) for row in table.rows)
    of = "" if num_runs == num_planned else f" of {num_planned}"
    paper = declared.get("paper", "")
    return Report(
        kind=Kind.PLAIN,
        title=f"{declared['study']}: {num_runs}{of} runs, {num_arms} arm{'s' * (num_arms > 1)}",
        meaning=(declared["question"],),
        facts={"the paper": paper} if paper else {},
        sections=tuple(_sections(declared, table, on_run)),
        left_out=left_out,
    )


def _planned(folder: Path, declared: Mapping[str, Any]) -> Cells:
    """Every combination of arms, with its runs in the folders that `moored study` gives them."""
    return {
        arms: {seed: folder.joinpath(*arms, f"seed-{seed}") for seed in declared["seeds"]}
        for arms in itertools.product(*declared["factors"].values())
    }


def _failed(folder: Path) -> dict[str, str]:
    """Run directory -> that it failed, and where its output is."""
    file = folder / "progress.json"
    ended = _read_json(file)["runs"] if file.is_file() else {}
    return {
        str(folder / name): f"failed with exit code {run['exit_code']} (log: {folder / name}.log)"
        for name, run in ended.items()
        if run["status"] == "failed"
    }


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunLogError(f"cannot read {str(file)!r}: {error}") from error


def _sections(
    declared: Mapping[str, Any], table: StudyTable, on_run: Callable[[], None] | None
) -> Sequence[Section]:
    arms = {}
    for row in table.rows:
        arms[_name(row.arms)] = [read_curves(run.path) for run in row.runs]
        for _ in row.runs:
            if on_run is not None:
                on_run()
    runs = [
        (_name(row.arms), str(run.path), str(run.seed), str(run.last_step))
        for row in table.rows
        for run in row.runs
    ]
    words = [("", "every run", [*declared["base"], *declared["overrides"]])]
    words += [(f, arm, w) for f, arms in declared["factors"].items() for arm, w in arms.items()]
    options = Grid(("factor", "arm", "options"), tuple((f, a, " ".join(w)) for f, a, w in words))
    return (
        _result(table),
        _by_arm(table),
        *curve_sections(arms),
        Section(title="Arms", grids={"": options}),
        list_runs(runs),
    )


def _name(arms: Sequence[str]) -> str:
    return " ".join(arms)


def _result(table: StudyTable) -> Section:
    """The table that `moored study` prints, and the differences below it."""
    grids = {"": _grid(table_lines(table))}
    if table.against is not None and any(row.differences for row in table.rows):
        title = f"Differences from {_name(table.against)}, seed by seed"
        grids[title] = _grid(table_lines(table, differences=True))
    return Section(title="Result", text=" ".join(table_notes(table)), grids=grids)


def _grid(lines: Sequence[Sequence[str]]) -> Grid:
    header, *rows = map(tuple, lines)
    return Grid(header, tuple(rows))


def _by_arm(table: StudyTable) -> Section:
    """Every figure of the table, drawn over the arms."""
    styles = {_name(row.arms): style for style, row in enumerate(table.rows)}
    figures = []
    for name in table.figures:
        means = {_name(row.arms): row.figures[name] for row in table.rows if name in row.figures}
        if means:
            chart = arm_chart(means, styles, x_title=_axis(name))
            figures.append(Drawn(slug=f"by_arm_{slug_of(name)}", title=_title(name), chart=chart))
    return Section(
        title="Result by arm",
        text="Dots are seeds, diamonds their means with 95 % intervals (Student's t), in the "
        f"colours of the curves below.{about_cuts(drawn.chart for drawn in figures)}",
        figures=tuple(figures),
    )


def _title(name: str) -> str:
    base, comma, env = name.partition(", ")
    return f"{FIGURES[base][0]}{comma}{env}" if base in FIGURES else name[0].upper() + name[1:]


def _axis(name: str) -> str:
    base = name.partition(", ")[0]
    if base in FIGURES:
        return FIGURES[base][1]
    return "seconds" if base.startswith("seconds") else AXES.get(name, "")
