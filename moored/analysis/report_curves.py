"""The curves of one run over its steps, with the alarm marked in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moored.algo.snr import FREE_ABOVE
from moored.analysis.diagnosis import Look, Series
from moored.analysis.figures import ENTROPY, Curve, about_cuts, line_chart, phase_chart
from moored.analysis.findings import interval_of
from moored.analysis.report import Drawn, Section
from moored.analysis.report_data import (
    CHAIN_CAPTION,
    OUTCOME_FREE_CAPTION,
    WORTH,
    WORTH_CAPTION,
    WORTH_TITLE,
    Points,
    RunData,
    phase_seconds,
    smoothed,
    step_curves,
    thinned,
)
from moored.diagnostics.chain import LINKS

WINDOWS = 30
"""The running mean of a curve takes in one of this many parts of it."""
MEASURED = {
    "mi_estimate": ("MI of reasoning and prompt", "nats per token"),
    "retrieval_accuracy": ("Retrieval of the prompt", "share"),
    "conditional_entropy_est": ("Conditional entropy H(Z|X)", ENTROPY),
}
"""Field of a report -> title and axis of its figure."""


def dynamics(run: RunData) -> Section:
    """How the run went: loss, success, reward, input dependence, form, filter, time."""
    curves, alarm = step_curves(run.steps), run.alarm_step
    window = max(len(run.steps) // WINDOWS, 1)
    figures = [
        *_step_figure("loss", "Loss", curves, ("training loss", "held-out loss"), alarm),
        *_step_figure("success", "Success", curves, ("success", "validation success"), alarm),
        *_step_figure("reward", "Reward", curves, ("reward",), alarm),
        *_look_figures(run, alarm),
        *_step_figure("length", "Length of replies", curves, ("reply tokens",), alarm),
        *_step_figure("validity", "Well-formed replies", curves, ("well-formed replies",), alarm),
        *_step_figure(
            "turns", "Reward of a turn", curves, ("well-formed turns", "malformed turns"), alarm
        ),
        *_step_figure(
            "filter", "Filter", curves, ("kept groups", "groups without variance"), alarm
        ),
        *_step_figure(
            "variance", "Reward variance in a group", curves, ("reward variance",), alarm
        ),
        *_step_figure(OUTCOME_FREE, "Outcome-free share", curves, ("outcome-free share",), alarm),
        *_time_figure(run, alarm),
    ]
    means = "" if window < 2 else f" Faint lines are single steps, strong ones means over {window}."
    marked = "" if alarm is None else f" The dashed red line is the alarm of step {alarm}."
    cut = about_cuts(drawn.chart for drawn in figures)
    bands = "" if run.diagnosis is None else "Bands are 95 % intervals over prompts."
    text = f"{bands}{cut}{means}{marked}".lstrip()
    return Section(title="Over the steps", text=text, figures=tuple(figures))


AXES = {
    "training loss": "nats per reply token",
    "held-out loss": "nats per reply token",
    "reward": "mean over trajectories",
    "reply tokens": "tokens",
    "well-formed turns": "mean over turns",
    "malformed turns": "mean over turns",
    "reward variance": "mean over groups",
}
"""Of curves that are not shares."""
OUTCOME_FREE = "outcome_free"
RARE = ("validation", "held-out")
"""How the names of curves begin that are measured now and then only."""


def _step_figure(
    slug: str, title: str, curves: Mapping[str, Points], names: Sequence[str], alarm: int | None
) -> Iterator[Drawn]:
    """One figure, if any of its curves is known."""
    known = [name for name in names if name in curves]
    if not known:
        return
    lines = [
        line
        for style, name in enumerate(known)
        for line in _lines(name, curves[name], style, is_rare=name.startswith(RARE))
    ]
    chart = line_chart(
        lines,
        y_title=AXES.get(known[0], "share"),
        alarm_step=alarm,
        level=("", FREE_ABOVE) if slug == OUTCOME_FREE else None,
    )
    caption = OUTCOME_FREE_CAPTION if slug == OUTCOME_FREE else ""
    yield Drawn(slug=slug, title=title, chart=chart, caption=caption)


def _lines(name: str, points: Points, style: int, *, is_rare: bool) -> list[Curve]:
    """Every step faintly and the running mean on top; now and then measured ones as they are."""
    steps, values = points
    if is_rare:
        return [Curve(name=name, x=steps, y=values, style=style, has_dots=True)]
    window = max(len(steps) // WINDOWS, 1)
    x, y = thinned(steps, values)
    if window < 2:
        return [Curve(name=name, x=x, y=y, style=style)]
    mean_x, mean_y = thinned(steps, smoothed(values, window))
    return [
        Curve(name=name, x=x, y=y, style=style, is_faint=True),
        Curve(name=name, x=mean_x, y=mean_y, style=style),
    ]


def _look_figures(run: RunData, alarm: int | None) -> Iterator[Drawn]:
    if run.diagnosis is None:
        return
    series = run.diagnosis.series
    for name, (title, y_title) in MEASURED.items():
        views = _views(series)
        curves = [
            _look_curve(label, looks, name, style)
            for style, (label, looks) in enumerate(views.items())
        ]
        level = None
        if name == "mi_estimate":
            level = ("", 0.0)
        elif name == "retrieval_accuracy":
            level = _chance(views)
        chart = line_chart(curves, y_title=y_title, alarm_step=alarm, level=level, show_names=True)
        yield Drawn(slug=name, title=title, chart=chart)
    yield from _worth_figure(series, alarm)
    yield from _chain_figure(series, alarm)


def _worth_figure(series: Sequence[Series], alarm: int | None) -> Iterator[Drawn]:
    known = [each for each in series if each.worths]
    if not known:
        return
    curves = []
    for style, each in enumerate(known):
        intervals = [worth.interval for _, worth in each.worths]
        curve = Curve(
            name=each.name,
            x=[look.step or 0 for look, _ in each.worths],
            y=[worth.correlation for _, worth in each.worths],
            low=[interval.low for interval in intervals],
            high=[interval.high for interval in intervals],
            style=style,
            has_dots=True,
        )
        curves.append(curve)
    chart = line_chart(curves, y_title="correlation", alarm_step=alarm, level=("", 0.0))
    yield Drawn(slug=WORTH, title=WORTH_TITLE, chart=chart, caption=WORTH_CAPTION)


def _chain_figure(series: Sequence[Series], alarm: int | None) -> Iterator[Drawn]:
    """I(X;A) and I(Z;A|X) of every environment."""
    named = {
        f"{f'{each.env}: ' if len(series) > 1 else ''}{LINKS[name]}": found
        for each in series
        for name, found in each.links.items()
    }
    curves = []
    for style, (name, found) in enumerate(named.items()):
        known = [link.interval for _, link in found if link.interval is not None]
        has_band = len(known) == len(found)
        curve = Curve(
            name=name,
            x=[step for step, _ in found],
            y=[link.mi_nats for _, link in found],
            low=[interval.low for interval in known] if has_band else (),
            high=[interval.high for interval in known] if has_band else (),
            style=style,
            has_dots=True,
        )
        curves.append(curve)
    if curves:
        title, options = "Task, reasoning and action", {"alarm_step": alarm, "show_names": True}
        chart = line_chart(curves, y_title="nats beyond chance", level=("", 0.0), **options)
        yield Drawn(slug="chain", title=title, chart=chart, caption=CHAIN_CAPTION)


def _views(series: Sequence[Series]) -> dict[str, Sequence[Look]]:
    """Looks of every view of every environment; turns of their own are left to `diagnose`."""
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


def _look_curve(label: str, looks: Sequence[Look], name: str, style: int) -> Curve:
    intervals = [interval_of(look.report, name) for look in looks]
    known = [interval for interval in intervals if interval is not None]
    has_band = len(known) == len(looks)
    return Curve(
        name=label,
        x=[look.step or 0 for look in looks],
        y=[getattr(look.report, name) for look in looks],
        low=[interval.low for interval in known] if has_band else (),
        high=[interval.high for interval in known] if has_band else (),
        style=style,
        has_dots=True,
    )


def _time_figure(run: RunData, alarm: int | None) -> Iterator[Drawn]:
    seconds = phase_seconds(run.timing)
    if not seconds:
        return
    steps = [record["step"] for record in run.timing]
    thin = {phase: thinned(steps, values)[1] for phase, values in seconds.items()}
    chart = phase_chart(thinned(steps, steps)[0], thin, alarm)
    yield Drawn(slug="time", title="Time of a step by phase", chart=chart)
