"""Draw every picture of the docs from the stored results, as SVG.

    python benchmarks/figure.py              # all of PICTURES, into docs/results
    python benchmarks/figure.py readme alarm

The figures are those of `moored report`: dicts for Plotly, which `svg` writes without a browser.
Bands are 95 % intervals over seeds; a curve with many points is averaged over stretches of steps.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from curves import up_to_shortest

from moored.analysis.compare import half_width
from moored.analysis.curves import Curve as StoredCurve
from moored.analysis.curves import read_curve_file
from moored.analysis.figures import PALETTE, SOFT, Chart, Curve, base_layout, line_chart
from moored.analysis.report_data import FIGURES

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
ARMS = {
    "none": ("without filter", 3),
    "top_p": ("with top-p filter", 0),
    "lowest_half": ("lowest half only", 1),
    "grpo/none": ("GRPO", 3),
    "grpo/top_p": ("with top-p filter", 0),
    "no_division/none": ("without division", 1),
}
"""Label of an arm, and the number of its colour."""
DIVISION = ("grpo/none", "grpo/top_p", "no_division/none")
PANELS = ("MI", "retrieval", "H(Z|X)", "success", "validity", "reply tokens")
NAMES = {"validity": "well-formed replies"}
"""Of curves that a report calls otherwise."""
NUM_POINTS = 20
"""Points per curve: one with a value for every step is averaged over this many stretches."""
PER_ROW, LETTER = 3, 6.3
"""Panels in a row; the width of a letter."""
STYLE = """
.page { fill: #ffffff } text { font: 12px system-ui, sans-serif; fill: #4a5361 }
.name { font-size: 13px; font-weight: 600 } .note { font-size: 11px }
path, polyline { fill: none } .grid { stroke: #8884 }
@media (prefers-color-scheme: dark) { .page { fill: #0d1117 } text { fill: #b8c1cc } }
"""
# The background comes with the picture, because a page may be light while the browser asks for
# dark, or the reverse.


def thin(curve: StoredCurve) -> dict[float, float]:
    """At most `NUM_POINTS` points, each the mean of a whole stretch."""
    size = math.ceil(len(curve) / NUM_POINTS)
    parts = [curve[end - size : end] for end in range(size, len(curve) + 1, size)]
    return {mean(step for step, _ in part): mean(value for _, value in part) for part in parts}


def over_seeds(curves: Sequence[StoredCurve], name: str, style: int) -> Curve:
    """Means and their intervals at the steps that all seeds have."""
    thinned = [thin(curve) for curve in curves]
    steps = sorted(set.intersection(*map(set, thinned)))
    values = [[curve[step] for curve in thinned] for step in steps]
    means, halves = list(map(mean, values)), [half_width(each) or 0.0 for each in values]
    low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
    return Curve(name=name, x=steps, y=means, low=low, high=high, style=style)


def curves(
    file: str, *, arms: Sequence[str] = (), panels: Sequence[str] = PANELS, each: bool = False
) -> str:
    """The curves of a curve file up to the shortest run; `each` draws a line for every seed."""
    stored = read_curve_file(RESULTS / f"{file}.json")
    runs = up_to_shortest({arm: stored[arm] for arm in arms or stored})
    charts = {}
    for panel in panels:
        lines: list[Curve] = []
        for arm, of_arm in runs.items():
            label, style = ARMS[arm]
            name, found = f"{label}, {len(of_arm)} seeds", [run.curves[panel] for run in of_arm]
            if each:
                thinned = map(thin, found)
                lines += [Curve(name=name, x=[*t], y=[*t.values()], style=style) for t in thinned]
            else:
                lines.append(over_seeds(found, name, style))
        title, y_title = FIGURES[NAMES.get(panel, panel)]
        charts[title] = line_chart(lines, y_title=y_title)
    about = "a line for each seed" if each else "bands: 95 % intervals"
    return svg(charts, width=300, height=246, about=about)


def alarm() -> str:
    """False alarms over the noise, and what moving the bar would change."""
    record = json.loads((RESULTS / "alarm.json").read_text())
    noise = []
    for style, phi in enumerate((0.0, 0.5, 0.8)):
        cells = [
            (cell["std"], cell["alarms"])
            for cell in record["cells"]
            if cell["kind"] == "still" and cell["knows_errors"] and cell["correlation"] == phi
        ]
        x, y = zip(*cells, strict=True)
        noise.append(Curve(name=f"AR(1) {phi:g}", x=x, y=y, style=style))
    bars = [each["bar"] for each in record["bars"]]
    shares = {"seen 4 looks after halving": "timely", "false alarms": "false"}
    moved = [
        Curve(name=name, x=bars, y=[each[key] for each in record["bars"]], style=style)
        for style, (name, key) in enumerate(shares.items(), start=3)
    ]
    first = line_chart(noise, y_title="share", x_title="noise / mean", level=("5 %", 0.05))
    second = line_chart(moved, y_title="share", x_title="bar, as a share of what was held")
    bar = record["rule"]["max_share"]
    line = {"type": "line", "x0": bar, "x1": bar, "yref": "paper", "y0": 0, "y1": 1}
    second["layout"]["shapes"] = [line | {"line": {"color": SOFT, "dash": "dash"}}]
    second["layout"]["xaxis"]["range"] = [bars[0], bars[-1]]
    charts = {"False alarms in 100 looks": first, "Where the bar stands": second}
    return svg(charts, width=400, height=260)


def correlation() -> str:
    """Spearman with final success: all runs, each task, and between seeds of one setting."""
    pool, *tasks = (
        {found["name"]: found for found in json.loads(file.read_text())["correlations"]}
        for file in (RESULTS / f"correlation{end}.json" for end in ("", "_sokoban", "_frozen_lake"))
    )
    groups = {
        "all runs": (PALETTE[4], {name: found["spearman"] for name, found in pool.items()}),
        "Sokoban": (PALETTE[0], {name: found["spearman"] for name, found in tasks[0].items()}),
        "FrozenLake": (PALETTE[1], {name: found["spearman"] for name, found in tasks[1].items()}),
        "between seeds": (SOFT, {name: found["between_seeds"] for name, found in pool.items()}),
    }
    data = []
    for place, (group, (color, estimates)) in enumerate(groups.items()):
        known = [(row, found) for row, name in enumerate(pool) if (found := estimates.get(name))]
        value = [found["value"] for _, found in known]
        error = {
            "array": [found["high"] - found["value"] for _, found in known],
            "arrayminus": [found["value"] - found["low"] for _, found in known],
        }
        y = [row + 0.2 * (place - 1.5) for row, _ in known]
        trace = {"name": group, "mode": "markers", "x": value, "y": y, "error_x": error}
        data.append(trace | {"marker": {"color": color, "size": 7}})
    layout = base_layout("rank correlation with success", "")
    layout["xaxis"]["range"] = [-1.02, 1.02]
    layout["yaxis"] |= {"range": [len(pool) - 0.5, -0.5]}
    layout["yaxis"] |= {"tickvals": [*range(len(pool))], "ticktext": [*pool]}
    return svg({"": {"data": data, "layout": layout}}, width=660, height=54 * len(pool) + 60)


PICTURES: Mapping[str, Callable[[], str]] = {
    "readme": partial(curves, "division_bottle", arms=DIVISION, panels=("MI", "H(Z|X)", "success")),
    "smollm2_division": partial(
        curves, "smollm2_division", arms=DIVISION, panels=("MI", "H(Z|X)", "success"), each=True
    ),
    **{
        name: partial(curves, name)
        for name in (
            *("bottle_cpu_task", "bottle_ppo_sokoban_task"),
            *("bottle_grpo_sokoban_task", "bottle_ppo_frozen_lake"),
        )
    },
    "alarm": alarm,
    "correlation": correlation,
}
"""Name of each picture in docs/results -> what draws it."""


def svg(charts: Mapping[str, Chart], *, width: int, height: int, about: str = "") -> str:
    """Charts by title in rows under one legend; what of Plotly the figures above use."""
    rows, columns = math.ceil(len(charts) / PER_ROW), min(PER_ROW, len(charts))
    size = width * columns, height * rows + 36
    drawn = [f'<rect class="page" width="{size[0]}" height="{size[1]}" rx="6"/>']
    drawn += _legend(list(charts.values()), about)
    for place, (title, chart) in enumerate(charts.items()):
        row, column = divmod(place, PER_ROW)
        drawn += _Panel.of(chart, title, width * column, 36 + height * row, width, height).draw()
    box = f'viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}"'
    inner = "".join([f"<style>{STYLE}</style>", *drawn])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{inner}</svg>\n'


def _legend(charts: Sequence[Chart], about: str) -> Iterator[str]:
    traces = [trace for chart in charts for trace in chart["data"] if trace.get("showlegend", True)]
    x = 16.0
    for name, color in {trace["name"]: _color(trace) for trace in traces}.items():
        yield f'<path stroke="{color}" stroke-width="3" d="M{x:.1f} 16h20"/>'
        yield _text(x + 26, 20, name, "start")
        x += 44 + LETTER * len(name)
    yield _text(x, 20, about, "start")


def _color(trace: Mapping[str, Any]) -> str:
    return trace.get("fillcolor") or trace.get("line", trace.get("marker"))["color"]


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers inside, `most` at most."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * size for f in (1, 2, 5, 10, 20) if (high - low) / (f * size) <= most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """A chart in its frame, from `left` to `right` and from `top` to `bottom`."""

    chart: Chart
    title: str
    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of(
        cls, chart: Chart, title: str, x: float, y: float, width: float, height: float
    ) -> _Panel:
        """Below `y` and right of `x`, with room for titles and labels."""
        names = chart["layout"]["yaxis"].get("ticktext", ["100"])
        left = x + 26 + LETTER * max(map(len, names))
        top = y + (48 if title else 4)
        return cls(
            chart=chart,
            title=title,
            left=left,
            right=x + width - 14,
            top=top,
            bottom=y + height - 46,
        )

    def x(self, value: float, ref: str = "x") -> float:
        low, high = (0.0, 1.0) if ref == "paper" else self.chart["layout"]["xaxis"]["range"]
        return round(self.left + (value - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float, ref: str = "y") -> float:
        low, high = (0.0, 1.0) if ref == "paper" else self.chart["layout"]["yaxis"]["range"]
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 1)

    def draw(self) -> Iterator[str]:
        layout, clip = self.chart["layout"], f"c{self.left:.0f}-{self.top:.0f}"
        yield _text(self.left, self.top - 34, self.title, "start", "name")
        yield _text(self.left, self.top - 18, layout["yaxis"]["title"]["text"], "start", "note")
        yield from self._axes()
        size = f'width="{self.right - self.left:.1f}" height="{self.bottom - self.top:.1f}"'
        yield f'<clipPath id="{clip}"><rect x="{self.left}" y="{self.top}" {size}/></clipPath>'
        yield f'<g clip-path="url(#{clip})">'
        for shape in layout.get("shapes", ()):
            (x0, x1), xref = (shape["x0"], shape["x1"]), shape.get("xref", "x")
            (y0, y1), yref = (shape["y0"], shape["y1"]), shape.get("yref", "y")
            d = f"M{self.x(x0, xref)} {self.y(y0, yref)}L{self.x(x1, xref)} {self.y(y1, yref)}"
            yield f'<path stroke="{shape["line"]["color"]}" stroke-dasharray="4 3" d="{d}"/>'
        for trace in self.chart["data"]:
            yield from self._trace(trace)
        yield "</g>"
        for note in layout.get("annotations", ()):
            x, y = self.x(note["x"], note["xref"]), self.y(note["y"], note.get("yref", "y"))
            anchor = {"left": "start", "right": "end"}[note["xanchor"]]
            yield _text(x, y - 4, note["text"], anchor, "note")

    def _axes(self) -> Iterator[str]:
        layout = self.chart["layout"]
        left, right = layout["xaxis"]["range"]
        for value in ticks(left, right, 5):
            yield f'<path class="grid" d="M{self.x(value)} {self.top}V{self.bottom}"/>'
            yield _text(self.x(value), self.bottom + 15, f"{value:.4g}")
        low, high = sorted(layout["yaxis"]["range"])
        values = layout["yaxis"].get("tickvals", ticks(low, high, 4))
        names = layout["yaxis"].get("ticktext", [f"{value:.4g}" for value in values])
        for value, name in zip(values, names, strict=True):
            yield f'<path class="grid" d="M{self.left} {self.y(value)}H{self.right}"/>'
            yield _text(self.left - 6, self.y(value) + 4, name, "end")
        middle = (self.left + self.right) / 2
        yield _text(middle, self.bottom + 31, layout["xaxis"]["title"]["text"])

    def _trace(self, trace: Mapping[str, Any]) -> Iterator[str]:
        places = [(self.x(x), self.y(y)) for x, y in zip(trace["x"], trace["y"], strict=True)]
        points, color = " ".join(f"{x},{y}" for x, y in places), _color(trace)
        if "fillcolor" in trace:
            yield f'<polygon fill="{color}" opacity="{trace["opacity"]}" points="{points}"/>'
        elif "error_x" in trace:
            error, paint = trace["error_x"], f'stroke="{color}" stroke-width="2"'
            ends = zip(trace["x"], error["arrayminus"], error["array"], places, strict=True)
            for value, low, high, (x, y) in ends:
                d = f"M{self.x(value - low)} {y}H{self.x(value + high)}"
                yield f'<path {paint} d="{d}"/><circle fill="{color}" cx="{x}" cy="{y}" r="3.5"/>'
        else:
            yield f'<polyline stroke="{color}" stroke-width="2" points="{points}"/>'


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the docs.")
    parser.add_argument("names", nargs="*", help="default: all")
    names = parser.parse_args(words).names or list(PICTURES)
    if unknown := sorted(set(names) - set(PICTURES)):
        parser.error(f"no picture {unknown[0]!r}; choose from {', '.join(PICTURES)}")
    for name in names:
        (DOCS / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main()
