"""How far the axis of a figure reaches when its bands are much wider than its curves.

The 95 % interval of a mean over few seeds or prompts may be many times as wide as the curves are
high. On an axis that holds it all, they are flat lines; so the axis follows the curves, a band is
cut where it leaves the axis, and the figure says how far it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ROOM = 0.6
"""How far a band may widen the axis on each side, in heights of the curves."""
LEAST_ROOM = 0.25
"""The same in sizes of the largest value: next to a band of 10 % a curve that moves by 0.1 % is
flat, and has to look so."""
MOST_GROWTH = 1.5
"""An axis that holds everything may be this many times as high; more is cut."""
MARGIN = 0.05
"""Free space above and below, in heights of the axis."""


@dataclass(frozen=True, slots=True)
class CutAxis:
    """An axis from `low` to `high` that bands leave, which reach from `band_low` to `band_high`."""

    low: float
    high: float
    band_low: float
    band_high: float

    @property
    def note(self) -> str:
        return f"bands reach from {_text(self.band_low)} to {_text(self.band_high)}"


def cut_axis(values: Iterable[float], edges: Iterable[float]) -> CutAxis | None:
    """The axis for curves of these values and bands with these edges; None where all of it fits."""
    inside = [value for value in values if math.isfinite(value)]
    bands = [edge for edge in edges if math.isfinite(edge)]
    if not inside or not bands:
        return None
    low, high = min(inside), max(inside)
    whole_low, whole_high = min(low, *bands), max(high, *bands)
    room = max(ROOM * (high - low), LEAST_ROOM * max(abs(low), abs(high)))
    low, high = max(low - room, whole_low), min(high + room, whole_high)
    # A curve of zeros has no size to go by: its band is all there is to see.
    if room == 0 or whole_high - whole_low <= MOST_GROWTH * (high - low):
        return None
    margin = MARGIN * (high - low)
    return CutAxis(low - margin, high + margin, min(bands), max(bands))


def _text(value: float) -> str:
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
