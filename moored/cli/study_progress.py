"""What a study prints: the plan, a live table or one line per change, the table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.live import Live
from rich.table import Table

from moored.cli.console import print_line
from moored.runlog.log import read_records
from moored.studies.grid import PlannedRun

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from moored.analysis.study_table import StudyTable
    from moored.studies.declaration import Study
    from moored.studies.execute import Event
    from moored.studies.folder import StudyFolder
    from moored.studies.jobs import Jobs

START_UP_S = 8.0
"""A process imports torch and loads its model before the first step."""
REFRESH_S = 1.0
GAP = 3
"""Characters between two columns of a table."""
MARGIN = 8
"""Lines of a terminal that the live table leaves; of more arms it shows those under way."""


def show_plan(
    console: Console, study: Study, runs: Sequence[PlannedRun], folder: Path, jobs: Jobs
) -> None:
    """The grid, how many runs it has, and about how long they take."""
    print_line(console, f"{study.name}: {study.question}")
    if study.paper:
        print_line(console, f"the paper: {study.paper}")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for factor in study.factors:
        table.add_column(factor.name)
    for heading in ("steps", "moored train"):
        table.add_column(heading, overflow="fold")
    for run in runs:
        if run.seed == study.seeds[0]:
            words = [word for word in run.words if not word.startswith("seed=")]
            table.add_row(*run.arms, str(run.config.num_steps), " ".join(words))
    console.print(table)
    num_arms = len(runs) // len(study.seeds)
    seeds = ", ".join(map(str, study.seeds))
    print_line(console, f"{len(runs)} runs: {num_arms} arms x {len(study.seeds)} seeds ({seeds})")
    print_line(console, f"folder: {folder}; {jobs.count} at a time ({jobs.reason})")
    if study.seconds_per_step is not None:
        steps = sum(run.config.num_steps for run in runs)
        seconds = steps * study.seconds_per_step + START_UP_S * len(runs)
        print_line(
            console,
            f"about {_duration(seconds / min(jobs.count, len(runs)))}, at "
            f"{study.seconds_per_step:g} s a step, measured with the study's own options on one "
            f"CPU core",
        )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class StudyProgress:
    """A live table on a terminal, one row per arm; in a pipe one line per change."""

    def __init__(self, console: Console, folder: StudyFolder, runs: Sequence[PlannedRun]) -> None:
        self._console = console
        self._folder = folder
        self._runs = runs
        self._shown_s = 0.0
        # Refreshed by hand: a thread of rich's would be alive while children are forked.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> StudyProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def on_event(self, event: Event) -> None:
        """One line per change; on a terminal only for what needs attention."""
        if self._console.is_terminal and event.what not in ("failed", "waits"):
            return
        done = sum(self._folder.status(run) == "finished" for run in self._runs)
        detail = f" {event.detail}" if event.detail else ""
        print_line(
            self._console, f"[{done}/{len(self._runs)}] {event.run.name} {event.what}{detail}"
        )

    def on_poll(self, under_way: Sequence[PlannedRun]) -> None:
        """Draw the table again, at most once a second."""
        if not self._console.is_terminal or time.monotonic() - self._shown_s < REFRESH_S:
            return
        self._live.update(self._table(under_way), refresh=True)
        self._shown_s = time.monotonic()

    def _table(self, under_way: Sequence[PlannedRun]) -> Table:
        done = sum(self._folder.status(run) == "finished" for run in self._runs)
        title = f"{done} of {len(self._runs)} runs finished"
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", title=title)
        for heading in ("arm", "finished", "under way"):
            table.add_column(heading)
        labels = list(dict.fromkeys(run.label for run in self._runs))
        if len(labels) > self._console.height - MARGIN:
            labels = [label for label in labels if label in {run.label for run in under_way}]
        for label in labels:
            runs = [run for run in self._runs if run.label == label]
            status = [self._folder.status(run) for run in runs]
            failed = f", {status.count('failed')} failed" if "failed" in status else ""
            now = [self._step(run) for run in under_way if run.label == label]
            table.add_row(
                label, f"{status.count('finished')} of {len(runs)}{failed}", "; ".join(now)
            )
        return table

    def _step(self, run: PlannedRun) -> str:
        """`seed 3: step 40 of 100, success 0.12`."""
        path = self._folder.run_folder(run)
        steps = read_records(path) if (path / "metrics.jsonl").exists() else []
        if not steps:
            return f"seed {run.seed}: starting"
        success = steps[-1].get("rollout/success_rate")
        shown = f", success {success:.2f}" if isinstance(success, float) else ""
        return f"seed {run.seed}: step {steps[-1]['step']} of {run.config.num_steps}{shown}"


def show_table(console: Console, study: Study, table: StudyTable) -> None:
    """Means with 95 % intervals over seeds, and differences where the study asks for them."""
    from moored.analysis.study_table import table_lines, table_notes

    print_table(console, table_lines(table), len(study.factors))
    if table.against is not None and any(row.differences for row in table.rows):
        print_line(
            console, f"Differences from {' '.join(table.against)}, seed by seed:", style="bold"
        )
        print_table(console, table_lines(table, differences=True), len(study.factors))
    for note in table_notes(table):
        print_line(console, note, style="dim")
    for path, reason in table.left_out.items():
        print_line(console, f"left out: {path}: {reason}", style="dim")


def print_table(console: Console, lines: Sequence[Sequence[str]], num_names: int) -> None:
    """As one table, or below each other in several that are narrow enough for the terminal."""
    for columns in _blocks(lines, num_names, console.width):
        shown = Table(box=box.SIMPLE_HEAD, header_style="bold")
        for column in columns:
            justify = "left" if column < num_names else "right"
            # Headings are broken at spaces, cells are not; a column alone takes what there is.
            width = _width(lines, column) if len(columns) > num_names + 1 else None
            shown.add_column(lines[0][column], justify=justify, width=width)
        for line in lines[1:]:
            shown.add_row(*(line[column] for column in columns))
        console.print(shown)


def _blocks(lines: Sequence[Sequence[str]], num_names: int, width: int) -> list[list[int]]:
    """Columns of each table: the names, and as many figures as fit with whole numbers."""
    widths = [_width(lines, column) + GAP for column in range(len(lines[0]))]
    names = list(range(num_names))
    room = width - sum(widths[:num_names]) - 1
    blocks: list[list[int]] = [[]]
    for column in range(num_names, len(widths)):
        if blocks[-1] and sum(widths[k] for k in (*blocks[-1], column)) > room:
            blocks.append([])
        blocks[-1].append(column)
    return [[*names, *block] for block in blocks]


def _width(lines: Sequence[Sequence[str]], column: int) -> int:
    """Of the widest cell, or word of the heading."""
    header, *rows = lines
    return max(map(len, [*header[column].split(), *(row[column] for row in rows)]))
