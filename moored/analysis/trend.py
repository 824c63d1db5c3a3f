"""Does a run still learn, and is its signal running out? Success, reward variance and kept groups
over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moored.diagnostics.resampling import wilson_interval

NUM_PARTS = 6
"""Parts of the planned steps whose success is compared."""
TOP = 0.95
"""Success that leaves little to learn."""
WIDEST = 0.2
"""Interval of success above which a part holds too few groups to tell progress."""
MIN_TREND_STEPS = 5
"""Of fewer steps even a perfect order comes about by chance: of four, in 2 of 24 orders."""
SIGNIFICANT = 0.05
PERMUTATIONS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The first third of the steps against the last."""

    early_steps: tuple[int, int]
    """First and last step of the early ones."""
    late_steps: tuple[int, int]
    early_rv: float
    """Mean over groups, then over steps."""
    late_rv: float
    early_kept: float
    """Share of the groups that the filter keeps."""
    late_kept: float
    p_value: float
    """Chance of so clear an order of RV over the steps if steps did not matter; two-sided."""

    @property
    def direction(self) -> str:
        """Of RV: falling, rising or steady."""
        if self.p_value > SIGNIFICANT or self.early_rv == self.late_rv:
            return "steady"
        return "falling" if self.late_rv < self.early_rv else "rising"

    def __str__(self) -> str:
        early, late = ("–".join(map(str, steps)) for steps in (self.early_steps, self.late_steps))
        word = "no clear trend in RV" if self.direction == "steady" else f"RV is {self.direction}"
        return (
            f"{word}: {self.early_rv:.3g} in steps {early}, {self.late_rv:.3g} in steps {late} "
            f"(p {self.p_value:.3f}); kept groups {self.early_kept:.0%}, then {self.late_kept:.0%}"
        )


def trend_of(
    rv_P: np.ndarray, steps_P: np.ndarray, kept_P: np.ndarray, *, seed: int = 0
) -> Trend | None:
    """How the RV of groups, and the share that a filter keeps, change over their steps."""
    steps_S = np.unique(steps_P)
    if len(steps_S) < MIN_TREND_STEPS:
        return None
    members = [steps_P == step for step in steps_S]
    rv_S = np.array([rv_P[member].mean() for member in members])
    kept_S = np.array([kept_P[member].mean() for member in members])
    third = max(1, len(steps_S) // 3)
    early, late = slice(0, third), slice(-third, None)
    return Trend(
        early_steps=(int(steps_S[0]), int(steps_S[early][-1])),
        late_steps=(int(steps_S[late][0]), int(steps_S[-1])),
        early_rv=float(rv_S[early].mean()),
        late_rv=float(rv_S[late].mean()),
        early_kept=float(kept_S[early].mean()),
        late_kept=float(kept_S[late].mean()),
        p_value=_rank_order_p(rv_S, seed),
    )


def _rank_order_p(values_S: np.ndarray, seed: int) -> float:
    """Permutation test of Spearman's correlation with the order of the steps."""
    ranks_S = _ranks(values_S)
    order_S = np.arange(len(values_S)) - (len(values_S) - 1) / 2
    found = abs(float(order_S @ ranks_S))
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(np.tile(ranks_S, (PERMUTATIONS, 1)), axis=1)
    as_clear = np.count_nonzero(np.abs(shuffled @ order_S) >= found - 1e-9)
    return float((1 + as_clear) / (1 + PERMUTATIONS))


def _ranks(values_S: np.ndarray) -> np.ndarray:
    """Ranks about 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values_S, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    return ranks - ranks.mean()


def no_progress(steps: Sequence[Mapping[str, Any]], num_steps: int) -> str | None:
    """Since when success has not risen, where that is a third of the planned steps or more.

    The steps are compared part by part: one has risen when its success lies above the 95 % interval
    of the last that had. Nothing is said of a run whose success may be 0.95 by now, nor where a
    part holds too few groups to tell.
    """
    names = ("rollout/success_rate", "filter/num_groups")
    known = [record for record in steps if None not in map(record.get, names)]
    size = num_steps // NUM_PARTS
    if not size or len(known) < size:
        return None
    parts = [known[start : start + size] for start in range(0, len(known) - size + 1, size)]
    risen = 0
    for place, part in enumerate(parts):
        risen = place if _rate(part) > _interval(parts[risen])[1] else risen
    best, last = parts[risen], parts[-1]
    (low, high), num_since = _interval(best), len(parts) - 1 - risen
    if num_since < NUM_PARTS // 3 or high - low > WIDEST or _interval(last)[1] >= TOP:
        return None
    return (
        f"no progress since step {best[-1]['step']}: success {_rate(best):.2f} in steps "
        f"{best[0]['step']} to {best[-1]['step']} (95 % interval {low:.2f} to {high:.2f}), "
        f"{_rate(last):.2f} in steps {last[0]['step']} to {last[-1]['step']}"
    )


def _interval(part: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    # Episodes of a group share their task, so that groups are the trials of the binomial.
    trials = sum(record["filter/num_groups"] for record in part)
    return wilson_interval(_rate(part) * trials, trials)


def _rate(part: Sequence[Mapping[str, Any]]) -> float:
    return float(np.mean([record["rollout/success_rate"] for record in part]))
