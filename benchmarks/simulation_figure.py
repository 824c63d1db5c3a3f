"""Turns a second of each rollout worker, as an SVG; `benchmarks/simulation.py` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from figure import STYLE

from moored.analysis.svg import Axis

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 430, 340, 46, 20, 112, 44
UNIT = "turns a second of each worker (dot: the driver bounds)"
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Environments that answer at once": {
        "lockstep": ("lockstep", "red"),
        "streams": ("streams, samplers in the driver's process", "blue"),
        "streams, Ray calls": ("streams, samplers behind Ray calls", "orange"),
        "streams, Ray, 4 drivers": ("the same with 4 drivers", "grey"),
    },
    "Slow remote environments, heavy tail": {
        "remote, lockstep": ("lockstep", "red"),
        "remote, streams": ("streams, samplers in the driver's process", "blue"),
        "remote, streams, Ray calls": ("streams, samplers behind Ray calls", "orange"),
    },
}
"""Lines of each panel: their name in the result, what the legend says, and the colour."""


def draw(found: Mapping[str, Any]) -> str:
    """Two panels; were nothing a bound, lines would be flat."""
    growth = found["growth"]
    inner = f'<rect class="page" width="{2 * WIDTH}" height="{HEIGHT}" rx="6"/>'
    for number, (title, lines) in enumerate(PANELS.items()):
        inner += _panel(title, lines, growth, number * WIDTH)
    size = f'viewBox="0 0 {2 * WIDTH} {HEIGHT}" width="{2 * WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{inner}</svg>\n'


def _panel(
    title: str, lines: Mapping[str, tuple[str, str]], growth: Mapping[str, Any], left: float
) -> str:
    start, stop = left + LEFT, left + WIDTH - RIGHT
    rates = [rate for name in lines for _, rate, _ in _points(growth[name])]
    x_axis = Axis(1.0, 4.0, start, stop)
    y_axis = Axis(0.0, 1.08 * max(rates), HEIGHT - BOTTOM, TOP)
    drawn = [_text(start, 18, title, "start", "name"), _text(start, 35, UNIT, "start")]
    for value in y_axis.ticks():
        y = y_axis(value)
        drawn.append(f'<path class="grid" d="M{start} {y}H{stop}"/>')
        drawn.append(_text(start - 6, y + 4, f"{value:g}", "end"))
    for power in range(1, 5):
        label = _text(x_axis(power), HEIGHT - BOTTOM + 16, f"{10**power:,}", "middle")
        drawn.append(label)
    drawn.append(_text((start + stop) / 2, HEIGHT - 8, "rollout workers", "middle"))
    for number, (name, (label, color)) in enumerate(lines.items()):
        drawn.append(_line(growth[name], color, x_axis, y_axis))
        y = 52 + 15 * number
        drawn.append(f'<path class="{color} line key" d="M{start} {y}h16"/>')
        drawn.append(_text(start + 22, y + 4, label, "start"))
    return "".join(drawn)


def _points(own: Mapping[str, Any]) -> list[tuple[int, float, str]]:
    """Workers, turns a second of each, and the bound."""
    return [(int(num), one["turns_per_s"] / int(num), one["bound"]) for num, one in own.items()]


def _line(own: Mapping[str, Any], color: str, x_axis: Axis, y_axis: Axis) -> str:
    """With a dot where the driver bounds."""
    places = [(x_axis(math.log10(num)), y_axis(rate), bound) for num, rate, bound in _points(own)]
    points = " ".join(f"{x},{y}" for x, y, _ in places)
    dots = "".join(
        f'<circle class="{color}" cx="{x}" cy="{y}" r="4"/>'
        for x, y, bound in places
        if bound == "driver"
    )
    return f'<polyline class="{color} line" points="{points}"/>{dots}'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
