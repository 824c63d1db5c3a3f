"""The two panels of the alarm's operating curve, as an SVG; `benchmarks/alarm.py` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from figure import STYLE

from moored.analysis.svg import Axis

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 270, 48, 16, 52, 46
COLORS = ("blue", "orange", "red")

Line = Sequence[tuple[float, float]]


def draw(noise_lines: Mapping[str, Line], bar_lines: Mapping[str, Line], bar: float) -> str:
    """False alarms over the noise, and what moving the bar would change."""
    page = f'<rect class="page" width="{2 * WIDTH}" height="{HEIGHT}" rx="6"/>'
    first = _panel("False alarms in 100 looks", "noise / mean", noise_lines, 0, limit=0.05)
    second = _panel("Where the bar stands", "bar, as a share of what was held", bar_lines, WIDTH)
    x = _x_axis(bar_lines, WIDTH)(bar)
    mark = f'<path class="grey line" stroke-dasharray="4 3" d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>'
    size = f'viewBox="0 0 {2 * WIDTH} {HEIGHT}" width="{2 * WIDTH}" height="{HEIGHT}"'
    inner = page + first + second + mark
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{inner}</svg>\n'


def _x_axis(lines: Mapping[str, Line], left: float) -> Axis:
    values = [x for line in lines.values() for x, _ in line]
    return Axis(min(values), max(values), left + LEFT, left + WIDTH - RIGHT)


def _panel(
    title: str, label: str, lines: Mapping[str, Line], left: float, limit: float | None = None
) -> str:
    x_axis, y_axis = _x_axis(lines, left), Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    x_low, x_high = left + LEFT, left + WIDTH - RIGHT
    drawn = [_text(x_low, 18, title, "start", "name")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(f'<path class="grid" d="M{x_low} {y_axis(share)}H{x_high}"/>')
        drawn.append(_text(x_low - 6, y_axis(share) + 4, f"{share:.0%}", "end"))
    for value in x_axis.ticks(6):
        drawn.append(_text(x_axis(value), HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
    drawn.append(_text((x_low + x_high) / 2, HEIGHT - 10, label, "middle"))
    if limit is not None:
        y = y_axis(limit)
        drawn.append(f'<path class="grey line" stroke-dasharray="4 3" d="M{x_low} {y}H{x_high}"/>')
        drawn.append(_text(x_high, y - 5, f"{limit:.0%}", "end"))
    place = x_low
    for (name, line), color in zip(lines.items(), COLORS, strict=False):
        points = " ".join(f"{x_axis(x)},{y_axis(y)}" for x, y in line)
        drawn.append(f'<polyline class="{color} line" points="{points}"/>')
        drawn.append(f'<path class="{color} line key" d="M{place} 36h16"/>')
        drawn.append(_text(place + 20, 40, name, "start"))
        place += 34 + 6.1 * len(name)
    return "".join(drawn)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
