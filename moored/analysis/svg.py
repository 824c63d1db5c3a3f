"""The figures of a page as inline SVG; colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape

from moored.analysis.axis import cut_axis
from moored.analysis.figures import Cuts
from moored.diagnostics.report import Regime

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 14, 186
"""Where the frame of a chart lies."""
SHADES = 9
"""Colours of a heat map, classes h0 to h8; h4 is zero."""
LETTER = 5.6
"""Width of a small letter."""
NAME_ROOM = 32
"""Of a plane, above the highest look and below the lowest: names of regimes and of looks."""


@dataclass(frozen=True, slots=True)
class Point:
    """One figure over x, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A look on the plane of diversity and input dependence."""

    entropy: float
    mi: float
    kind: str
    """Its class: good, bad or warning."""
    title: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Values `low` to `high`, drawn from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def over(cls, values: Iterable[float], start: float, stop: float) -> Axis:
        """All the values, and a little room."""
        found = list(values)
        low, high = min(found), max(found)
        room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
        return cls(low - room, high + room, start, stop)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers inside, `most` at most."""
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        steps = [factor * size for factor in (1, 2, 5, 10, 20)]
        step = next(s for s in steps if (self.high - self.low) / s <= most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [k * step for k in range(first, last + 1)]


def line_chart(
    points: Sequence[Point],
    *,
    label: str,
    x_label: str,
    level: tuple[str, float] | None = None,
    mark: tuple[str, float] | None = None,
    joined: bool = True,
) -> Markup:
    """A curve with its intervals: a band where points are joined, else whiskers.

    Intervals much wider than the curve are cut where they leave the axis, with a note. `level` is
    a horizontal line and its name, `mark` a vertical one.
    """
    heights = [*(p.y for p in points), *([level[1]] if level else [])]
    edges = [y for p in points for y in (p.low, p.high) if y is not None]
    cut = cut_axis(heights, edges)
    if cut is None:
        y_axis = Axis.over([*heights, *edges], BOTTOM, TOP)
    else:
        y_axis = Axis(cut.low, cut.high, BOTTOM, TOP)
    x_axis = Axis.over([p.x for p in points], LEFT, RIGHT)
    drawn = [_frame(x_axis, y_axis, x_label, whole=True)]
    if level is not None:
        y = y_axis(level[1])
        drawn.append(f'<path class="level" d="M{LEFT} {y}H{RIGHT}"/>')
        drawn.append(_text(RIGHT - 2, y - 4, level[0], "end"))
    drawn.append(_band(points, x_axis, y_axis) if joined else _whiskers(points, x_axis, y_axis))
    if joined:
        places = " ".join(f"{x_axis(p.x)},{y_axis(p.y)}" for p in points)
        drawn.append(f'<polyline class="line" points="{places}"/>')
    if mark is not None:
        x = x_axis(mark[1])
        drawn.append(f'<path class="mark" d="M{x} {TOP}V{BOTTOM}"/>')
        drawn.append(_text(x, TOP - 4, mark[0], "middle", "alarm"))
    if cut is not None:
        drawn.append(_text(LEFT + 4, TOP + 9, cut.note, "start"))
    drawn += [
        f'<circle class="dot" cx="{x_axis(p.x)}" cy="{y_axis(p.y)}" r="2.5">'
        f"<title>{escape(x_label)} {p.x:g}: {p.y:.3f}</title></circle>"
        for p in points
    ]
    return _svg(label, drawn)


def plane(looks: Sequence[Placed], cuts: Cuts | None) -> Markup:
    """Looks in their order over H(Z|X) and MI, on the four regimes if the cuts are known."""
    entropies, mis = [look.entropy for look in looks], [look.mi for look in looks]
    x_axis = Axis(0.0, 1.1 * max(*entropies, 1.5 * cuts.entropy if cuts else 0.1), LEFT, RIGHT)
    top = max(*mis, 2 * cuts.mi if cuts else 0.05, 0.01)
    low = min(*mis, cuts.mi if cuts else 0.0, 0.0)
    # So that neither looks nor their names stand on the names of the regimes.
    room = NAME_ROOM / (BOTTOM - TOP - 2 * NAME_ROOM) * (top - low)
    y_axis = Axis(low - room, top + room, BOTTOM, TOP)
    drawn = [_frame(x_axis, y_axis, "H(Z|X), nats per token", whole=False)]
    if cuts is not None:
        drawn.append(_regimes(x_axis(cuts.entropy), y_axis(cuts.mi)))
    places = [(x_axis(look.entropy), y_axis(look.mi)) for look in looks]
    drawn.append(f'<polyline class="path" points="{" ".join(f"{x},{y}" for x, y in places)}"/>')
    for k, (look, (x, y)) in enumerate(zip(looks, places, strict=True)):
        kind = look.kind
        kind += " start" if k == 0 < len(looks) - 1 else ""
        drawn.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="{5 if k in (0, len(looks) - 1) else 3}">'
            f"<title>{escape(look.title)}</title></circle>"
        )
    if len(looks) > 1:
        (x, y), (end_x, end_y) = places[0], places[-1]
        drawn += [_text(x, y - 9, "start", "middle"), _text(end_x, end_y + 17, "end", "middle")]
    return _svg("MI over H(Z|X), one point for each look", drawn)


def heat_map(gain_MN: np.ndarray, columns_M: np.ndarray, limit: float, label: str) -> Markup:
    """Rows by the prompt that wrote them, prompts as columns; own cells have a frame."""
    order_M = np.argsort(columns_M, kind="stable")
    shown_MN, own_M = gain_MN[order_M], columns_M[order_M]
    num_rows, num_columns = shown_MN.shape
    wide = (RIGHT - LEFT) / num_columns
    high = min(14.0, max(2.0, 400 / num_rows))
    shades_MN = np.rint((np.clip(shown_MN / limit, -1, 1) + 1) / 2 * (SHADES - 1)).astype(int)
    cells: list[list[str]] = [[] for _ in range(SHADES)]
    for (m, j), shade in np.ndenumerate(shades_MN):
        x, y = LEFT + j * wide, TOP + 14 + m * high
        cells[shade].append(f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z")
    drawn = [f'<path class="h{k}" d="{"".join(d)}"/>' for k, d in enumerate(cells) if d]
    every = max(1, math.ceil(num_columns / 20))
    for j in range(num_columns):
        rows = np.flatnonzero(own_M == j)
        y, x = TOP + 14 + rows[0] * high, LEFT + j * wide
        tall = len(rows) * high
        drawn.append(
            f'<rect class="own" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
        )
        if j % every == 0:
            drawn.append(_text(x + wide / 2, TOP + 9, str(j + 1), "middle"))
            drawn.append(_text(LEFT - 4, y + tall / 2 + 4, str(j + 1), "end"))
    bottom = TOP + 14 + num_rows * high
    middle = (TOP + 14 + bottom) / 2
    drawn.append(_text(LEFT, TOP - 3, "scored under prompt", "start"))
    drawn.append(_text(14, middle, "written for prompt", "middle", turned=True))
    return _svg(label, drawn, height=bottom + 6)


def _svg(label: str, drawn: Iterable[str], height: float = HEIGHT) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(drawn)}</svg>"
    )


def _frame(x_axis: Axis, y_axis: Axis, x_label: str, *, whole: bool) -> str:
    """Axes with ticks; `whole`: x counts in whole numbers."""
    drawn = [f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    for value in y_axis.ticks():
        y = y_axis(value)
        drawn.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        drawn.append(_text(LEFT - 5, y + 4, f"{value:.6g}", "end"))
    for value in x_axis.ticks():
        if not whole or value == round(value):
            drawn.append(_text(x_axis(value), BOTTOM + 14, f"{value:.6g}", "middle"))
    drawn.append(_text((LEFT + RIGHT) / 2, BOTTOM + 29, x_label, "middle"))
    return "".join(drawn)


def _band(points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    known = [(p.x, p.low, p.high) for p in points if p.low is not None and p.high is not None]
    upper = _cut([(x, high) for x, _, high in known], y_axis)
    lower = _cut([(x, low) for x, low, _ in known], y_axis)
    edge = [(x_axis(x), y_axis(y)) for x, y in [*upper, *reversed(lower)]]
    return f'<polygon class="band" points="{" ".join(f"{x},{y}" for x, y in edge)}"/>'


def _cut(edge: Sequence[tuple[float, float]], axis: Axis) -> list[tuple[float, float]]:
    """The line with points where it leaves the axis, and what lies beyond moved to its end."""
    found = list(edge[:1])
    for (x0, y0), (x1, y1) in pairwise(edge):
        ends = [end for end in (axis.low, axis.high) if (y0 - end) * (y1 - end) < 0]
        shares = sorted((end - y0) / (y1 - y0) for end in ends)
        found += [(x0 + share * (x1 - x0), y0 + share * (y1 - y0)) for share in shares]
        found.append((x1, y1))
    return [(x, _inside(y, axis)) for x, y in found]


def _inside(value: float, axis: Axis) -> float:
    return min(max(value, axis.low), axis.high)


def _whiskers(points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    d = "".join(
        f"M{x_axis(p.x)} {y_axis(_inside(p.low, y_axis))}V{y_axis(_inside(p.high, y_axis))}"
        for p in points
        if p.low is not None and p.high is not None
    )
    return f'<path class="whisker" d="{d}"/>'


def _regimes(x: float, y: float) -> str:
    """The cuts at x and y, and what lies between them."""
    return (
        f'<rect class="lost" x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{BOTTOM - y:.1f}"/>'
        f'<path class="level" d="M{LEFT} {y}H{RIGHT}M{x} {TOP}V{BOTTOM}"/>'
        + _corner(Regime.COMPRESSED, LEFT, x, TOP, y)
        + _corner(Regime.DIVERSE, x, RIGHT, TOP, y)
        + _corner(Regime.LOW_ENTROPY_COLLAPSE, LEFT, x, y, BOTTOM)
        + _corner(Regime.TEMPLATE_COLLAPSE, x, RIGHT, y, BOTTOM)
    )


def _corner(regime: Regime, left: float, right: float, top: float, bottom: float) -> str:
    """The name of a regime in its corner: along, else upright, else not at all."""
    name = regime.replace("_", " ")
    long = LETTER * len(name) + 8
    if right - left >= long and bottom - top >= 14:
        if bottom == BOTTOM:
            return _text(left + 4, bottom - 5, name, "start", "name")
        return _text(right - 4, top + 11, name, "end", "name")
    if right - left >= 12 and bottom - top >= long:
        return _text(left + 10, (top + bottom) / 2, name, "middle", "name", turned=True)
    return ""


def _text(
    x: float, y: float, text: str, anchor: str, name: str = "", *, turned: bool = False
) -> str:
    kind = f' class="{name}"' if name else ""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}{turn}>{escape(text)}</text>'
