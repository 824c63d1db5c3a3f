"""Is the signal of a run running out? Reward variance and kept groups over its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


def trend_of(steps_S: np.ndarray, rv_S: np.ndarray, kept_S: np.ndarray, *, seed: int = 0) -> Trend:
    """From one mean of RV and one kept share per step, steps in order."""
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
