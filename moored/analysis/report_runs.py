"""The report on several runs: curves of repeats and their mean, tables, differing options."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from moored.algo.snr import FREE_ABOVE
from moored.analysis.compare import (
    Arm,
    Comparison,
    alarms_of,
    compare_runs,
    explanation,
    figure_cell,
    half_width,
    option_cell,
    verdicts_of,
)
from moored.analysis.figures import (
    Curve,
    PlanePath,
    about_cuts,
    line_chart,
    plane_chart,
)
from moored.analysis.findings import Grid, Kind
from moored.analysis.report import Drawn, Report, Section, empty_report
from moored.analysis.report_data import (
    CHAIN_CAPTION,
    CHAIN_CURVES,
    FIGURES,
    OUTCOME_FREE,
    OUTCOME_FREE_CAPTION,
    WORTH,
    WORTH_CAPTION,
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
FEW_SEEDS = 3
"""Up to this many have lines of their own: their interval is 4 to 13 standard errors wide."""
MOST_SEED_LINES, MOST_BANDS = 12, 4
"""More of them hide the means."""
NAMED_OPTIONS = 3
"""An arm is called by the options that differ, up to this many."""
CAPTIONS = {
    WORTH: WORTH_CAPTION,
    OUTCOME_FREE: OUTCOME_FREE_CAPTION,
    **dict.fromkeys(CHAIN_CURVES, CHAIN_CAPTION),
}

Curves = Mapping[str, Points]
Arms = Mapping[str, Sequence[Curves]]
"""Name of a setting -> the curves of each of its runs."""


def report_of_runs(
    paths: Sequence[Path],
    *,
    until: int | None = None,
    on_run: Callable[[], None] | None = None,
) -> Report:
    """Compare the runs that can be read; a single one is shown in full."""
    left_out: dict[str, str] = {}
    curves: dict[Path, Curves] = {}
    for path in paths:
        try:
            curves[path] = read_curves(path, until)
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
        return empty_report(left_out)
    left_out |= found.left_out
    runs = [run for arm in found.arms for run in arm.runs]
    if len(runs) == 1:
        return replace(report_of_run(runs[0].path), left_out=left_out)
    return _compared(found, curves, left_out)


def _compared(
    found: Comparison, curves: Mapping[Path, Curves], left_out: Mapping[str, str]
) -> Report:
    num_runs = sum(len(arm.runs) for arm in found.arms)
    arms = len(found.arms)
    of = "" if arms == num_runs else f" of {arms} setting{'s' if arms > 1 else ''}"
    names = {arm.label: _name_of(arm, found) for arm in found.arms}
    members = {names[arm.label]: [curves[run.path] for run in arm.runs] for arm in found.arms}
    runs = [
        (arm.label, str(run.path), option_cell(run.options.get("seed", "–")), str(run.last_step))
        for arm in found.arms
        for run in arm.runs
    ]
    sections = (
        *curve_sections(members),
        _table(found, names),
        _options(found),
        list_runs(runs),
    )
    return Report(
        kind=Kind.PLAIN,
        title=f"{num_runs} runs{of}",
        meaning=tuple(_verdict_line(found)),
        facts={"settings": "; ".join(map(_with_seeds, names.values(), found.arms))}
        if arms <= 6
        else {},
        sections=sections,
        left_out=left_out,
    )


def _verdict_line(found: Comparison) -> list[str]:
    """How many runs ended with which verdict, and how many raised an alarm."""
    runs = [run for arm in found.arms for run in arm.runs]
    words = [run.verdict or "not measured" for run in runs]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    alarms = sum(run.alarm_step is not None for run in runs)
    return [f"Verdicts at the end: {counts}. Runs with an alarm: {alarms} of {len(runs)}."]


def read_curves(path: Path, until: int | None = None) -> Curves:
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
    return f"{arm.label}: {_folder_of(arm, found)}"


def _folder_of(arm: Arm, found: Comparison) -> str:
    """The folder of its run or of its seeds, from where those of all settings part."""
    shared = os.path.commonpath([run.path.absolute().parent for a in found.arms for run in a.runs])
    own = os.path.relpath(os.path.commonpath([run.path.absolute() for run in arm.runs]), shared)
    return arm.runs[0].path.name if own == os.curdir else own


def _with_seeds(name: str, arm: Arm) -> str:
    return f"{name} ({len(arm.runs)} seeds)" if len(arm.runs) > 1 else name


def curve_sections(arms: Arms) -> tuple[Section, Section]:
    """Every curve over the steps, and the plane; a setting has one colour in all figures."""
    known = dict.fromkeys(name for runs in arms.values() for curves in runs for name in curves)
    ordered = sorted(known, key=lambda name: list(FIGURES).index(name.partition(",")[0]))
    figures = [_figure(name, arms) for name in ordered]
    cut = about_cuts(drawn.chart for drawn in figures)
    curves = Section(
        title="Over the steps",
        text=f"Running means over steps.{_what_is_drawn(arms)}{cut}",
        figures=tuple(figures),
    )
    return curves, _plane(arms, known)


def _what_is_drawn(arms: Arms) -> str:
    """A sentence on the mean, the lines of seeds and the bands."""
    nums = [len(runs) for runs in arms.values()]
    if max(nums) == 1:
        return ""
    said = " The strong line of a setting is the mean over its seeds and ends with its shortest run"
    if _arms_with_seed_lines(arms):
        said += "; thin lines are single seeds"
    elif any(1 < num <= FEW_SEEDS for num in nums):
        said += f"; lines of single seeds are left out where they would be over {MOST_SEED_LINES}"
    if _arms_with_bands(arms):
        said += f"; bands, from {FEW_SEEDS + 1} seeds on, are 95 % intervals of the mean"
    elif max(nums) > FEW_SEEDS:
        said += "; the bands of so many settings would hide each other, the table has the intervals"
    return f"{said}."


def _arms_with_seed_lines(arms: Arms) -> list[str]:
    few = [name for name, runs in arms.items() if 1 < len(runs) <= FEW_SEEDS]
    return few if sum(len(arms[name]) for name in few) <= MOST_SEED_LINES else []


def _arms_with_bands(arms: Arms) -> list[str]:
    many = [name for name, runs in arms.items() if len(runs) > FEW_SEEDS]
    return many if len(many) <= MOST_BANDS else []


def _figure(name: str, arms: Arms) -> Drawn:
    base, _, env = name.partition(", ")
    title, y_title = FIGURES[base]
    single, banded = _arms_with_seed_lines(arms), _arms_with_bands(arms)
    lines: list[Curve] = []
    for style, (label, runs) in enumerate(arms.items()):
        members = [curves[name] for curves in runs if name in curves]
        if len(members) > 1 and label in single:
            lines += [_seed_curve(member, label, style) for member in members]
        if members:
            lines.append(_mean_curve(members, label, style, has_band=label in banded))
    levels = {OUTCOME_FREE: FREE_ABOVE, **dict.fromkeys((WORTH, *CHAIN_CURVES), 0.0)}
    level = ("", levels[base]) if base in levels else None
    chart = line_chart(lines, y_title=y_title, level=level, show_names=len(arms) > 1)
    return Drawn(
        slug=f"{slug_of(base)}_{env}" if env else slug_of(base),
        title=f"{title}, {env}" if env else title,
        chart=chart,
        caption=CAPTIONS.get(base, ""),
    )


def slug_of(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _seed_curve(points: Points, label: str, style: int) -> Curve:
    smooth = _smooth(points)
    x, y = thinned(list(smooth), list(smooth.values()), MOST_POINTS)
    return Curve(name=label, x=x, y=y, style=style, is_faint=True)


def _mean_curve(
    members: Sequence[Points], label: str, style: int, *, has_band: bool = False
) -> Curve:
    """Mean, and its interval, over runs at the steps that all of them have."""
    smooth = [_smooth(member) for member in members]
    shared = [step for step in smooth[0] if all(step in other for other in smooth[1:])]
    values = [[member[step] for member in smooth] for step in shared]
    x, y = thinned(shared, [fmean(each) for each in values], MOST_POINTS)
    if not has_band or len(members) == 1:
        return Curve(name=label, x=x, y=y, style=style)
    halves = thinned(shared, [half_width(each) or 0.0 for each in values], MOST_POINTS)[1]
    low, high = ([m + sign * h for m, h in zip(y, halves, strict=True)] for sign in (-1, 1))
    return Curve(name=label, x=x, y=y, low=low, high=high, style=style)


def _smooth(points: Points) -> dict[int, float]:
    steps, values = points
    return dict(zip(steps, smoothed(values, max(len(steps) // WINDOWS, 1)), strict=True))


def _plane(arms: Arms, known: Iterable[str]) -> Section:
    """The mean path of every setting, for each environment."""
    suffixes = [name.removeprefix("MI") for name in known if name.partition(",")[0] == "MI"]
    figures = []
    for suffix in suffixes:
        paths = []
        for style, (label, runs) in enumerate(arms.items()):
            mi, entropy = (
                [curves[key] for curves in runs if key in curves]
                for key in (f"MI{suffix}", f"H(Z|X){suffix}")
            )
            if mi and entropy:
                paths.append(_arm_path(mi, entropy, label, style))
        env = suffix.removeprefix(", ")
        slug, title = (f"plane_{env}", env) if env else ("plane", "H(Z|X) and MI")
        figures.append(Drawn(slug=slug, title=title, chart=plane_chart(paths)))
    return Section(
        title="Diversity and input dependence",
        text="The path of each setting on the plane of H(Z|X) and MI, means over seeds; the open "
        "circle is the first look, the large one the last.",
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


def list_runs(rows: Sequence[tuple[str, ...]]) -> Section:
    """Setting, folder, seed and steps of every run."""
    grid = Grid(("setting", "run", "seed", "steps"), tuple(rows))
    return Section(title="Runs", grids={"": grid}, is_folded=len(rows) > MOST_LISTED)


def _options(found: Comparison) -> Section:
    header = ("option", *(arm.label for arm in found.arms))
    rows = tuple((name, *map(option_cell, values)) for name, values in found.options.items())
    return Section(title="Options that differ", grids={"": Grid(header, rows)} if rows else {})
