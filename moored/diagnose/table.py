"""A diagnosis on the terminal: every metric of one step, or the curves of several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from moored.diagnose.diagnosis import MIN_LOOKS, Diagnosis, Look
from moored.diagnostics.regimes import Regime
from moored.diagnostics.report import CollapseReport

if TYPE_CHECKING:
    from rich.table import Table

NONE = "–"
COLORS = {
    Regime.DIVERSE: "green",
    Regime.COMPRESSED: "green",
    Regime.TEMPLATE_COLLAPSE: "red",
    Regime.LOW_ENTROPY_COLLAPSE: "red",
}
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
FOREIGN_NATS = 4.0
"""H(Z|X) per token that no model has of what it wrote itself."""
WIDE = 112
"""Columns a terminal needs for all of a curve."""


def step_table(look: Look) -> Table:
    """Every metric of one step."""
    table = _table("", "value", "95 % interval", "p", "chance")
    report = look.report
    for name, (label, chance) in METRICS.items():
        level = _number(1 / report.num_prompts) if chance == "1/N" else chance or NONE
        value, p = getattr(report, name), report.p_values.get(name)
        table.add_row(label, _number(value), _interval(report, name), _p(p), level)
        if name == "retrieval_accuracy":
            for k, accuracy in report.retrieval_at.items():
                if k >= report.num_prompts:
                    continue
                level = _number(k / report.num_prompts)
                table.add_row(f"retrieval among the best {k}", _number(accuracy), NONE, NONE, level)
    return table


def curve_table(diagnosis: Diagnosis, width: int) -> Table:
    """One row a step; a terminal narrower than `WIDE` gets the figures without intervals."""
    measured = [column for column in CURVES if width >= WIDE or column not in FOR_WIDE]
    table = _table("step", *(name for name, _ in measured), "regime")
    for look in diagnosis.looks:
        regime = f"[{COLORS[look.regime]}]{look.regime}[/]"
        if diagnosis.alarm is not None and diagnosis.alarm.step == look.step:
            regime += " [bold red]◀ ALARM[/]"
        step = NONE if look.step is None else str(look.step)
        table.add_row(step, *(cell(look) for _, cell in measured), regime)
    return table


def summary(diagnosis: Diagnosis) -> list[str]:
    """What the table does not say, a line each; with markup."""
    last = diagnosis.looks[-1]
    report = last.report
    lines = [
        f"regime: [bold {COLORS[last.regime]}]{last.regime}[/] (N = {report.num_prompts} prompts, "
        f"M = {report.num_reasonings} reasonings of {last.reasoning_tokens_mean:.0f} tokens)",
        f"replies with reasoning: {last.valid_thinking_rate:.1%} of {last.num_rows}",
    ]
    if last.rewards is not None and last.rewards.std_in_group is not None:
        lines.append(
            f"reward {last.rewards.mean:.3f}, spread inside groups "
            f"{last.rewards.std_in_group:.3f}, groups without spread "
            f"{last.rewards.zero_spread_share:.0%} of {last.rewards.num_groups}"
        )
    if len(diagnosis.looks) > 1:
        lines[0] = f"last {lines[0]}"
        lines.append(_alarm_line(diagnosis))
    if report.conditional_entropy_est > FOREIGN_NATS:
        lines.append(
            f"[yellow]H(Z|X) of {report.conditional_entropy_est:.1f} nats a token: this model "
            f"would not have written these reasonings; score with the one that did[/]"
        )
    lines += [f"step {step} not measured: {why}" for step, why in diagnosis.skipped.items()]
    if diagnosis.num_bad_rows:
        lines.append(f"{diagnosis.num_bad_rows} bad row(s) passed over")
    if diagnosis.num_torn_rows:
        lines.append(f"{diagnosis.num_torn_rows} torn last line(s) passed over")
    return lines


def _alarm_line(diagnosis: Diagnosis) -> str:
    alarm = diagnosis.alarm
    if alarm is not None:
        return (
            f"[bold red]ALARM at step {alarm.step}: {alarm.kind}[/], MI fell from "
            f"{alarm.mi_reference:.3f} to {alarm.mi_level:.3f}"
        )
    if len(diagnosis.looks) < MIN_LOOKS:
        return f"no alarm: it needs {MIN_LOOKS} steps, got {len(diagnosis.looks)}"
    return "no alarm"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        left = place == 0 or name == "regime"
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "regime")
    return table


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 or not math.isfinite(value) else f"{value:.1f}"


def _interval(report: CollapseReport, name: str) -> str:
    found = report.intervals.get(name)
    return NONE if found is None else f"{_number(found.low)}…{_number(found.high)}"


def _p(p: float | None) -> str:
    return NONE if p is None else f"{p:.3f}"


def _reward(look: Look) -> str:
    return NONE if look.rewards is None else _number(look.rewards.mean)


FOR_WIDE: tuple[tuple[str, Callable[[Look], str]], ...] = (
    ("95 %", lambda look: _interval(look.report, "mi_estimate")),
    ("95 %", lambda look: _interval(look.report, "retrieval_accuracy")),
    ("reward", _reward),
)
CURVES: tuple[tuple[str, Callable[[Look], str]], ...] = (
    ("MI/token", lambda look: _number(look.report.mi_estimate)),
    FOR_WIDE[0],
    ("p", lambda look: _p(look.report.p_values.get("mi_estimate"))),
    ("retrieval", lambda look: _number(look.report.retrieval_accuracy)),
    FOR_WIDE[1],
    ("p", lambda look: _p(look.report.p_values.get("retrieval_accuracy"))),
    ("chance", lambda look: _number(1 / look.report.num_prompts)),
    ("H(Z|X)", lambda look: _number(look.report.conditional_entropy_est)),
    FOR_WIDE[2],
)
"""Columns of `curve_table`: a name, and what to write of a step."""
