"""A diagnosis in words and figures: what terminal and page have in common, and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from moored.algo.snr import FIRST_STEPS, FREE_ABOVE
from moored.analysis.diagnosis import Diagnosis, Look, Series
from moored.diagnostics.alarm import NOTHING_TO_LOSE
from moored.diagnostics.chain import LINKS
from moored.diagnostics.look import WORST_FIRST
from moored.diagnostics.report import CollapseReport, Interval, Regime, Verdict
from moored.diagnostics.resampling import t_quantile

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

VIEWS = {
    "first_turn": "first turns, each reasoning under the prompts of the others",
    "observation_swap": "observation swap, each reasoning after its own history with other newest "
    "observations",
    "episode_swap": "episode swap, each reasoning after its own replies with all observations of "
    "other episodes",
    "trajectory": "all turns, each reasoning under the dialogues of the others",
}
"""What training compares, in words."""


QUESTIONS = {
    "state_action_mi": "do actions depend on the task?",
    "reasoning_action_mi": "does reasoning control the action?",
}
"""What each link of the rest of the chain answers."""


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
KINDS = {
    Verdict.HEALTHY: Kind.GOOD,
    Verdict.COLLAPSED: Kind.BAD,
    Verdict.CANNOT_TELL: Kind.WARNING,
}
MEDIUM, WIDE = 72, 112
"""Columns a terminal needs for most of a curve, and for all of it."""
MEANINGS = {
    Regime.TEMPLATE_COLLAPSE: "It varies all the same, so entropy does not show it.",
    Regime.LOW_ENTROPY_COLLAPSE: "It hardly varies either.",
    Regime.COMPRESSED: "It varies little and is still tied to its prompt, which is often fine late "
    "in training.",
}
"""What the regime of the last look means, where there is something to say."""
NO_DIVISION = "algorithm.advantage=dr_grpo"
TEACH_FIRST = "Teach the model to reason about its prompt first: moored sft, or another model."


def headline(diagnosis: Diagnosis) -> Finding:
    """The verdict, and since when."""
    if diagnosis.is_of_one:
        text = _state(diagnosis.series[0])
        return Finding(text, KINDS[diagnosis.verdict])
    by_state: dict[str, list[str]] = {}
    for series in sorted(diagnosis.series, key=lambda series: WORST_FIRST.index(series.verdict)):
        by_state.setdefault(_state(series), []).append(series.name)
    if diagnosis.unmeasured:
        by_state["Not measured"] = list(diagnosis.unmeasured)
    parts = [f"{state} in {', '.join(envs)}" for state, envs in by_state.items()]
    text = "; ".join(part if place == 0 else _lower(part) for place, part in enumerate(parts))
    return Finding(text, KINDS[diagnosis.verdict])


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _state(series: Series) -> str:
    """Of one environment, in a few words."""
    since, alarm = series.collapsed_at, series.alarm
    if series.verdict is not series.looks[-1].verdict and not series.doubt:
        return f"Not measured since step {series.unmeasured_since}, healthy before"
    if series.verdict is Verdict.CANNOT_TELL:
        return "Cannot tell"
    if since is None:
        return "Healthy" if alarm is None else f"Healthy again after the alarm of step {alarm.step}"
    if since.step is None:
        return "Collapsed"
    if since is series.looks[0] and len(series.looks) > 1:
        return f"Collapsed from the first look on, step {since.label}"
    return f"Collapsed since step {since.steps[0]}"


def explanation(diagnosis: Diagnosis) -> list[Finding]:
    """Why, with intervals and p-values, and what to do; one line for each environment."""
    found = []
    for series in diagnosis.series:
        env = "" if diagnosis.is_of_one else f"{series.name}: "
        text = series.doubt or f"{_why(series)} {_remedy(series, diagnosis)}".strip()
        found.append(Finding(env + text, Kind.BAD if series.doubt else KINDS[series.verdict]))
    lines = [f"{env}: no look was measured: {why}" for env, why in diagnosis.unmeasured.items()]
    return found + [Finding(line, Kind.WARNING) for line in lines]


def _why(series: Series) -> str:
    """What the last look says, and why it is not that of the last step where it is not."""
    last, since = series.looks[-1], series.unmeasured_since
    if since is None:
        return last.why
    reason = series.skipped[str(since)]
    return f"No look from step {since} on was measured: {reason}. At step {last.label}: {last.why}"


def _remedy(series: Series, diagnosis: Diagnosis) -> str:
    last = series.looks[-1]
    if last.regime is None:
        return ""
    meaning = MEANINGS.get(last.regime, "")
    if last.verdict is not Verdict.COLLAPSED:
        return meaning
    if last.watched.has_nothing_to_lose:
        return f"{NOTHING_TO_LOSE}. {TEACH_FIRST}"
    if series.alarm is None and all(look.verdict is not Verdict.HEALTHY for look in series.looks):
        return f"{meaning} No look shows it healthy. {TEACH_FIRST}"
    instead = ""
    if is_outcome_free(diagnosis.outcome_free_share) and diagnosis.divides_by_std:
        instead = f", or start again without division by the group's std ({NO_DIVISION})"
    back = "Go back to a checkpoint before the fall, and filter by reward variance"
    return f"{meaning} {back}{instead}."


def notes(diagnosis: Diagnosis) -> list[Finding]:
    """What to know besides verdict and figures."""
    at = f"at temperature {diagnosis.temperature:g}"
    found = [Finding(text, Kind.WARNING) for text in diagnosis.warnings]
    found.append(Finding(f"{diagnosis.source}, {at}"))
    found += push_findings(diagnosis.outcome_free_share, divides=diagnosis.divides_by_std)
    for series in diagnosis.series:
        env = "" if diagnosis.is_of_one else f"{series.name}: "
        found += [Finding(f"{env}{each.text}", each.kind) for each in _series_notes(series)]
    if diagnosis.num_bad_rows:
        found.append(Finding(f"bad rows skipped: {diagnosis.num_bad_rows}"))
    if diagnosis.num_torn_rows:
        found.append(Finding(f"torn last lines skipped: {diagnosis.num_torn_rows}"))
    return found


def is_outcome_free(share: float | None) -> bool:
    """Most of the push is outcome-free, and some of it is not."""
    return share is not None and FREE_ABOVE < share < 1.0


def push_findings(share: float | None, *, divides: bool) -> list[Finding]:
    """What the first updates of a run consisted of."""
    if share is None:
        return []
    text = (
        f"outcome-free share of the first {FIRST_STEPS} steps {share:.2f}: the part of the push in "
        f"groups that held no success, or no failure"
    )
    if not (divides and is_outcome_free(share)):
        return [Finding(text)]
    remedy = f"leave out the division by the group's std ({NO_DIVISION}), or filter"
    return [Finding(f"{text}; {remedy}", Kind.WARNING)]


def _series_notes(series: Series) -> list[Finding]:
    last = series.looks[-1]
    rewards, share = last.rewards, last.valid_thinking_rate
    found = [*_stale(series), _sizes(last), *_views(series)]
    if share is not None:
        of = "" if last.num_rows is None else f" of {last.num_rows}"
        found.append(Finding(f"replies with reasoning: {share:.1%}{of}"))
    if rewards is not None and rewards.std_in_group is not None:
        text = f"reward {rewards.mean:.3f}, spread inside groups {rewards.std_in_group:.3f}"
        if rewards.zero_spread_share is not None:
            text += (
                f", groups without spread {rewards.zero_spread_share:.0%} of {rewards.num_compared}"
            )
        found.append(Finding(text))
    found += [*_worth(series), *_chain(series)]
    if len(series.looks) > 1:
        found.append(_alarm(series))
    lines = [f"step {steps} not measured: {why}" for steps, why in series.skipped.items()]
    lines += [f"turn {turn} not measured: {why}" for turn, why in series.skipped_turns.items()]
    return found + [Finding(line) for line in lines]


def _stale(series: Series) -> list[Finding]:
    """Which looks other weights have scored than those that wrote them."""
    stale = [look for look in series.looks if look.is_stale]
    if not stale:
        return []
    labels, far = ", ".join(look.label for look in stale), max(look.steps_away for look in stale)
    text = (
        f"stale weights score step {labels}: other weights, up to {far} steps away, wrote the "
        f"replies; keep more checkpoints, or see what training measured"
    )
    return [Finding(text, Kind.BAD)]


def _worth(series: Series) -> list[Finding]:
    """What dependence earns: over all looks, since one is a rough figure, and at the last."""
    worths = series.worths
    if not worths:
        return []
    look, worth = worths[-1]
    error = worth.standard_error
    based = f"{worth.num_prompts} prompt{'s' if worth.num_prompts > 1 else ''}"
    based += "" if error is None else f", standard error {number(error)}"
    at = f" at step {look.label}" if len(worths) > 1 else ""
    text = f"{number(worth.correlation)}{at} ({based})"
    if len(worths) > 1:
        values = [each.correlation for _, each in worths]
        error = number(stdev(values) / math.sqrt(len(values)))
        mean = f"{number(fmean(values))} (mean of {len(values)} looks, standard error {error})"
        text = f"{mean}, {text}"
    question = "does reasoning that depends more on its prompt earn more?"
    return [Finding(f"{question} correlation inside prompts {text}")]


def _chain(series: Series) -> list[Finding]:
    """The rest of the chain at its last look."""
    found = []
    for name, links in series.links.items():
        step, link = links[-1]
        parts = [] if link.interval is None else [f"95 % {_ends(link.interval)}"]
        parts += [] if link.p_value is None else [f"p {p_value(link.p_value)}"]
        text = f"{LINKS[name]} {number(link.mi_nats)} nats at step {step} ({', '.join(parts)})"
        found.append(Finding(f"{QUESTIONS[name]} {text}"))
    return found


def _views(series: Series) -> list[Finding]:
    """Which view was judged, and what the others say of the last look."""
    if series.view not in VIEWS:
        return []
    found = [Finding(f"view: {VIEWS[series.view]}")]
    for view, looks in series.others.items():
        report = looks[-1].report
        text = (
            f"other view, {view.replace('_', ' ')}: MI {number(report.mi_estimate)}, retrieval "
            f"{number(report.retrieval_accuracy)} (chance {number(1 / report.num_prompts)})"
        )
        found.append(Finding(text))
    return found


def _sizes(look: Look) -> Finding:
    tokens = look.reasoning_tokens_mean
    of = "" if tokens is None else f" of {tokens:.0f} tokens"
    pooled = f", {len(look.steps)} steps pooled" if len(look.steps) > 1 else ""
    report = look.report
    text = f"N = {report.num_prompts} prompts, M = {report.num_reasonings} reasonings{of}{pooled}"
    return Finding(text)


def _alarm(series: Series) -> Finding:
    """Whether MI fell over the steps."""
    alarm = series.alarm
    if alarm is None:
        empty = series.looks[-1].watched.has_nothing_to_lose
        return Finding(f"no alarm: {NOTHING_TO_LOSE}" if empty else "no alarm")
    text = (
        f"ALARM at step {alarm.step}: {alarm.kind}, MI fell from "
        f"{alarm.mi_reference:.3f} to {alarm.mi_level:.3f}"
    )
    return Finding(text, Kind.BAD)


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


def number(value: float) -> str:
    """Three decimals, one where the figure is large; no minus sign before zero."""
    is_small = abs(value) < 100 or not math.isfinite(value)
    return f"{round(value, 3) + 0.0:.3f}" if is_small else f"{value:.1f}"


ENTROPIES = ("conditional_entropy_est", "conditional_entropy_seq_est")
"""Of each reasoning under its own prompt alone; never negative."""


def interval_of(report: CollapseReport, name: str) -> Interval | None:
    """95 %: by the bootstrap, else from the standard error over prompts.

    None of MI and retrieval of two prompts, also where a stored report has an error of them: it is
    near 0, because the effects of one comparison cancel.
    """
    found, error = report.intervals.get(name), report.standard_errors.get(name)
    is_entropy = name in ENTROPIES
    fewest = 2 if is_entropy else 3
    if found is not None or error is None or report.num_used_prompts < fewest:
        return found
    half = t_quantile(report.num_used_prompts - 1, 0.95) * error
    value = getattr(report, name)
    least = 0.0 if is_entropy or name == "retrieval_accuracy" else -math.inf
    ceiling = report.mi_upper_bound
    bounds = {"mi_estimate": ceiling, "mi_seq_estimate": ceiling, "retrieval_accuracy": 1.0}
    return Interval(max(value - half, least), min(value + half, bounds.get(name, math.inf)))


def interval(report: CollapseReport, name: str) -> str:
    found = interval_of(report, name)
    return NONE if found is None else _ends(found)


def _ends(found: Interval) -> str:
    return f"{number(found.low)}…{number(found.high)}"


def p_value(p: float | None) -> str:
    return NONE if p is None else f"{p:.3f}"


def _reward(look: Look) -> str:
    return NONE if look.rewards is None else number(look.rewards.mean)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table with one row per report: its name, and what to write in it."""

    name: str
    cell: Callable[[CollapseReport], str]
    needs: int = 0
    """Columns of a terminal below which it is left out."""


MEASURED = (
    Column("MI/token", lambda report: number(report.mi_estimate)),
    Column("95 %", lambda report: interval(report, "mi_estimate"), WIDE),
    Column("p", lambda report: p_value(report.p_values.get("mi_estimate")), MEDIUM),
    Column("retrieval", lambda report: number(report.retrieval_accuracy)),
    Column("95 %", lambda report: interval(report, "retrieval_accuracy"), WIDE),
    Column("p", lambda report: p_value(report.p_values.get("retrieval_accuracy")), MEDIUM),
    Column("chance", lambda report: number(1 / report.num_prompts), MEDIUM),
    Column("H(Z|X)", lambda report: number(report.conditional_entropy_est), MEDIUM),
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text: its column headings and its rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def curve_grid(series: Series, *, width: int = WIDE) -> Grid:
    """One row per look, its verdict last."""
    columns, wide = [column for column in MEASURED if width >= column.needs], width >= WIDE
    rows = []
    for look in series.looks:
        cells = [look.label, *(column.cell(look.report) for column in columns)]
        rows.append((*cells, *((_reward(look),) if wide else ()), named(look.verdict)))
    reward = ("reward",) if wide else ()
    return Grid(("step", *(column.name for column in columns), *reward, "verdict"), tuple(rows))


def named(name: Verdict | Regime) -> str:
    return name.replace("_", " ")


def turn_grid(series: Series, *, width: int = WIDE) -> Grid:
    """One row per turn position of the last look."""
    columns = [column for column in MEASURED if width >= column.needs]
    rows = tuple(
        (
            str(look.turn),
            str(look.report.num_reasonings),
            *(column.cell(look.report) for column in columns),
        )
        for look in series.turns
    )
    return Grid(("turn", "M", *(column.name for column in columns)), rows)


def step_table(look: Look, width: int) -> Table:
    """Every metric of one look; on a narrow terminal without intervals, p-values and chance."""
    shown = len(METRIC_COLUMNS) if width >= MEDIUM else 2
    return _table(METRIC_COLUMNS[:shown], [row[:shown] for row in metric_rows(look.report)])


def curve_table(series: Series, width: int) -> Table:
    """One row per look; narrower terminals get fewer columns."""
    from rich.text import Text

    grid = curve_grid(series, width=width)
    table = _table(grid.header)
    for look, (*cells, verdict) in zip(series.looks, grid.rows, strict=True):
        judged = Text(verdict, STYLES[KINDS[look.verdict]])
        if series.alarm is not None and series.alarm.step == look.step:
            judged.append(" ◀ ALARM", "bold red")
        table.add_row(*cells, judged)
    return table


def turn_table(series: Series, width: int) -> Table:
    """One row per turn position."""
    grid = turn_grid(series, width=width)
    return _table(grid.header, grid.rows)


def lines(findings: Sequence[Finding]) -> list[Text]:
    """Findings for the terminal, one line each."""
    from rich.text import Text

    return [Text(each.text, STYLES[each.kind]) for each in findings]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for place, name in enumerate(header):
        left = place == 0 or name == "verdict"
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "verdict")
    for row in rows:
        table.add_row(*row)
    return table
