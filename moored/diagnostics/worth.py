"""Does reasoning that depends on its prompt earn more than reasoning that does not?

In: the gain of each reasoning (how much likelier it is under its own prompt than under a mixture of
all: their mean is the MI), the reward of its episode, and its prompt. A policy gradient makes what
is rewarded likelier inside each prompt, so their correlation there says whether reward holds
reasoning to its input. Where it is 0, nothing does, and regularisation and noise decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.diagnostics.information import Likelihood
from moored.diagnostics.pairs import PairSet
from moored.diagnostics.report import Interval
from moored.diagnostics.resampling import t_quantile
from moored.errors import MooredError

ROUNDING = 1e-6
"""Relative difference up to which rewards are equal: sums of the same prices, also in float32,
differ by their order. Gains of a prompt where nothing else varies would only add to the scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Correlation of gain and reward inside prompts."""

    correlation: float
    standard_error: float | None
    """Jackknife over prompts; None with fewer than 2."""
    num_prompts: int
    """In which rewards vary, of the reasonings that were measured."""
    num_reasonings: int | None = None
    """Of these prompts; None where it comes from a log, which does not tell."""

    @property
    def interval(self) -> Interval:
        """95 %, by Student's t; all that a correlation can be where one prompt tells nothing."""
        if self.standard_error is None:
            return Interval(-1.0, 1.0)
        half = t_quantile(self.num_prompts - 1, 0.95) * self.standard_error
        return Interval(max(self.correlation - half, -1.0), min(self.correlation + half, 1.0))

    def to_dict(self) -> dict[str, float | None]:
        """The figures by the names that the log has for them."""
        return {
            "gain_reward_correlation": self.correlation,
            "gain_reward_correlation_se": self.standard_error,
            "num_rewarded_prompts": float(self.num_prompts),
        }

    def metrics(self, prefix: str) -> dict[str, float]:
        """The logged numbers."""
        figures = self.to_dict().items()
        return {f"{prefix}/{name}": value for name, value in figures if value is not None}

    @classmethod
    def from_log(cls, record: Mapping[str, object], prefix: str) -> Worth | None:
        """What `metrics` wrote into a record; None where it wrote nothing."""
        correlation, error, count = (
            value if isinstance(value := record.get(f"{prefix}/{name}"), int | float) else None
            for name in (
                "gain_reward_correlation",
                "gain_reward_correlation_se",
                "num_rewarded_prompts",
            )
        )
        if correlation is None or count is None:
            return None
        return cls(correlation=correlation, standard_error=error, num_prompts=int(count))


def gain_reward_correlation(
    gains: ArrayLike, rewards: ArrayLike, prompts: ArrayLike
) -> Worth | None:
    """Σ (gain − its prompt's mean)(reward − its prompt's mean) over the root of both squares.

    Over prompts whose rewards vary, by more than rounding. Rewards that are not finite are left
    out. None where nothing varies inside a prompt.
    """
    gains_M, rewards_M = (np.asarray(given, dtype=float) for given in (gains, rewards))
    prompts_M = np.asarray(prompts)
    if not gains_M.shape == rewards_M.shape == prompts_M.shape or gains_M.ndim != 1:
        raise MooredError(
            f"gains, rewards and prompts must be of one length, got {gains_M.shape}, "
            f"{rewards_M.shape} and {prompts_M.shape}"
        )
    sums = []
    count = 0
    for prompt in np.unique(prompts_M):
        own = (prompts_M == prompt) & np.isfinite(rewards_M)
        if own.sum() < 2 or np.ptp(rewards_M[own]) <= ROUNDING * np.abs(rewards_M[own]).max():
            continue
        g, r = (values[own] - values[own].mean() for values in (gains_M, rewards_M))
        sums.append((g @ g, r @ r, g @ r))
        count += int(own.sum())
    if not sums or not sum(gain for gain, _, _ in sums):
        return None
    sums_P3 = np.array(sums)
    without = [_correlation(sums_P3.sum(axis=0) - each) for each in sums_P3]
    return Worth(
        correlation=_correlation(sums_P3.sum(axis=0)),
        standard_error=_jackknife(np.array(without)) if len(sums) > 1 else None,
        num_prompts=len(sums),
        num_reasonings=count,
    )


def worth_of(pairs: PairSet, logp_MN: np.ndarray, prompts: ArrayLike) -> Worth | None:
    """Of scored reasonings, with the rewards of their episodes; `prompts` as above."""
    gains = Likelihood.of(logp_MN / pairs.lengths[:, None], pairs.columns).gain_M
    return gain_reward_correlation(gains, [pair.reward for pair in pairs.pairs], prompts)


def _correlation(sums: np.ndarray) -> float:
    gains, rewards, both = sums.tolist()
    scale = math.sqrt(max(gains, 0.0) * max(rewards, 0.0))
    return both / scale if scale > 0.0 else 0.0


def _jackknife(without: np.ndarray) -> float:
    """Standard error from the figures without each unit."""
    count = len(without)
    return math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
