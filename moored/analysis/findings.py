"""A diagnosis in words and figures: what terminal and page have in common, and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from moored.analysis.diagnosis import MIN_LOOKS, Diagnosis, Look
from moored.diagnostics.report import CollapseReport, Regime, Verdict

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

NONE = "–"
METRICS = {
    "mi_estimate": ("MI per token, nats", "0"),
    "mi_seq_estimate": ("MI per sequence, nats", "0"),
    "mi_upper_bound": ("ceiling of both, log N", ""),
    "retrieval_accuracy": ("retrieval", "1/N"),
    "mi_zscore": ("MI z-score per token", "0"),
    "mi_zscore_seq": ("MI z-score per sequence", "0"),
    "conditional_entropy_est": ("H(Z|X) per token, nats", ""),
    "conditional_entropy_seq_est": ("H(Z|X) per sequence, nats", ""),
    "reasoning_entropy_est": ("H(Z) per token, nats", ""),
    "reasoning_entropy_seq_est": ("H(Z) per sequence, nats", ""),
    "matched_log_prob_mean": ("log-prob under own prompt", ""),
    "marginal_log_prob_mean": ("log-prob under all prompts", ""),
    "marginal_std": ("spread of H(Z) per token", ""),
    "marginal_std_seq": ("spread of H(Z) per sequence", ""),
}
"""Field of the report -> its name, and what chance gives. Smoothing needs several steps."""
METRIC_COLUMNS = ("", "value", "95 % interval", "p", "chance")
FOREIGN_NATS = 4.0
"""H(Z|X) per token above which the scoring model cannot be the one that wrote the text."""


class Kind(StrEnum):
    """How serious a finding is."""

    GOOD = "good"
    BAD = "bad"
    WARNING = "warning"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line that adds to the figures."""

    text: str
    kind: Kind = Kind.PLAIN


STYLES = {Kind.GOOD: "green", Kind.BAD: "red", Kind.WARNING: "yellow", Kind.PLAIN: ""}
WIDE = 112
"""Columns a terminal needs for all of a curve."""


def verdict_kind(verdict: Verdict) -> Kind:
    return {Verdict.HEALTHY: Kind.GOOD, Verdict.COLLAPSED: Kind.BAD}.get(verdict, Kind.WARNING)


def regime_name(regime: Regime | None) -> str:
    return "cannot_tell" if regime is None else str(regime)


def metric_rows(report: CollapseReport) -> list[tuple[str, ...]]:
    """Every metric: the cells under `METRIC_COLUMNS`."""
    rows = []
    for name, (label, chance) in METRICS.items():
        level = number(1 / report.num_prompts) if chance == "1/N" else chance or NONE
        value, p = getattr(report, name), report.p_values.get(name)
        rows.append((label, number(value), interval(report, name), p_value(p), level))
        if name == "retrieval_accuracy":
            rows += _recall_rows(report)
    return rows


def _recall_rows(report: CollapseReport) -> list[tuple[str, ...]]:
    return [
        (f"retrieval among the best {k}", number(found), NONE, NONE, number(k / report.num_prompts))
        for k, found in report.retrieval_at.items()
        if k < report.num_prompts
    ]


def verdict(diagnosis: Diagnosis) -> Finding:
    """The regime of the last look, and how much it rests on."""
    last = diagnosis.looks[-1]
    return Finding(
        f"{'last ' if len(diagnosis.looks) > 1 else ''}regime: {regime_name(last.regime)} "
        f"(N = {last.report.num_prompts} prompts, M = {last.report.num_reasonings} reasonings of "
        f"{last.reasoning_tokens_mean:.0f} tokens)",
        verdict_kind(last.verdict),
    )


def notes(diagnosis: Diagnosis) -> list[Finding]:
    """What to know besides verdict and figures."""
    last = diagnosis.looks[-1]
    report = last.report
    share = f"{last.valid_thinking_rate:.1%} of {last.num_rows}"
    found = [Finding(f"replies with reasoning: {share}")]
    if last.rewards is not None and last.rewards.std_in_group is not None:
        text = (
            f"reward {last.rewards.mean:.3f}, spread inside groups "
            f"{last.rewards.std_in_group:.3f}, groups without spread "
            f"{last.rewards.zero_spread_share:.0%} of {last.rewards.num_groups}"
        )
        found.append(Finding(text))
    if len(diagnosis.looks) > 1:
        found.append(_alarm(diagnosis))
    if report.conditional_entropy_est > FOREIGN_NATS:
        text = (
            f"H(Z|X) of {report.conditional_entropy_est:.1f} nats per token: this model would not "
            f"have written these reasonings; score with the one that did"
        )
        found.append(Finding(text, Kind.WARNING))
    return found + _passed_over(diagnosis)


def _alarm(diagnosis: Diagnosis) -> Finding:
    """Whether MI fell over the steps."""
    alarm = diagnosis.alarm
    if alarm is not None:
        text = (
            f"ALARM at step {alarm.step}: {alarm.kind}, MI fell from "
            f"{alarm.mi_reference:.3f} to {alarm.mi_level:.3f}"
        )
        return Finding(text, Kind.BAD)
    if len(diagnosis.looks) < MIN_LOOKS:
        return Finding(f"no alarm: it needs {MIN_LOOKS} steps, got {len(diagnosis.looks)}")
    return Finding("no alarm")


def _passed_over(diagnosis: Diagnosis) -> list[Finding]:
    lines = [f"step {step} not measured: {why}" for step, why in diagnosis.skipped.items()]
    lines += [f"turn {turn} not measured: {why}" for turn, why in diagnosis.skipped_turns.items()]
    if diagnosis.num_bad_rows:
        lines.append(f"{diagnosis.num_bad_rows} bad row(s) skipped")
    if diagnosis.num_torn_rows:
        lines.append(f"{diagnosis.num_torn_rows} torn last line(s) skipped")
    return [Finding(line) for line in lines]


def number(value: float) -> str:
    """Three decimals, one where the figure is large; no minus sign before zero."""
    is_small = abs(value) < 100 or not math.isfinite(value)
    return f"{round(value, 3) + 0.0:.3f}" if is_small else f"{value:.1f}"


def interval(report: CollapseReport, name: str) -> str:
    found = report.intervals.get(name)
    return NONE if found is None else f"{number(found.low)}…{number(found.high)}"


def p_value(p: float | None) -> str:
    return NONE if p is None else f"{p:.3f}"


def _reward(look: Look) -> str:
    return NONE if look.rewards is None else number(look.rewards.mean)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table with one row per report: its name, and what to write in it."""

    name: str
    cell: Callable[[CollapseReport], str]
    is_wide: bool = False
    """Left out where there is little room."""


MEASURED = (
    Column("MI/token", lambda report: number(report.mi_estimate)),
    Column("95 %", lambda report: interval(report, "mi_estimate"), is_wide=True),
    Column("p", lambda report: p_value(report.p_values.get("mi_estimate"))),
    Column("retrieval", lambda report: number(report.retrieval_accuracy)),
    Column("95 %", lambda report: interval(report, "retrieval_accuracy"), is_wide=True),
    Column("p", lambda report: p_value(report.p_values.get("retrieval_accuracy"))),
    Column("chance", lambda report: number(1 / report.num_prompts)),
    Column("H(Z|X)", lambda report: number(report.conditional_entropy_est)),
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text: its column headings and its rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def curve_grid(diagnosis: Diagnosis, *, wide: bool = True) -> Grid:
    """One row per step, its regime last."""
    columns = [column for column in MEASURED if wide or not column.is_wide]
    rows = []
    for look in diagnosis.looks:
        cells = [NONE if look.step is None else str(look.step)]
        cells += [column.cell(look.report) for column in columns]
        rows.append((*cells, *((_reward(look),) if wide else ()), regime_name(look.regime)))
    reward = ("reward",) if wide else ()
    return Grid(("step", *(column.name for column in columns), *reward, "regime"), tuple(rows))


def turn_grid(diagnosis: Diagnosis, *, wide: bool = True) -> Grid:
    """One row per turn position of the last step."""
    columns = [column for column in MEASURED if wide or not column.is_wide]
    rows = tuple(
        (
            str(look.turn),
            str(look.report.num_reasonings),
            *(column.cell(look.report) for column in columns),
        )
        for look in diagnosis.turns
    )
    return Grid(("turn", "M", *(column.name for column in columns)), rows)


def step_table(look: Look) -> Table:
    """Every metric of one step."""
    return _table(METRIC_COLUMNS, metric_rows(look.report))


def curve_table(diagnosis: Diagnosis, width: int) -> Table:
    """One row per step; a terminal narrower than `WIDE` gets the figures without intervals."""
    from rich.text import Text

    grid = curve_grid(diagnosis, wide=width >= WIDE)
    table = _table(grid.header)
    for look, (*cells, regime) in zip(diagnosis.looks, grid.rows, strict=True):
        judged = Text(regime, STYLES[verdict_kind(look.verdict)])
        if diagnosis.alarm is not None and diagnosis.alarm.step == look.step:
            judged.append(" ◀ ALARM", "bold red")
        table.add_row(*cells, judged)
    return table


def turn_table(diagnosis: Diagnosis, width: int) -> Table:
    """One row per turn position."""
    grid = turn_grid(diagnosis, wide=width >= WIDE)
    return _table(grid.header, grid.rows)


def summary(diagnosis: Diagnosis) -> list[Text]:
    """The findings that are not in the tables, one line each."""
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
