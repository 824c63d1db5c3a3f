"""The page of `moored diagnose`, and the sections on looks that the report on a run has too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from moored.analysis.diagnosis import Closeup, Diagnosis, Look, Series
from moored.analysis.excerpts import differing_parts
from moored.analysis.figures import (
    Bars,
    Curve,
    Cuts,
    PlanePath,
    about_cuts,
    bar_chart,
    line_chart,
    plane_chart,
)
from moored.analysis.findings import (
    KINDS,
    METRIC_COLUMNS,
    Grid,
    curve_grid,
    explanation,
    headline,
    interval_of,
    metric_rows,
    named,
    notes,
    number,
    turn_grid,
)
from moored.analysis.heat_maps import score_map, shade_limit
from moored.analysis.report import Article, Drawn, Passage, Report, Section
from moored.analysis.report_data import CHAIN_CAPTION, FIGURES, WORTH, WORTH_CAPTION
from moored.diagnostics.chain import LINKS
from moored.diagnostics.report import CollapseReport, Interval
from moored.diagnostics.verdict import DEFAULT_THRESHOLDS

MEASURED = {
    "mi_estimate": "MI",
    "retrieval_accuracy": "retrieval",
    "conditional_entropy_est": "H(Z|X)",
}
"""Field of a report -> its curve."""
SCORES_TITLE = "Scores of reasonings under prompts"
SCORES_TEXT = (
    "How much likelier, in nats per token, each reasoning is under a prompt than under the mean of "
    "all prompts. Reasonings are sorted by the prompt that they were written for, whose cells have "
    "a frame: reasoning that depends on its prompt shows a blue diagonal, and a template is pale "
    "everywhere."
)
BELOW_ZERO = (
    " MI can fall below zero: it is an estimate, in which a reasoning that is likelier under the "
    "other prompts than under its own counts as negative."
)
MOST_FILES = 6
MOST_EXAMPLES = 3
"""Reasonings on either side."""


def report_of_diagnosis(diagnosis: Diagnosis, files: Sequence[str], *, command: str) -> Report:
    """The page; heat maps and examples need `diagnose(…, closeups=True)`."""
    found = headline(diagnosis)
    report = Report(
        kind=found.kind,
        title=found.text,
        meaning=tuple(line.text for line in explanation(diagnosis)),
        facts=_facts(diagnosis, files),
        notes=tuple(notes(diagnosis)),
        sections=(
            *_curves(diagnosis),
            plane(diagnosis.series),
            _metrics(diagnosis),
            *_closeups(diagnosis.closeups),
            *_turns(diagnosis),
            all_looks(diagnosis.series),
        ),
    )
    return report.made_by(command)


def _facts(diagnosis: Diagnosis, files: Sequence[str]) -> dict[str, str]:
    looks = [look for series in diagnosis.series for look in series.looks]
    steps = sorted({step for look in looks for step in look.steps})
    num_looks = "1 look" if len(looks) == 1 else f"{len(looks)} looks"
    more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
    cost = f"{diagnosis.token_forwards:,} token-forwards in {diagnosis.seconds:.1f} s"
    facts = {
        "files": ", ".join(files[:MOST_FILES]) + more,
        "steps": f"{steps[0]} to {steps[-1]}, {num_looks}" if len(steps) > 1 else "",
        "step": str(steps[0]) if len(steps) == 1 else "",
        "cost": cost if diagnosis.token_forwards else "",
    }
    return {name: value for name, value in facts.items() if value}


def _curves(diagnosis: Diagnosis) -> Iterator[Section]:
    """The curves of each environment, with its own alarm."""
    about = BELOW_ZERO
    for series in diagnosis.series:
        looks = tuple(look for look in series.looks if look.step is not None)
        if len(looks) < 2:
            continue
        end = "" if diagnosis.is_of_one else f"_{series.name}"
        alarm = None if series.alarm is None else series.alarm.step
        figures = [
            *look_figures([replace(series, looks=looks)], alarm, end=end),
            *_reward_figure(looks, alarm, end),
        ]
        cut = about_cuts(drawn.chart for drawn in figures)
        yield Section(
            title=_titled("Over the steps", series, diagnosis),
            text=f"Bands are 95 % intervals.{about}{cut}{about_alarm(alarm)}",
            figures=tuple(figures),
        )
        about = ""


def _titled(title: str, series: Series, diagnosis: Diagnosis) -> str:
    if diagnosis.is_of_one:
        return title
    return f"{series.name}: {title[0].lower()}{title[1:]}"


def about_alarm(step: int | None) -> str:
    return "" if step is None else f" The dashed red line is the alarm of step {step}."


def _reward_figure(looks: Sequence[Look], alarm: int | None, end: str) -> Iterator[Drawn]:
    known = [(look.step or 0, look.rewards.mean) for look in looks if look.rewards is not None]
    if known:
        x, y = zip(*known, strict=True)
        curve = Curve(name="reward", x=x, y=y, has_dots=True)
        chart = line_chart([curve], y_title="mean", alarm_step=alarm)
        yield Drawn(slug=f"reward{end}", title="Reward", chart=chart)


def look_figures(series: Sequence[Series], alarm: int | None, *, end: str = "") -> Iterator[Drawn]:
    """MI, retrieval and entropy in every view, worth and the chain; slugs end with `end`."""
    if not series:
        return
    for name, curve in MEASURED.items():
        views, (title, y_title) = _views(series), FIGURES[curve]
        curves = [
            _curve(
                label,
                [look.step or 0 for look in looks],
                [getattr(look.report, name) for look in looks],
                [interval_of(look.report, name) for look in looks],
                style,
            )
            for style, (label, looks) in enumerate(views.items())
        ]
        level = None
        if name == "mi_estimate":
            level = ("", 0.0)
        elif name == "retrieval_accuracy":
            level = _chance(views)
        chart = line_chart(curves, y_title=y_title, alarm_step=alarm, level=level, show_names=True)
        yield Drawn(slug=f"{name}{end}", title=title, chart=chart)
    worths = [
        _curve(
            each.name,
            [look.step or 0 for look, _ in each.worths],
            [worth.correlation for _, worth in each.worths],
            [worth.interval for _, worth in each.worths],
            style,
        )
        for style, each in enumerate(each for each in series if each.worths)
    ]
    if worths:
        title, y_title = FIGURES[WORTH]
        chart = line_chart(worths, y_title=y_title, alarm_step=alarm, level=("", 0.0))
        yield Drawn(slug=f"{WORTH}{end}", title=title, chart=chart, caption=WORTH_CAPTION)
    links = {
        f"{f'{each.env}: ' if len(series) > 1 else ''}{LINKS[name]}": found
        for each in series
        for name, found in each.links.items()
    }
    chain = [
        _curve(
            name,
            [step for step, _ in found],
            [link.mi_nats for _, link in found],
            [link.interval for _, link in found],
            style,
        )
        for style, (name, found) in enumerate(links.items())
    ]
    if chain:
        title, options = "Task, reasoning and action", {"alarm_step": alarm, "show_names": True}
        chart = line_chart(chain, y_title="nats beyond chance", level=("", 0.0), **options)
        yield Drawn(slug=f"chain{end}", title=title, chart=chart, caption=CHAIN_CAPTION)


def _views(series: Sequence[Series]) -> dict[str, Sequence[Look]]:
    """Looks of every view of every environment."""
    found: dict[str, Sequence[Look]] = {}
    for each in series:
        env = f"{each.env}: " if len(series) > 1 else ""
        found[f"{env}{each.view.replace('_', ' ')}"] = each.looks
        for view, looks in each.others.items():
            found[f"{env}{view.replace('_', ' ')}"] = looks
    return found


def _chance(views: Mapping[str, Sequence[Look]]) -> tuple[str, float]:
    """1/N of the last looks; where views compare different numbers of prompts, of the first."""
    nums = [looks[-1].report.num_prompts for looks in views.values()]
    name = "chance" if len(set(nums)) == 1 else f"chance, {next(iter(views))}"
    return name, 1 / nums[0]


def _curve(
    name: str,
    steps: Sequence[int],
    values: Sequence[float],
    intervals: Sequence[Interval | None],
    style: int,
) -> Curve:
    """With a band where every look has an interval."""
    known = [interval for interval in intervals if interval is not None]
    has_band = len(known) == len(intervals)
    return Curve(
        name=name,
        x=steps,
        y=values,
        low=[interval.low for interval in known] if has_band else (),
        high=[interval.high for interval in known] if has_band else (),
        style=style,
        has_dots=True,
    )


def plane(series: Sequence[Series]) -> Section:
    """Every look of each environment over H(Z|X) and MI."""
    return Section(
        title="Diversity and input dependence",
        text="Every look on the plane of H(Z|X) and MI; the open circle is the first, the large "
        "one the last.",
        figures=tuple(_plane_figure(each, len(series) == 1) for each in series),
        columns=min(max(len(series), 1), 2),
    )


def _plane_figure(series: Series, is_one: bool) -> Drawn:
    looks, limits = series.looks, DEFAULT_THRESHOLDS
    path = PlanePath(
        name="looks",
        entropy=[look.report.conditional_entropy_est for look in looks],
        mi=[look.report.mi_estimate for look in looks],
        texts=[_look_text(look) for look in looks],
        kinds=[KINDS[look.verdict] for look in looks],
    )
    caption = (
        f"The cuts are {limits.min_mi_of_start:.0%} of the first MI and "
        f"{limits.min_entropy_of_start:.0%} of the first H(Z|X). Colour is the verdict, which also "
        f"looks at intervals: green is healthy, red collapsed, amber cannot be told."
    )
    cuts = _regime_cuts(looks[0].report) if len(looks) > 1 else None
    return Drawn(
        slug="plane" if is_one else f"plane_{series.env}",
        title="H(Z|X) and MI" if is_one else series.name,
        chart=plane_chart([path], cuts),
        caption=caption if cuts else "One look has no start to be judged against.",
    )


def _look_text(look: Look) -> str:
    report = look.report
    return (
        f"{'' if look.step is None else f'step {look.label}: '}{named(look.verdict)}<br>"
        f"MI {report.mi_estimate:.3f}, H(Z|X) {report.conditional_entropy_est:.3f}"
    )


def _regime_cuts(start: CollapseReport) -> Cuts:
    """Where the regimes of a run meet, from its first look."""
    limits = DEFAULT_THRESHOLDS
    entropy = limits.min_entropy_of_start * start.conditional_entropy_est
    return Cuts(
        entropy=max(limits.min_entropy_nats, entropy),
        mi=limits.min_mi_of_start * start.mi_estimate,
    )


def all_looks(series: Sequence[Series]) -> Section:
    """Every look in figures; the one that raised the alarm says so."""
    grids = {}
    for each in series:
        grid, alarm = curve_grid(each), each.alarm
        rows = tuple(
            (*cells, f"{verdict}, alarm" if alarm and alarm.step == look.step else verdict)
            for look, (*cells, verdict) in zip(each.looks, grid.rows, strict=True)
        )
        grids[f"{each.env or 'looks'}, {each.view.replace('_', ' ')}"] = Grid(grid.header, rows)
    return Section(title="All looks in figures", grids=grids, is_folded=True)


def _metrics(diagnosis: Diagnosis) -> Section:
    grids = {}
    for series in diagnosis.series:
        last = series.looks[-1]
        where = "" if last.step is None else f"step {last.label}"
        name = where if diagnosis.is_of_one else f"{series.name}{f', {where}' if where else ''}"
        grids[name] = Grid(METRIC_COLUMNS, tuple(metric_rows(last.report)))
    return Section(
        title="Every metric of the last look",
        text="p: the chance of such a value if reasonings were dealt to prompts at random.",
        grids=grids,
    )


def _closeups(closeups: Sequence[Closeup]) -> Iterator[Section]:
    """Heat maps of the first and the last look, the prompts of the last, and examples."""
    if not closeups:
        return
    limit = shade_limit([each.token.gain_if_MN for each in closeups])
    yield Section(
        title=SCORES_TITLE,
        text=SCORES_TEXT,
        figures=tuple(
            Drawn(
                slug=f"scores_{place}",
                title=each.name,
                chart=score_map(each.token.gain_if_MN, each.token.columns_M, limit),
            )
            for place, each in enumerate(closeups, start=1)
        ),
    )
    last = closeups[-1]
    prompts = differing_parts(last.prompts)
    yield Section(
        title=f"The {len(prompts)} prompts of the last look, from where they differ",
        block="\n\n".join(f"{place}\n{text}" for place, text in enumerate(prompts, start=1)),
        is_folded=True,
    )
    most, least = most_and_least_tied(last)
    pairs = zip(most, least, strict=True)
    yield Section(
        title="Most and least tied to their prompt",
        text="How much likelier a reasoning is under its own prompt than under the mixture of all; "
        f"the mean over all reasonings, {number(float(last.token.gain_M.mean()))}, is the MI.",
        articles=tuple(article for pair in pairs for article in pair),
    )


def most_and_least_tied(closeup: Closeup) -> tuple[list[Article], list[Article]]:
    """The reasonings with the highest gains and those with the lowest, extremes first.

    One that was written twice for the same prompt is shown once.
    """
    gain_M, columns_M = closeup.token.gain_M, closeup.token.columns_M
    prompts = differing_parts(closeup.prompts)
    distinct: dict[tuple[int, str], float] = {}
    for m in np.argsort(-gain_M, kind="stable").tolist():
        distinct.setdefault((int(columns_M[m]), closeup.reasonings[m]), float(gain_M[m]))
    ordered = list(distinct.items())
    num = min(MOST_EXAMPLES, len(ordered) // 2)
    most, least = (
        [
            Article(
                title=f"{side} tied: {round(gain, 3) + 0.0:+.3f} nats per token",
                about=f"Prompt {column + 1}, and the reasoning",
                passages=(Passage("", prompts[column], reasoning),),
            )
            for (column, reasoning), gain in chosen
        ]
        for side, chosen in (("Most", ordered[:num]), ("Least", ordered[::-1][:num]))
    )
    return most, least


def _turns(diagnosis: Diagnosis) -> Iterator[Section]:
    for series in diagnosis.series:
        if not series.turns:
            continue
        intervals = [interval_of(look.report, "mi_estimate") for look in series.turns]
        bars = Bars(
            name="MI",
            values=[look.report.mi_estimate for look in series.turns],
            low=[each and each.low for each in intervals],
            high=[each and each.high for each in intervals],
        )
        names = [str(look.turn) for look in series.turns]
        chart = bar_chart(names, [bars], x_title="turn", y_title="nats per token")
        end = "" if diagnosis.is_of_one else f"_{series.name}"
        yield Section(
            title=_titled("By turn of the episode", series, diagnosis),
            text="The prompt of a later turn is the whole dialogue before it. Such prompts differ "
            "more, and hardly two are alike, so M is small and intervals are wide: compare with "
            "the same turn of an earlier step.",
            figures=(Drawn(slug=f"turns{end}", title="MI in the last step", chart=chart),),
            grids={"": turn_grid(series)},
        )
