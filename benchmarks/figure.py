"""Draw the curves of a curve file: means over seeds with their 95 % intervals.

    python benchmarks/figure.py benchmarks/results/bottle_cpu_task.json --out curves.svg

`--panels` and `--arms` choose what is drawn, `--each` draws a line for every seed, which tells more
where there are two. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean

from moored.analysis.axis import cut_axis
from moored.analysis.compare import half_width
from moored.analysis.curve_files import (
    Curve,
    StoredRun,
    read_curve_file,
    up_to_shortest,
)
from moored.analysis.svg import Axis
from moored.errors import ConfigError

ARMS = {
    "none": ("without filter", "red"),
    "top_p": ("with top-p filter", "blue"),
    "lowest_half": ("lowest half only", "orange"),
    "grpo/none": ("GRPO", "red"),
    "grpo/top_p": ("with top-p filter", "blue"),
    "no_division/none": ("without division", "orange"),
}
"""The label of an arm, and its colour; others keep their name and are grey."""
PANELS = {
    "MI": "input dependence (MI, nats/token)",
    "retrieval": "retrieval accuracy",
    "H(Z|X)": "entropy H(Z|X), nats/token",
    "success": "success rate",
    "validity": "well-formed replies",
    "reply tokens": "reply length, tokens",
}
LIMITS = {
    **dict.fromkeys(("retrieval", "success", "validity"), (0.0, 1.0)),
    **dict.fromkeys(("H(Z|X)", "reply tokens"), (0.0, math.inf)),
}
"""What a figure can be; others, as MI, have no limits."""
MARGIN = 0.03
"""Free space above and below bands that are not cut, in heights of the axis."""
NUM_POINTS = 20
"""Points per curve: one with a value for every step is averaged over this many stretches."""
PANEL_WIDTH, PANEL_HEIGHT, PER_ROW = 300, 210, 3
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 24, 42
"""Room for labels on each side of a panel's frame."""
LEGEND_HEIGHT = 36
# The background comes with the picture, because a page may be light while the browser asks for
# dark, or the reverse.
STYLE = """
.page { fill: #ffffff } text { font: 12px system-ui, sans-serif; fill: #4a5361 }
.name { font-size: 13px; font-weight: 600 } .legend { font-size: 13px }
.grid { stroke: #8884; fill: none } .band { opacity: .16; stroke: none }
.line { fill: none; stroke-width: 2 }
.red { fill: #c62f3b; stroke: #c62f3b } .blue { fill: #1f6feb; stroke: #1f6feb }
.orange { fill: #d9822b; stroke: #d9822b } .grey { fill: #6b7686; stroke: #6b7686 }
.line, .key { fill: none }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #b8c1cc } .band { opacity: .22 }
.red { fill: #ff6b70; stroke: #ff6b70 } .blue { fill: #58a6ff; stroke: #58a6ff }
.orange { fill: #f0a050; stroke: #f0a050 } .grey { fill: #95a1b0; stroke: #95a1b0 }
.line, .key { fill: none }
}
"""
NOTE = ".note { font-size: 10px }\n"
"""Beyond the style that other figures share."""

Points = list[tuple[float, float, float]]
"""Step, mean over seeds, half the width of its interval."""
Limits = tuple[float, float]


def thin(curve: Curve) -> list[tuple[float, float]]:
    """At most `NUM_POINTS` points, each the mean of a whole stretch."""
    size = math.ceil(len(curve) / NUM_POINTS)
    parts = [curve[end - size : end] for end in range(size, len(curve) + 1, size)]
    return [(mean(s for s, _ in part), mean(v for _, v in part)) for part in parts]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval; nan with one seed."""
    half = half_width(values)
    return mean(values), math.nan if half is None else half


def over_seeds(curves: Sequence[Curve]) -> Points:
    """Means and intervals at the steps that all seeds have."""
    thinned = [dict(thin(curve)) for curve in curves]
    steps = sorted(set.intersection(*(set(curve) for curve in thinned)))
    if not steps:
        raise ConfigError("seeds have no step in common; draw a line for every seed: --each")
    return [(step, *interval([curve[step] for curve in thinned])) for step in steps]


def each_seed(curves: Sequence[Curve]) -> list[Points]:
    """Every curve as it is, without an interval."""
    return [[(step, value, 0.0) for step, value in thin(curve)] for curve in curves]


def panel(name: str, arms: dict[str, list[Points]], left: float, top: float) -> str:
    """One figure over the steps, with the lines of every arm."""
    points = [point for lines in arms.values() for found in lines for point in found]
    x_low, x_high = left + LEFT, left + PANEL_WIDTH - RIGHT
    y_low, y_high = top + PANEL_HEIGHT - BOTTOM, top + TOP
    x_axis = Axis(0.0, max(step for step, *_ in points), x_low, x_high)
    limits = LIMITS.get(name, (-math.inf, math.inf))
    low, high, note = _range(points, limits)
    y_axis = Axis(low, high, y_low, y_high)
    drawn = [_text(x_low, top + 12, PANELS.get(name, name), "start", "name")]
    for value in y_axis.ticks(4):
        y = y_axis(value)
        drawn.append(f'<path class="grid" d="M{x_low} {y}H{x_high}"/>')
        drawn.append(_text(x_low - 5, y + 4, f"{value:.4g}", "end"))
    drawn += [_text(x_axis(s), y_low + 15, f"{s:.4g}", "middle") for s in x_axis.ticks(4)]
    drawn.append(_text((x_low + x_high) / 2, y_low + 31, "training step", "middle"))
    clip = f"clip{left:.0f}-{top:.0f}"
    box = f'x="{x_low}" y="{y_high}" width="{x_high - x_low}" height="{y_low - y_high}"'
    drawn.append(f'<clipPath id="{clip}"><rect {box}/></clipPath><g clip-path="url(#{clip})">')
    drawn += [
        _curve(arm, found, limits, x_axis, y_axis) for arm, lines in arms.items() for found in lines
    ]
    drawn += ["</g>", *([_text(x_high - 4, y_high + 11, note, "end", "note")] if note else [])]
    return "".join(drawn)


def figure(
    runs: Mapping[str, Sequence[StoredRun]], panels: Sequence[str], *, each: bool = False
) -> str:
    """The panels in rows under a legend."""
    width = min(PER_ROW, len(panels)) * PANEL_WIDTH
    height = math.ceil(len(panels) / PER_ROW) * PANEL_HEIGHT + LEGEND_HEIGHT
    drawn = [f'<rect class="page" width="{width}" height="{height}" rx="6"/>', _legend(runs, each)]
    for place, name in enumerate(panels):
        curves = {arm: [run.curves[name] for run in of_arm] for arm, of_arm in runs.items()}
        found = {
            arm: each_seed(of_arm) if each else [over_seeds(of_arm)]
            for arm, of_arm in curves.items()
        }
        row, column = divmod(place, PER_ROW)
        drawn.append(panel(name, found, column * PANEL_WIDTH, LEGEND_HEIGHT + row * PANEL_HEIGHT))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    inner = "".join([f"<style>{STYLE}{NOTE}</style>", *drawn])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inner}</svg>\n'


def _edges(point: tuple[float, float, float], limits: Limits) -> tuple[float, float]:
    """Where the interval of a point ends: within what the figure can be."""
    _, value, half = point
    return max(value - half, limits[0]), min(value + half, limits[1])


def _range(points: Points, limits: Limits) -> tuple[float, float, str]:
    """Both ends of the axis, and how far bands reach that it cuts, as in reports; else no text."""
    means = [value for _, value, _ in points]
    edges = [edge for point in points for edge in _edges(point, limits)]
    if cut := cut_axis(means, edges):
        return cut.low, cut.high, cut.note
    whole = [value for value in (*means, *edges) if math.isfinite(value)]
    margin = MARGIN * (max(whole) - min(whole) or 1.0)
    return min(whole) - margin, max(whole) + margin, ""


def _curve(arm: str, found: Points, limits: Limits, x_axis: Axis, y_axis: Axis) -> str:
    """The band of intervals, and the means over it."""
    _, color = ARMS.get(arm, (arm, "grey"))
    ends = [(x_axis(point[0]), *map(y_axis, _edges(point, limits))) for point in found]
    upper = [f"{x},{high}" for x, _, high in ends]
    lower = [f"{x},{low}" for x, low, _ in reversed(ends)]
    line = " ".join(f"{x_axis(s)},{y_axis(v)}" for s, v, _ in found)
    edge = " ".join([*upper, *lower])
    band = (
        f'<polygon class="{color} band" points="{edge}"/>'
        if any(h > 0.0 for *_, h in found)
        else ""
    )
    return f'{band}<polyline class="{color} line" points="{line}"/>'


def _legend(runs: Mapping[str, Sequence[StoredRun]], each: bool) -> str:
    """The arms by colour, and how many seeds each has."""
    drawn, x = [], LEFT
    for arm, found in runs.items():
        label, color = ARMS.get(arm, (arm, "grey"))
        drawn.append(f'<path class="{color} key" d="M{x} 16h24" stroke-width="3"/>')
        drawn.append(_text(x + 30, 20, f"{label}, {len(found)} seeds", "start", "legend"))
        x += 215
    about = "a line for each seed" if each else "bands: 95 % intervals"
    drawn.append(_text(x, 20, about, "start", "legend"))
    return "".join(drawn)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def choose(
    file: Path, arms: Sequence[str] | None, panels: Sequence[str]
) -> dict[str, list[StoredRun]]:
    """The runs of the given arms (None: of all), up to the step that every one has reached."""
    runs = read_curve_file(file)
    if unknown := sorted(set(arms or ()) - set(runs)):
        raise ConfigError(f"no arm {unknown} in {file}; it has {list(runs)}")
    chosen = up_to_shortest({arm: runs[arm] for arm in arms or runs})
    everything = [run for of_arm in chosen.values() for run in of_arm]
    measured = {
        name for name in everything[0].curves if all(run.curves.get(name) for run in everything)
    }
    if unknown := sorted(set(panels) - measured):
        raise ConfigError(f"no curve {unknown} in {file}; it has {sorted(measured)}")
    return chosen


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the curves of a curve file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--panels", nargs="+", default=list(PANELS))
    parser.add_argument("--arms", nargs="+", help="default: all that the file has")
    parser.add_argument("--each", action="store_true", help="a line for every seed, no intervals")
    given = parser.parse_args(words)
    try:
        runs = choose(given.file, given.arms, given.panels)
        given.out.write_text(figure(runs, given.panels, each=given.each))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
