"""A diagnosis on the terminal: every metric of one step, or the curves of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moored.analysis.diagnosis import Diagnosis, Look
from moored.analysis.findings import (
    METRIC_COLUMNS,
    Kind,
    curve_grid,
    metric_rows,
    notes,
    regime_kind,
    turn_grid,
    verdict,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

STYLES = {Kind.GOOD: "green", Kind.BAD: "red", Kind.WARNING: "yellow", Kind.PLAIN: ""}
WIDE = 112
"""Columns a terminal needs for all of a curve."""


def step_table(look: Look) -> Table:
    """Every metric of one step."""
    return _table(METRIC_COLUMNS, metric_rows(look.report))


def curve_table(diagnosis: Diagnosis, width: int) -> Table:
    """One row a step; a terminal narrower than `WIDE` gets the figures without intervals."""
    from rich.text import Text

    grid = curve_grid(diagnosis, wide=width >= WIDE)
    table = _table(grid.header)
    for look, (*cells, regime) in zip(diagnosis.looks, grid.rows, strict=True):
        judged = Text(regime, STYLES[regime_kind(look.regime)])
        if diagnosis.alarm is not None and diagnosis.alarm.step == look.step:
            judged.append(" ◀ ALARM", "bold red")
        table.add_row(*cells, judged)
    return table


def turn_table(diagnosis: Diagnosis, width: int) -> Table:
    """One row a turn position."""
    grid = turn_grid(diagnosis, wide=width >= WIDE)
    return _table(grid.header, grid.rows)


def summary(diagnosis: Diagnosis) -> list[Text]:
    """What the tables do not say, a line each."""
    from rich.text import Text

    found = [verdict(diagnosis), *notes(diagnosis)]
    return [Text(each.text, STYLES[each.kind]) for each in found]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for place, name in enumerate(header):
        left = place == 0 or name == "regime"
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "regime")
    for row in rows:
        table.add_row(*row)
    return table
