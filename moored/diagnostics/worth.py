"""Does reasoning that depends on its prompt earn more than reasoning that does not?

In: the gain of each reasoning (how much likelier it is under its own prompt than under a mixture of
all: their mean is the MI), the reward of its episode, and its prompt. A policy gradient makes what
is rewarded likelier inside each prompt, so their correlation there says whether reward holds
reasoning to its input. Where it is 0, nothing does, and regularisation and noise decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.errors import MooredError


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Correlation of gain and reward inside prompts."""

    correlation: float
    standard_error: float | None
    """Jackknife over prompts; None with fewer than 2."""
    num_prompts: int
    """In which rewards vary, of the reasonings that were measured."""
    num_reasonings: int
    """Of these prompts."""

    def metrics(self, prefix: str) -> dict[str, float]:
        """The logged numbers."""
        found = {
            f"{prefix}/gain_reward_correlation": self.correlation,
            f"{prefix}/num_rewarded_prompts": float(self.num_prompts),
        }
        if self.standard_error is not None:
            found[f"{prefix}/gain_reward_correlation_se"] = self.standard_error
        return found


def gain_reward_correlation(
    gains: ArrayLike, rewards: ArrayLike, prompts: ArrayLike
) -> Worth | None:
    """Σ (gain − its prompt's mean)(reward − its prompt's mean) over the root of both squares.

    Rewards that are not finite are left out. None where nothing varies inside a prompt.
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
        if own.sum() < 2 or np.ptp(rewards_M[own]) == 0.0:
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


def _correlation(sums: np.ndarray) -> float:
    gains, rewards, both = sums.tolist()
    scale = math.sqrt(max(gains, 0.0) * max(rewards, 0.0))
    return both / scale if scale > 0.0 else 0.0


def _jackknife(without: np.ndarray) -> float:
    """Standard error from the figures without each unit."""
    count = len(without)
    return math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
