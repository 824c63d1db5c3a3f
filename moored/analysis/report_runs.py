"""The report on several runs: curves of repeats as mean and band, tables, differing options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from moored.algo.snr import FREE_ABOVE
from moored.analysis.compare import Arm, Comparison, compare_runs, half_width
from moored.analysis.compare_text import (
    alarms_of,
    explanation,
    figure_cell,
    option_cell,
    verdicts_of,
)
from moored.analysis.figures import (
    Curve,
    PlanePath,
    about_cuts,
    color_of,
    dash_of,
    line_chart,
    plane_chart,
)
from moored.analysis.findings import Grid, Kind
from moored.analysis.report import About, Drawn, LegendEntry, Report, Section, empty_report
from moored.analysis.report_data import (
    CHAIN_CAPTION,
    CHAIN_CURVES,
    OUTCOME_FREE_CAPTION,
    WORTH,
    WORTH_CAPTION,
    WORTH_TITLE,
    Points,
    look_curves,
    phase_seconds,
    smoothed,
    step_curves,
    thinned,
)
from moored.analysis.report_run import report_of_run
from moored.errors import MooredError
from moored.runlog.log import Stream, read_records

MOST_POINTS = 200
"""Of a curve, where there are many."""
WINDOWS = 40
"""The running mean of a curve takes in one of this many parts of it."""
MOST_LISTED = 12
"""Runs; more of them are listed on demand."""
OUTCOME_FREE = "outcome-free share"
"""Name of its curve."""
FEW_SEEDS = 3
"""Up to this many, each has a faint line of its own: their interval alone says little."""
MOST_SEED_LINES = 12
"""More of them hide the means."""
NAMED_OPTIONS = 3
"""An arm is called by the options that differ, up to this many."""
FIGURES = {
    "training loss": ("Training loss", "nats per reply token"),
    "held-out loss": ("Held-out loss", "nats per reply token"),
    "success": ("Success", "share"),
    "validation success": ("Validation success", "share"),
    "reward": ("Reward", "mean over trajectories"),
    "retrieval": ("Retrieval of the prompt", "share"),
    "MI": ("MI of reasoning and prompt", "nats per token"),
    "H(Z|X)": ("Conditional entropy H(Z|X)", "nats per token"),
    WORTH: (WORTH_TITLE, "correlation"),
    **{name: (title, "nats beyond chance") for name, (_, title) in CHAIN_CURVES.items()},
    "reply tokens": ("Length of replies", "tokens"),
    "well-formed replies": ("Well-formed replies", "share"),
    "well-formed turns": ("Reward of a well-formed turn", "mean over turns"),
    "malformed turns": ("Reward of a malformed turn", "mean over turns"),
    "kept groups": ("Kept by the filter", "share of groups"),
    "groups without variance": ("Groups without variance", "share of groups"),
    "reward variance": ("Reward variance in a group", "mean over groups"),
    OUTCOME_FREE: ("Outcome-free share", "share of the push"),
    "seconds": ("Time of a step", "seconds"),
}
"""Name of a curve -> title and axis of its figure, in order."""
CAPTIONS = {
    WORTH: WORTH_CAPTION,
    OUTCOME_FREE: OUTCOME_FREE_CAPTION,
    **dict.fromkeys(CHAIN_CURVES, CHAIN_CAPTION),
}
UNLIMITED = (-math.inf, math.inf)
SHARE = (0.0, 1.0)
LIMITS = {
    **dict.fromkeys(("share", "share of groups", "share of the push"), SHARE),
    "correlation": (-1.0, 1.0),
}
"""Axis -> what a figure, and so its band, cannot go beyond."""
NEVER_NEGATIVE = (
    *("training loss", "held-out loss"),
    *("H(Z|X)", "reply tokens", "reward variance", "seconds"),
)
"""Figures whose bands end at 0."""

Curves = Mapping[str, Points]


def report_of_runs(
    paths: Sequence[Path],
    about: About,
    *,
    until: int | None = None,
    on_run: Callable[[], None] | None = None,
) -> Report:
    """Compare the runs that can be read; a single one is shown in full."""
    left_out: dict[str, str] = {}
    curves: dict[Path, Curves] = {}
    for path in paths:
        try:
            curves[path] = _read_curves(path, until)
        except (MooredError, OSError) as error:
            left_out[str(path)] = str(error)
        if on_run is not None:
            on_run()
    try:
        found = compare_runs(list(curves), until=until) if curves else None
    except MooredError as error:
        left_out |= dict.fromkeys(map(str, curves), str(error))
        found = None
    if found is None:
        return empty_report(left_out, about)
    left_out |= found.left_out
    runs = [run for arm in found.arms for run in arm.runs]
    if len(runs) == 1:
        return replace(report_of_run(runs[0].path, about), left_out=left_out)
    return _compared(found, curves, left_out, about)


def _compared(
    found: Comparison, curves: Mapping[Path, Curves], left_out: Mapping[str, str], about: About
) -> Report:
    num_runs = sum(len(arm.runs) for arm in found.arms)
    arms = len(found.arms)
    of = "" if arms == num_runs else f" of {arms} setting{'s' if arms > 1 else ''}"
    names = {arm.label: _name_of(arm, found) for arm in found.arms}
    sections = (
        _legend_and_curves(found, curves, names),
        _plane(found, curves, names),
        _table(found, names),
        _options(found),
        _runs(found),
    )
    return Report(
        kind=Kind.PLAIN,
        title=f"{num_runs} runs{of}",
        meaning=tuple(_verdict_line(found)),
        facts={"settings": "; ".join(names.values())} if arms <= 6 else {},
        notes=(),
        sections=tuple(s for s in sections if s.figures or s.grids),
        left_out=left_out,
        command=about.command,
        versions=about.versions,
    )


def _verdict_line(found: Comparison) -> list[str]:
    """How many runs ended with which verdict, and how many raised an alarm."""
    runs = [run for arm in found.arms for run in arm.runs]
    words = [run.verdict or "not measured" for run in runs]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    alarms = sum(run.alarm_step is not None for run in runs)
    return [f"Verdicts at the end: {counts}. Runs with an alarm: {alarms} of {len(runs)}."]


def _read_curves(path: Path, until: int | None) -> Curves:
    """Every curve of a run that the comparison shows."""
    streams: tuple[Stream, ...] = ("metrics", "collapse", "timing")
    steps, looks, timing = (_up_to(read_records(path, stream), until) for stream in streams)
    curves = step_curves(steps) | look_curves(looks)
    phases = list(phase_seconds(timing).values())
    if phases:
        total = [math.fsum(parts) for parts in zip(*phases, strict=True)]
        curves["seconds"] = ([record["step"] for record in timing], total)
    return curves


def _up_to(records: Sequence[Mapping[str, Any]], until: int | None) -> list[Mapping[str, Any]]:
    return [record for record in records if until is None or record["step"] <= until]


def _name_of(arm: Arm, found: Comparison) -> str:
    """A, and what sets it apart: the options that differ, or its folder where they are many."""
    place = found.arms.index(arm)
    options = {name: values for name, values in found.options.items() if name != "seed"}
    if 0 < len(options) <= NAMED_OPTIONS:
        parts = [f"{n.rpartition('.')[2]} {option_cell(v[place])}" for n, v in options.items()]
        return f"{arm.label}: {', '.join(parts)}"
    return f"{arm.label}: {arm.runs[0].path.name}"


def _legend_and_curves(
    found: Comparison, curves: Mapping[Path, Curves], names: Mapping[str, str]
) -> Section:
    known = dict.fromkeys(name for of_run in curves.values() for name in of_run)
    ordered = sorted(known, key=lambda name: list(FIGURES).index(name.partition(",")[0]))
    figures = [_figure(name, found, curves, names) for name in ordered]
    has_seeds = any(len(arm.runs) > 1 for arm in found.arms)
    bands = " Bands are 95 % intervals of the mean over seeds." if has_seeds else ""
    if _arms_with_seed_lines(found):
        bands += " Faint lines are single seeds."
    bands += about_cuts(drawn.chart for drawn in figures)
    legend = tuple(
        LegendEntry(color_of(style), dash_of(style), f"{names[arm.label]}{_seeds(arm)}")
        for style, arm in enumerate(found.arms)
    )
    return Section(
        title="Over the steps",
        text=f"Running means; that of a setting ends with its shortest run.{bands}",
        legend=legend,
        figures=tuple(figures),
    )


def _seeds(arm: Arm) -> str:
    return f" ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""


def _arms_with_seed_lines(found: Comparison) -> list[Arm]:
    """Settings whose seeds have lines of their own."""
    arms = [arm for arm in found.arms if 1 < len(arm.runs) <= FEW_SEEDS]
    return arms if sum(len(arm.runs) for arm in arms) <= MOST_SEED_LINES else []


def _figure(
    name: str, found: Comparison, curves: Mapping[Path, Curves], names: Mapping[str, str]
) -> Drawn:
    base, _, env = name.partition(", ")
    title, y_title = FIGURES[base]
    within = (0.0, math.inf) if base in NEVER_NEGATIVE else LIMITS.get(y_title, UNLIMITED)
    single = _arms_with_seed_lines(found)
    lines: list[Curve] = []
    for style, arm in enumerate(found.arms):
        members = [c[name] for run in arm.runs if name in (c := curves[run.path])]
        label = names[arm.label]
        if len(members) > 1 and arm in single:
            lines += [_seed_curve(member, label, style) for member in members]
        if members:
            lines.append(_mean_curve(members, label, style, within=within))
    levels = {OUTCOME_FREE: FREE_ABOVE, **dict.fromkeys((WORTH, *CHAIN_CURVES), 0.0)}
    level = ("", levels[base]) if base in levels else None
    chart = line_chart(lines, y_title=y_title, level=level, show_names=False)
    slug = base.lower().replace(" ", "_").replace("(z|x)", "_z_x").replace("-", "_")
    return Drawn(
        slug=f"{slug}_{env}" if env else slug,
        title=f"{title}, {env}" if env else title,
        chart=chart,
        caption=CAPTIONS.get(base, ""),
    )


def _seed_curve(points: Points, label: str, style: int) -> Curve:
    smooth = _smooth(points)
    x, y = thinned(list(smooth), list(smooth.values()), MOST_POINTS)
    return Curve(name=label, x=x, y=y, style=style, is_faint=True)


def _mean_curve(
    members: Sequence[Points],
    label: str,
    style: int,
    *,
    within: tuple[float, float] = UNLIMITED,
) -> Curve:
    """Mean and band over runs at the steps that all of them have."""
    smooth = [_smooth(member) for member in members]
    shared = [step for step in smooth[0] if all(step in other for other in smooth[1:])]
    values = [[member[step] for member in smooth] for step in shared]
    x, y = thinned(shared, [fmean(each) for each in values], MOST_POINTS)
    if len(members) == 1:
        return Curve(name=label, x=x, y=y, style=style)
    halves = thinned(shared, [half_width(each) or 0.0 for each in values], MOST_POINTS)[1]
    least, most = within
    return Curve(
        name=label,
        x=x,
        y=y,
        low=[max(mean - half, least) for mean, half in zip(y, halves, strict=True)],
        high=[min(mean + half, most) for mean, half in zip(y, halves, strict=True)],
        style=style,
    )


def _smooth(points: Points) -> dict[int, float]:
    steps, values = points
    return dict(zip(steps, smoothed(values, max(len(steps) // WINDOWS, 1)), strict=True))


def _plane(found: Comparison, curves: Mapping[Path, Curves], names: Mapping[str, str]) -> Section:
    """The mean path of every arm, for each environment."""
    known = dict.fromkeys(name for of_run in curves.values() for name in of_run)
    suffixes = [name.removeprefix("MI") for name in known if name.partition(",")[0] == "MI"]
    figures = []
    for suffix in suffixes:
        paths = []
        for style, arm in enumerate(found.arms):
            members = [curves[run.path] for run in arm.runs]
            mi, entropy = (
                [c[key] for c in members if key in c] for key in (f"MI{suffix}", f"H(Z|X){suffix}")
            )
            if mi and entropy:
                paths.append(_arm_path(mi, entropy, names[arm.label], style))
        chart = plane_chart(paths)
        chart["layout"]["showlegend"] = False
        env = suffix.removeprefix(", ")
        slug, title = (f"plane_{env}", env) if env else ("plane", "H(Z|X) and MI")
        figures.append(Drawn(slug=slug, title=title, chart=chart))
    return Section(
        title="Diversity and input dependence",
        text="The path of each setting on the plane of H(Z|X) and MI, means over seeds; the open "
        "circle is the first look, the large one the last. Colours as above.",
        figures=tuple(figures),
        columns=min(max(len(figures), 1), 2),
    )


def _arm_path(mi: Sequence[Points], entropy: Sequence[Points], name: str, style: int) -> PlanePath:
    mi_curve, entropy_curve = _mean_curve(mi, name, style), _mean_curve(entropy, name, style)
    at = dict(zip(entropy_curve.x, entropy_curve.y, strict=True))
    shared = [(x, y, at[x]) for x, y in zip(mi_curve.x, mi_curve.y, strict=True) if x in at]
    return PlanePath(
        name=name,
        entropy=[h for _, _, h in shared],
        mi=[y for _, y, _ in shared],
        texts=[f"{name}<br>step {x:g}: MI {y:.3f}, H(Z|X) {h:.3f}" for x, y, h in shared],
        style=style,
    )


def _table(found: Comparison, names: Mapping[str, str]) -> Section:
    """One row for each arm: start, end and interval of every figure."""
    figures = [arm.figures() for arm in found.arms]
    columns = list(dict.fromkeys(name for each in figures for name in each))
    rows = [
        (
            names[arm.label],
            str(len(arm.runs)),
            *(figure_cell(each.get(column)) for column in columns),
            verdicts_of(arm),
            alarms_of(arm),
        )
        for arm, each in zip(found.arms, figures, strict=True)
    ]
    header = ("start → end", "runs", *columns, "verdict", "alarm at step")
    return Section(
        title="Start and end",
        text=" ".join(explanation(found)),
        grids={"": Grid(header, tuple(rows))},
    )


def _runs(found: Comparison) -> Section:
    rows = tuple(
        (arm.label, str(run.path), option_cell(run.options.get("seed", "–")), str(run.last_step))
        for arm in found.arms
        for run in arm.runs
    )
    grid = Grid(("setting", "run", "seed", "steps"), rows)
    return Section(title="Runs", grids={"": grid}, is_folded=len(rows) > MOST_LISTED)


def _options(found: Comparison) -> Section:
    header = ("option", *(arm.label for arm in found.arms))
    rows = tuple((name, *map(option_cell, values)) for name, values in found.options.items())
    return Section(title="Options that differ", grids={"": Grid(header, rows)} if rows else {})
