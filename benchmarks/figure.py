"""Draw the curves of `benchmarks/bottle.py`: means over seeds with their 95 % intervals.

python benchmarks/figure.py benchmarks/results/bottle_cpu.json --out docs/results/bottle_cpu.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean

from bottle import FIGURES, interval, up_to_shortest

from moored.analysis.svg import Axis

COLORS = {"no filter": "#c62f3b", "top-p 0.9": "#1f6feb", "lowest half": "#d9822b"}
OTHER = "#5b6676"
SHOWN = ("MI", "retrieval", "H(Z|X)", "success", "validity", "reply tokens")
NUM_POINTS = 20
"""Curves with a value for every step are averaged over stretches, so many a run."""
PANEL_WIDTH, PANEL_HEIGHT, PER_ROW = 300, 190, 3
STYLE = """text { font: 11px system-ui, sans-serif; fill: #5b6676 } .name { font-size: 13px }
.grid { stroke: #8884; fill: none } .band { opacity: .15 } .line { fill: none; stroke-width: 2 }"""

Curve = Sequence[Sequence[float]]
Points = list[tuple[float, float, float]]
"""Step, mean over seeds, half the width of its interval."""


def thin(curve: Curve) -> list[tuple[float, float]]:
    """At most `NUM_POINTS` points, each the mean of a whole stretch."""
    size = math.ceil(len(curve) / NUM_POINTS)
    parts = [curve[end - size : end] for end in range(size, len(curve) + 1, size)]
    return [(mean(s for s, _ in part), mean(v for _, v in part)) for part in parts]


def over_seeds(curves: Sequence[Curve]) -> Points:
    """Means and intervals at the steps that all seeds have."""
    thinned = [dict(thin(curve)) for curve in curves]
    steps = sorted(set.intersection(*(set(curve) for curve in thinned)))
    return [(step, *interval([curve[step] for curve in thinned])) for step in steps]


def panel(name: str, arms: dict[str, Points], left: float, top: float) -> str:
    """One figure over the steps, a line an arm."""
    points = [point for found in arms.values() for point in found]
    right, bottom = left + PANEL_WIDTH - 14, top + PANEL_HEIGHT - 30
    x_axis = Axis.over([0.0, *(step for step, *_ in points)], left + 36, right)
    # Intervals of few seeds are wide: they may be cut off, means not.
    middle = [value for _, value, _ in points]
    room = 0.25 * (max(middle) - min(middle) or 1.0)
    y_axis = Axis(min(middle) - room, max(middle) + room, bottom, top + 18)
    drawn = [f'<text class="name" x="{left + 36}" y="{top + 10}">{escape(name)}</text>']
    for value in y_axis.ticks(4):
        y = y_axis(value)
        drawn.append(f'<path class="grid" d="M{left + 36} {y}H{right}"/>')
        drawn.append(f'<text x="{left + 32}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    for step in x_axis.ticks():
        place = f'x="{x_axis(step)}" y="{bottom + 14}"'
        drawn.append(f'<text {place} text-anchor="middle">{step:.4g}</text>')
    clip = f"clip{left:.0f}-{top:.0f}"
    box = f'x="{left + 36}" y="{top + 14}" width="{right - left - 36}" height="{bottom - top - 14}"'
    drawn.append(f'<clipPath id="{clip}"><rect {box}/></clipPath><g clip-path="url(#{clip})">')
    for arm, found in arms.items():
        color = COLORS.get(arm, OTHER)
        upper = [f"{x_axis(s)},{y_axis(v + h)}" for s, v, h in found]
        lower = [f"{x_axis(s)},{y_axis(v - h)}" for s, v, h in reversed(found)]
        line = " ".join(f"{x_axis(s)},{y_axis(v)}" for s, v, _ in found)
        edge = " ".join([*upper, *lower])
        drawn.append(f'<polygon class="band" fill="{color}" points="{edge}"/>')
        drawn.append(f'<polyline class="line" stroke="{color}" points="{line}"/>')
    return "".join([*drawn, "</g>"])


def figure(record: dict) -> str:
    """All panels and a legend."""
    runs = up_to_shortest(record["runs"])
    width, rows = PER_ROW * PANEL_WIDTH, math.ceil(len(SHOWN) / PER_ROW)
    height = rows * PANEL_HEIGHT + 30
    drawn = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for place, arm in enumerate(runs):
        x = 40 + 170 * place
        color, seeds = COLORS.get(arm, OTHER), len(runs[arm])
        drawn.append(f'<path d="M{x} 14h24" stroke="{color}" stroke-width="3"/>')
        drawn.append(f'<text x="{x + 30}" y="18">{escape(arm)}, {seeds} seeds</text>')
    for place, name in enumerate(SHOWN):
        assert name in FIGURES
        arms = {arm: over_seeds([run["curves"][name] for run in runs[arm]]) for arm in runs}
        row, column = divmod(place, PER_ROW)
        drawn.append(panel(name, arms, column * PANEL_WIDTH, 30 + row * PANEL_HEIGHT))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    inner = "".join(drawn)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{inner}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the bottle's curves.")
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.write_text(figure(json.loads(given.record.read_text())))


if __name__ == "__main__":
    main()
