"""Scores of groups: what the filter ranks by.

A score is a function of `GroupMoments` and `ddof` that returns one number per group. A function
named by `module:attribute` is given rewards; `Score` names another quantity of the trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from moored.algo.groups import GroupMoments
from moored.errors import MooredError
from moored.names import SCORES

Quantity = Literal["reward", "length", "entropy"]
"""One number per trajectory: its reward, its sampled tokens, its mean token entropy."""
ScoreFunction = Callable[[GroupMoments, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Score:
    """How groups are scored, and by which numbers of their trajectories."""

    function: ScoreFunction
    quantity: Quantity = "reward"


def variance(groups: GroupMoments, ddof: int) -> np.ndarray:
    return groups.variance(ddof)


def std(groups: GroupMoments, ddof: int) -> np.ndarray:
    return np.sqrt(groups.variance(ddof))


def mean(groups: GroupMoments, _ddof: int) -> np.ndarray:
    return np.where(groups.count_P < 2, 0.0, groups.mean_P)


LENGTH = Score(mean, "length")
ENTROPY = Score(mean, "entropy")
ENTROPY_STD = Score(std, "entropy")


def load_score(name: str) -> Score:
    """The score of this name or `module:attribute`."""
    found = SCORES.get_object(name)
    if isinstance(found, Score):
        return found
    if not callable(found):
        raise MooredError(
            f"score {name!r} is of type {type(found).__name__}; name a function of the groups' "
            f"moments and ddof, or a moored.algo.scores.Score"
        )
    return Score(cast(ScoreFunction, found))


def check_reward_score(name: str, trainer: str) -> None:
    """Raise when a score is of something that this trainer does not hand over."""
    quantity = load_score(name).quantity
    if quantity != "reward":
        raise MooredError(
            f"score {name!r} is of the {quantity} of replies, but {trainer} hands over rewards "
            f"alone; choose variance, std, reward_mean or your own module:attribute"
        )


def group_scores(groups: GroupMoments, *, score: str = "variance", ddof: int = 0) -> np.ndarray:
    """(P,) score of each group; NaN members are left out, fewer than two finite ones score 0."""
    if ddof not in (0, 1):
        raise MooredError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
    scores_P = np.asarray(load_score(score).function(groups, ddof), dtype=np.float64)
    if scores_P.shape != groups.count_P.shape:
        raise MooredError(
            f"score {score!r} must return one number for each of {len(groups.count_P)} groups, "
            f"got shape {scores_P.shape}"
        )
    return scores_P
