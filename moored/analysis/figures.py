"""Every figure of a report, as Plotly data: curves, plane, heat maps, histogram, bars.

A figure is a dict of `data` and `layout`, ready for JSON, so nothing is imported to make one:
`plotly.graph_objects.Figure(chart)` takes it in Python and `Plotly.newPlot` in a browser. Colours
are readable on white and on black; the page sets the colour of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moored.analysis.axis import CutAxis, cut_axis
from moored.analysis.study_table import Mean
from moored.diagnostics.report import Regime

Chart = dict[str, Any]
Numbers = Sequence[float]

PALETTE = ("#3b82f6", "#e07b28", "#1f9d6b", "#d64561", "#8b6fd6", "#0f9aa8", "#b08a1e", "#c2569b")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
GOOD, BAD, WARNING, SOFT = "#1f9d6b", "#d8434e", "#c98a1b", "#8792a2"
KIND_COLORS = {"good": GOOD, "bad": BAD, "warning": WARNING, "plain": SOFT}
GRID = "rgba(128,138,152,0.25)"
CLEAR = "rgba(0,0,0,0)"
HEIGHT = 270
"""Without the legend: the page and the PNG add its height."""
ROWS_HEIGHT, ROW_HEIGHT = 80, 24
"""Of a figure with a row for each arm."""
LEGEND_HEIGHT = 140
"""More names are scrolled."""
ENTROPY = "H(Z|X) per token, nats"
SHARE, POSITIVE = (0.0, 1.0), (0.0, math.inf)
LIMITS = {
    **dict.fromkeys(("share", "share of groups", "share of the push"), SHARE),
    "correlation": (-1.0, 1.0),
    **dict.fromkeys(("tokens", "seconds", "mean over groups"), POSITIVE),
    **dict.fromkeys(("nats per reply token", ENTROPY), POSITIVE),
}
"""Title of an axis -> what its figures, and so their bands, cannot go beyond."""
UNLIMITED = (-math.inf, math.inf)
ROOM, EDGE = 0.05, 0.015
"""Around what is drawn, in heights of it; and beyond a limit, so that a line there is seen."""
FLAT = 1e-9
"""A height in sizes of the largest value that is rounding only."""
BAND_OPACITY = 0.12
CUT = "cut bands"
"""Name of the note that bands leave the axis."""
DIGITS = 4
"""Significant digits of a number in a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line over steps, and the band around it."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    """Lower edge of the band; empty without one."""
    high: Numbers = ()
    style: int = 0
    """Number of its colour, and beyond the palette of its dashes."""
    is_faint: bool = False
    """Stands behind the smoothed line of the same name."""
    has_dots: bool = False
    """Measured now and then, so that the places matter."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the plane is divided into regimes."""

    entropy: float
    mi: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanePath:
    """Where a run was on the plane of diversity and input dependence, look by look."""

    name: str
    entropy: Numbers
    mi: Numbers
    texts: Sequence[str]
    """What to show for each look."""
    kinds: Sequence[str] = ()
    """`good`, `bad` or `warning` for each look; empty to colour by `style`."""
    style: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar for each category, with its interval."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]


def line_chart(
    curves: Sequence[Curve],
    *,
    y_title: str,
    x_title: str = "step",
    alarm_step: int | None = None,
    level: tuple[str, float] | None = None,
    show_names: bool | None = None,
) -> Chart:
    """Curves over steps; `level` draws a dashed line across.

    Where bands are much wider than the curves, the axis follows the curves.
    """
    # Bands first, then faint lines: they must not hide the line of another curve.
    least, most = LIMITS.get(y_title, UNLIMITED)
    bands = {
        number: (np.clip(curve.low, least, most), np.clip(curve.high, least, most))
        for number, curve in enumerate(curves)
        if len(curve.low)
    }
    data = [_band(curves[number], low, high) for number, (low, high) in bands.items()]
    data += [_line(curve) for curve in sorted(curves, key=lambda curve: not curve.is_faint)]
    layout = base_layout(x_title, y_title)
    longest = max((max(curve.x, default=1) for curve in curves), default=1)
    layout["xaxis"]["range"] = [0, 1.02 * longest]
    named = [curve for curve in curves if not curve.is_faint]
    layout["showlegend"] = len(named) > 1 if show_names is None else show_names
    heights = [value for curve in curves for value in curve.y]
    edges = [edge for band in bands.values() for side in band for edge in side]
    _fit_axis(layout, "yaxis", [*heights, *([level[1]] if level else [])], edges, alarm_step)
    if level is not None:
        _add_level(layout, *level)
    if alarm_step is not None:
        _add_alarm(layout, alarm_step)
    return {"data": data, "layout": layout}


def plane_chart(paths: Sequence[PlanePath], cuts: Cuts | None = None) -> Chart:
    """MI over H(Z|X), the path of each run; with cuts the four regimes."""
    data = [trace for path in paths for trace in _path_traces(path)]
    layout = base_layout(ENTROPY, "MI per token, nats", height=400)
    layout |= {"hovermode": "closest", "showlegend": len(paths) > 1}
    xs = [value for path in paths for value in path.entropy]
    ys = [value for path in paths for value in path.mi]
    if cuts is not None and xs:
        x_range = _padded([*xs, cuts.entropy])
        y_range = _padded([*ys, cuts.mi])
        layout["xaxis"]["range"], layout["yaxis"]["range"] = x_range, y_range
        layout["shapes"] = _regime_shapes(cuts, x_range, y_range)
        layout["annotations"] = _regime_names(x_range, y_range)
    return {"data": data, "layout": layout}


def phase_chart(steps: Numbers, seconds: Mapping[str, Numbers], alarm_step: int | None) -> Chart:
    """Seconds of each step, its phases on top of each other."""
    data = [
        {
            "type": "scatter",
            # A line through one point cannot be seen.
            "mode": "lines+markers" if len(steps) == 1 else "lines",
            "name": phase,
            "x": _whole(steps),
            "y": short(values),
            "stackgroup": "phases",
            "line": {"width": 0.5, "color": PALETTE[number % len(PALETTE)]},
            "hovertemplate": "%{y:.3g} s",
        }
        for number, (phase, values) in enumerate(seconds.items())
    ]
    layout = base_layout("step", "seconds")
    layout["yaxis"] |= {"rangemode": "tozero"}
    if alarm_step is not None:
        _add_alarm(layout, alarm_step)
    return {"data": data, "layout": layout}


def variance_histogram(kept: np.ndarray, dropped: np.ndarray, num_bins: int = 30) -> Chart:
    """How many groups have which RV, and which of them the filter kept."""
    everything = np.concatenate([kept, dropped])
    top = float(everything.max(initial=0.0)) or 1.0
    edges = np.linspace(0.0, top, num_bins + 1)
    middles = short((edges[:-1] + edges[1:]) / 2)
    parts = (("kept", kept, GOOD), ("dropped", dropped, SOFT))
    data = [
        {
            "type": "bar",
            "name": f"{name} ({len(values):,})",
            "x": middles,
            "y": np.histogram(values, edges)[0].tolist(),
            "width": float(f"{top / num_bins:.6g}"),
            "marker": {"color": color, "line": {"width": 0}},
            "hovertemplate": "RV about %{x}: %{y} groups",
        }
        for name, values, color in parts
        if len(values)
    ]
    layout = base_layout("reward variance of the group (RV)", "groups")
    layout |= {"barmode": "stack", "bargap": 0.0, "showlegend": True}
    return {"data": data, "layout": layout}


def bar_chart(
    categories: Sequence[str], bars: Sequence[Bars], *, x_title: str, y_title: str
) -> Chart:
    """Bars side by side in each category, with error bars where an interval is known."""
    data = []
    for number, each in enumerate(bars):
        data.append(
            {
                "type": "bar",
                "name": each.name,
                "x": list(categories),
                "y": short(each.values),
                "marker": {"color": PALETTE[number % len(PALETTE)]},
                "error_y": _error(each.values, each.low, each.high),
            }
        )
    layout = base_layout(x_title, y_title)
    layout |= {"barmode": "group", "showlegend": True}
    layout["xaxis"] |= {"type": "category"}
    return {"data": data, "layout": layout}


def arm_chart(arms: Mapping[str, Mean], styles: Mapping[str, int], *, x_title: str) -> Chart:
    """A row for each arm: its seeds, and their mean with its interval."""
    least, most = LIMITS.get(x_title, UNLIMITED)
    data, values, edges = [], [], []
    for name, mean in arms.items():
        color, seeds, half = color_of(styles[name]), mean.by_seed, mean.half_width or 0.0
        low, high = max(mean.mean - half, least), min(mean.mean + half, most)
        values, edges = [*values, *seeds.values()], [*edges, low, high]
        dots = {"name": name, "type": "scatter", "mode": "markers", "cliponaxis": False}
        interval = _error([mean.mean], [low], [high]) | {"color": color, "thickness": 1.8}
        data += [
            {
                **dots,
                "x": short([mean.mean]),
                "y": [name],
                "marker": {"color": color, "size": 10, "symbol": "diamond"},
                "error_x": interval,
                "hovertemplate": "mean: %{x:.4g}",
            },
            {
                **dots,
                "x": short(list(seeds.values())),
                "y": [name] * len(seeds),
                "text": [f"seed {seed}" for seed in seeds],
                "marker": {"color": color, "size": 7, "opacity": 0.5},
                "hovertemplate": "%{text}: %{x:.4g}",
            },
        ]
    layout = base_layout(x_title, "", height=ROWS_HEIGHT + ROW_HEIGHT * len(arms))
    layout |= {"hovermode": "closest", "showlegend": False}
    layout["yaxis"] |= {"type": "category", "range": [len(arms) - 0.5, -0.5]}
    _fit_axis(layout, "xaxis", values, edges)
    return {"data": data, "layout": layout}


def color_of(style: int) -> str:
    return PALETTE[style % len(PALETTE)]


def dash_of(style: int) -> str:
    return DASHES[style // len(PALETTE) % len(DASHES)]


def _line(curve: Curve) -> Chart:
    color = color_of(curve.style)
    has_dots = curve.has_dots or len(curve.x) == 1
    line = {
        "type": "scatter",
        "mode": "lines+markers" if has_dots else "lines",
        "name": curve.name,
        "legendgroup": curve.name,
        "showlegend": not curve.is_faint,
        "x": _whole(curve.x),
        "y": short(curve.y),
        "line": {"color": color, "width": 1 if curve.is_faint else 2, "dash": dash_of(curve.style)},
        "hovertemplate": "%{y:.4g}",
    }
    if has_dots:
        line["marker"] = {"size": 4 if curve.has_dots else 7}
    if curve.is_faint:
        line |= {"opacity": 0.45, "hoverinfo": "skip"}
        del line["hovertemplate"]
    return line


def _band(curve: Curve, low: np.ndarray, high: np.ndarray) -> Chart:
    steps = _whole(curve.x)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": curve.name,
        "legendgroup": curve.name,
        "showlegend": False,
        "x": [*steps, *reversed(steps)],
        "y": [*short(high), *reversed(short(low))],
        "fill": "toself",
        "fillcolor": color_of(curve.style),
        "opacity": BAND_OPACITY,
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _fit_axis(
    layout: Chart, axis: str, values: Numbers, edges: Numbers, alarm_step: int | None = None
) -> None:
    """The range of an axis: room around what is drawn, but none where no figure can be."""
    drawn = [value for value in (*values, *edges) if math.isfinite(value)]
    if not drawn:
        return
    bottom, top = min(drawn), max(drawn)
    size = max(abs(bottom), abs(top)) or 1.0
    is_flat = top - bottom < FLAT * size
    height = size if is_flat else top - bottom
    least, most = LIMITS.get(layout[axis]["title"]["text"], UNLIMITED)
    if cut := cut_axis(values, edges):
        low, high = cut.low, cut.high
        _add_cut(layout, cut, alarm_step)
    else:
        # A limit that is near belongs into the figure.
        low = bottom - height * (1 if is_flat or bottom - height <= least else ROOM)
        high = top + height * (1 if is_flat or top + height >= most else ROOM)
    low, high = max(low, min(least, bottom)), min(high, max(most, top))
    edge = EDGE * (high - low)
    layout[axis]["range"] = [float(f"{end:.{DIGITS}g}") for end in (low - edge, high + edge)]


def _path_traces(path: PlanePath) -> list[Chart]:
    color = color_of(path.style)
    colors = [KIND_COLORS[kind] for kind in path.kinds] or [color] * len(path.mi)
    last = len(path.mi) - 1
    is_judged = bool(path.kinds)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": path.name,
            "x": short(path.entropy),
            "y": short(path.mi),
            "text": list(path.texts),
            "hovertemplate": "%{text}<extra></extra>",
            "line": {
                "width": 1,
                "color": SOFT if is_judged else color,
                "dash": dash_of(path.style),
            },
            "marker": {
                "color": colors,
                "symbol": ["circle-open" if k == 0 < last else "circle" for k in range(last + 1)],
                "size": [14 if k == last else 10 if k == 0 else 6 for k in range(last + 1)],
            },
        }
    ]


def _regime_shapes(cuts: Cuts, x_range: Numbers, y_range: Numbers) -> list[Chart]:
    dashed = {"color": SOFT, "width": 1, "dash": "dash"}
    (x0, x1), (y0, y1) = x_range, y_range
    lost = {"x0": x0, "x1": x1, "y0": y0, "y1": cuts.mi, "layer": "below", "line": {"width": 0}}
    return [
        {"type": "rect", "fillcolor": BAD, "opacity": 0.08, **lost},
        {"type": "line", "x0": x0, "x1": x1, "y0": cuts.mi, "y1": cuts.mi, "line": dashed},
        {"type": "line", "x0": cuts.entropy, "x1": cuts.entropy, "y0": y0, "y1": y1}
        | {"line": dashed},
    ]


def _regime_names(x_range: Numbers, y_range: Numbers) -> list[Chart]:
    """The name of each regime in the outer corner of its part of the plane."""
    places = {
        Regime.COMPRESSED: (x_range[0], y_range[1], "left", "top"),
        Regime.DIVERSE: (x_range[1], y_range[1], "right", "top"),
        Regime.LOW_ENTROPY_COLLAPSE: (x_range[0], y_range[0], "left", "bottom"),
        Regime.TEMPLATE_COLLAPSE: (x_range[1], y_range[0], "right", "bottom"),
    }
    return [
        {
            "x": x,
            "y": y,
            "xanchor": x_side,
            "yanchor": y_side,
            "text": f"<i>{regime.replace('_', ' ')}</i>",
            "showarrow": False,
            "font": {"size": 11, "color": SOFT},
        }
        for regime, (x, y, x_side, y_side) in places.items()
    ]


def base_layout(x_title: str, y_title: str, *, height: int = HEIGHT) -> Chart:
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "linecolor": GRID}
    return {
        "height": height,
        "margin": {"l": 10, "r": 12, "t": 22, "b": 10},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"size": 12, "color": SOFT},
        "hovermode": "x unified",
        "legend": {
            "orientation": "h",
            "y": 1.08,
            "yanchor": "bottom",
            "x": 0,
            "font": {"size": 11},
            "traceorder": "normal",
            "maxheight": LEGEND_HEIGHT,
        },
        "xaxis": axis | {"title": {"text": x_title, "standoff": 6}},
        "yaxis": axis | {"title": {"text": y_title, "standoff": 6}},
    }


def _add_alarm(layout: Chart, step: int) -> None:
    across = {"x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1}
    line = {"color": BAD, "width": 1.5, "dash": "dash"}
    layout.setdefault("shapes", []).append({"type": "line", **across, "line": line})
    note = {"x": step, "yref": "paper", "y": 1, "yanchor": "bottom", "text": "alarm"}
    note |= {"showarrow": False, "font": {"size": 11, "color": BAD}}
    layout.setdefault("annotations", []).append(note)


def about_cuts(charts: Iterable[Chart]) -> str:
    """A sentence for the text above the figures; empty where no band is cut."""
    notes = [note for chart in charts for note in chart["layout"].get("annotations", ())]
    if not any(note.get("name") == CUT for note in notes):
        return ""
    return (
        " A band much wider than the curves is cut at the edge of the axis, and the figure says "
        "how far it reaches."
    )


def _add_cut(layout: Chart, axis: CutAxis, alarm_step: int | None) -> None:
    """Say what the axis does not show; a double click does."""
    # The word of an alarm stands at the same height, and must stay readable.
    is_left = alarm_step is None or alarm_step > layout["xaxis"]["range"][1] / 2
    side = {"x": 0, "xanchor": "left"} if is_left else {"x": 1, "xanchor": "right"}
    note = {"xref": "paper", **side, "yref": "paper", "y": 1}
    note |= {"yanchor": "bottom", "text": axis.note, "showarrow": False, "name": CUT}
    layout.setdefault("annotations", []).append(note | {"font": {"size": 11, "color": SOFT}})


def _add_level(layout: Chart, name: str, value: float) -> None:
    across = {"xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    line = {"color": SOFT, "width": 1, "dash": "dot"}
    layout.setdefault("shapes", []).append({"type": "line", **across, "line": line})
    if name:
        note = {"xref": "paper", "x": 1, "xanchor": "right", "y": value, "yanchor": "bottom"}
        note |= {"text": name, "showarrow": False, "font": {"size": 11, "color": SOFT}}
        layout.setdefault("annotations", []).append(note)


def _padded(values: Numbers) -> list[float]:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1
    return [low - room, high + room]


def _error(
    values: Sequence[float | None], low: Sequence[float | None], high: Sequence[float | None]
) -> Chart:
    return {
        "type": "data",
        "symmetric": False,
        "array": [_gap(top, value) for top, value in zip(high, values, strict=True)],
        "arrayminus": [_gap(value, bottom) for bottom, value in zip(low, values, strict=True)],
        "color": SOFT,
        "thickness": 1.2,
        "width": 3,
    }


def _gap(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else max(float(f"{high - low:.{DIGITS}g}"), 0.0)


def _whole(values: Numbers) -> list[float]:
    """Steps: whole numbers without a decimal point."""
    return [int(value) if value == int(value) else value for value in values]


def short(values: Sequence[float | None] | np.ndarray) -> list[float | None]:
    """Rounded to `DIGITS`; null where there is no finite number, which JSON cannot hold."""
    return [
        float(f"{value:.{DIGITS}g}") if value is not None and math.isfinite(value) else None
        for value in (values.tolist() if isinstance(values, np.ndarray) else values)
    ]
