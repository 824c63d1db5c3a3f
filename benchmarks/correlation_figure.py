"""Draw the result of `moored study correlation`: Spearman with final success, with its intervals.

    python benchmarks/correlation_figure.py benchmarks/results/correlation.json --part
        Sokoban=benchmarks/results/correlation_sokoban.json --out figure.svg

One line for each diagnostic and each way to look at the runs: all of them, each part of them that
has a file of its own, and between seeds of one setting.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from figure import STYLE

from moored.analysis.svg import Axis

WIDTH, LEFT, RIGHT, TOP = 660, 205, 16, 44
ROW, GAP, BOTTOM = 11, 9, 34
"""Heights: of a line, between diagnostics, and of the axis."""
TICKS = (-1.0, -0.5, 0.0, 0.5, 1.0)


PART_COLORS = ("blue", "orange", "red")
"""Colours of the parts, in the order in which they are given."""

Correlations = Mapping[str, Mapping[str, Any]]
"""By the name of the diagnostic."""


def lines_of(name: str, runs: Correlations, parts: Sequence[Correlations]) -> dict[str, Any]:
    """Colour -> estimate of a diagnostic, from the pool to the seeds of one setting."""
    lines = {"page-ink": runs[name]["spearman"]}
    for color, part in zip(PART_COLORS, parts, strict=False):
        if name in part:
            lines[color] = part[name]["spearman"]
    if runs[name]["between_seeds"]:
        lines["grey"] = runs[name]["between_seeds"]
    return lines


def draw(runs: Correlations, parts: Mapping[str, Correlations]) -> str:
    """All diagnostics below each other, under a legend."""
    x_axis = Axis(-1.0, 1.0, LEFT, WIDTH - RIGHT)
    drawn, y = [_legend(list(parts))], TOP
    for name in runs:
        lines = lines_of(name, runs, list(parts.values()))
        middle = y + len(lines) * ROW / 2
        drawn.append(_text(LEFT - 10, middle + 4, name, "end", "name"))
        for color, each in lines.items():
            drawn.append(_interval(x_axis, y + ROW / 2, color, each))
            y += ROW
        y += GAP
    for value in TICKS:
        x = x_axis(value)
        drawn.insert(0, f'<path class="grid" d="M{x} {TOP - 6}V{y}"/>')
        drawn.append(_text(x, y + 15, f"{value:+g}" if value else "0", "middle"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, y + 30, "rank correlation with success"))
    height = y + BOTTOM
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    ink = ".page-ink { fill: #4a5361; stroke: #4a5361 } @media (prefers-color-scheme: dark) "
    ink += "{ .page-ink { fill: #e6edf3; stroke: #e6edf3 } }"
    style = f"<style>{STYLE}{ink}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{page}{"".join(drawn)}</svg>\n'


def _interval(x_axis: Axis, y: float, color: str, each: Mapping[str, float]) -> str:
    low, high, value = (x_axis(each[key]) for key in ("low", "high", "value"))
    return (
        f'<path class="{color}" stroke-width="2" d="M{low} {y}H{high}"/>'
        f'<circle class="{color}" cx="{value}" cy="{y}" r="3.5"/>'
    )


def _legend(parts: Sequence[str]) -> str:
    names = {"page-ink": "all runs"} | dict(zip(PART_COLORS, parts, strict=False))
    drawn, x = [], 12
    for color, label in (names | {"grey": "between seeds"}).items():
        drawn.append(f'<circle class="{color}" cx="{x}" cy="17" r="4"/>')
        drawn.append(_text(x + 9, 21, label, "start"))
        x += 32 + 6.4 * len(label)
    return "".join(drawn)


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw correlations with their intervals.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    if len(given.part) > len(PART_COLORS):
        parser.error(f"at most {len(PART_COLORS)} parts, got {len(given.part)}")
    named = (part.partition("=") for part in given.part)
    parts = {name: _read(Path(file)) for name, _, file in named}
    given.out.write_text(draw(_read(given.file), parts))


def _read(file: Path) -> Correlations:
    return {found["name"]: found for found in json.loads(file.read_text())["correlations"]}


if __name__ == "__main__":
    main()
