"""Values by group, their moments, and the scores that the filter ranks groups by.

Flat or ragged per-trajectory values are laid out as one padded (P, G) matrix. A score is a function
of its `GroupMoments` and `ddof` that returns one number per group. A function named by
`module:attribute` is given rewards; `Score` names another quantity of the trajectories.
Shape legend: P groups, G trajectories in the largest group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from moored.errors import MooredError
from moored.names import SCORES
from moored.types import group_id_array

GroupIds = Sequence[object] | np.ndarray
ROUNDING = 1e-12
"""Relative difference up to which two float64 sums of the same terms count as equal."""
Quantity = Literal["reward", "length", "entropy"]
"""One number per trajectory: its reward, its sampled tokens, its mean token entropy."""


def rounding_of(values: np.ndarray) -> float:
    """Relative difference up to which values of this dtype count as equal.

    8 eps of the dtype, 1e-6 for float32: ten rewards of -0.1 summed in float32 miss -1 by one eps,
    while 1 and 1.0001 differ by 800. Float64 sums of many terms get `ROUNDING`, 4,500 eps.
    """
    is_float = values.dtype.kind == "f"
    return max(ROUNDING, 8.0 * float(np.finfo(values.dtype).eps)) if is_float else ROUNDING


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Grouped:
    """Per-trajectory values by group; NaN marks padding and missing values."""

    values_PG: np.ndarray
    labels: np.ndarray
    """(P,) caller's group ids in order of first appearance."""
    rounding: float
    """Relative difference up to which two values count as equal, from the caller's dtype."""
    row: np.ndarray | None = None
    """Group index of each flat entry; None when the input already was (P, G)."""
    col: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        """(P,) members of each group, missing values included."""
        num_groups, widest = self.values_PG.shape
        if self.row is None:
            return np.full(num_groups, widest)
        return np.bincount(self.row, minlength=num_groups)

    def ungroup(self, array_PG: np.ndarray) -> np.ndarray:
        """Put per-trajectory results back as the caller gave them; unequal rows come back flat."""
        return array_PG if self.row is None else array_PG[self.row, self.col]


@dataclass(frozen=True, slots=True, eq=False)
class GroupMoments:
    """Count, mean and deviations of the finite members of each group."""

    count_P: np.ndarray
    mean_P: np.ndarray
    deviation_PG: np.ndarray
    """Value minus mean; 0 for missing values and throughout a group of equal ones."""
    values_PG: np.ndarray
    """The values themselves; NaN where one is missing."""

    def variance(self, ddof: int = 0) -> np.ndarray:
        """(P,) exactly 0 for groups of equal values and for fewer than two members."""
        squares_P = np.einsum("pg,pg->p", self.deviation_PG, self.deviation_PG)
        return squares_P / np.maximum(self.count_P - ddof, 1)

    def of(self, chosen_P: np.ndarray) -> GroupMoments:
        """The moments of some groups alone."""
        if chosen_P.all():
            return self
        parts = (self.count_P, self.mean_P, self.deviation_PG, self.values_PG)
        return GroupMoments(*(part[chosen_P] for part in parts))


def group(values: ArrayLike, group_ids: GroupIds | None = None) -> Grouped:
    """Lay out `values`: (P, G), a list of rows of unequal length, or flat with `group_ids`."""
    try:
        array = np.asarray(values)
        floats, rounding = array.astype(np.float64, copy=False), rounding_of(array)
    except ValueError:
        return _from_rows(values, group_ids)
    if group_ids is not None:
        return _from_flat(floats, group_id_array(group_ids), rounding)
    if floats.ndim != 2:
        raise MooredError(
            f"values must be (P, G) when no group_ids are given, got shape {floats.shape}; "
            f"give group_ids, one per trajectory"
        )
    return Grouped(values_PG=floats, labels=np.arange(len(floats)), rounding=rounding)


def _from_rows(values: ArrayLike, group_ids: GroupIds | None) -> Grouped:
    """A ragged list of rows, one per group; an empty row is a group without members."""
    rows = [np.asarray(row) for row in values]  # pyright: ignore[reportGeneralTypeIssues]
    if group_ids is not None or any(row.ndim != 1 or row.dtype.kind in "SU" for row in rows):
        raise MooredError("values must be numbers: (P, G), a list of rows, or flat with group_ids")
    labels = np.arange(len(rows))
    group_of = np.repeat(labels, [len(row) for row in rows])
    flat = np.concatenate(rows).astype(np.float64)
    return _padded(flat, group_of, labels, max(rounding_of(row) for row in rows))


def _from_flat(flat: np.ndarray, ids: np.ndarray, rounding: float) -> Grouped:
    """Groups are numbered by first appearance."""
    if flat.shape != ids.shape or flat.ndim != 1:
        raise MooredError(
            f"group_ids must be flat with one id per value, got {flat.shape} values and "
            f"{ids.shape} ids"
        )
    index: dict[object, int] = {}
    group_of = np.array([index.setdefault(label, len(index)) for label in ids.tolist()], np.intp)
    labels = ids[np.unique(group_of, return_index=True)[1]]
    return _padded(flat, group_of, labels, rounding)


def _padded(flat: np.ndarray, row: np.ndarray, labels: np.ndarray, rounding: float) -> Grouped:
    """Entries in the row of their group, in the order in which they were given."""
    counts = np.bincount(row, minlength=len(labels))
    col = np.empty(len(row), dtype=np.intp)
    starts = np.cumsum(counts) - counts
    col[np.argsort(row, kind="stable")] = np.arange(len(row)) - np.repeat(starts, counts)
    values_PG = np.full((len(labels), counts.max(initial=0)), np.nan)
    values_PG[row, col] = flat
    return Grouped(values_PG=values_PG, labels=labels, rounding=rounding, row=row, col=col)


def moments(grouped: Grouped) -> GroupMoments:
    """Moments over the finite members of each group.

    A group whose members are equal up to rounding deviates by exactly 0: [0.1, 0.1, 0.1] must
    not leave 2e-34 of variance behind.
    """
    finite_PG = np.isfinite(grouped.values_PG)
    count_P = finite_PG.sum(axis=1)
    filled_PG = np.where(finite_PG, grouped.values_PG, 0.0)
    mean_P = filled_PG.sum(axis=1) / np.maximum(count_P, 1)
    deviation_PG = np.where(finite_PG, filled_PG - mean_P[:, None], 0.0)
    spread_P = np.abs(deviation_PG).max(axis=1, initial=0.0)
    largest_P = np.abs(filled_PG).max(axis=1, initial=0.0)
    differs_P = spread_P > grouped.rounding * largest_P
    deviation_PG = np.where(differs_P[:, None], deviation_PG, 0.0)
    return GroupMoments(count_P, mean_P, deviation_PG, grouped.values_PG)


def cap_malformed(
    task_rewards: np.ndarray, is_valid: np.ndarray, success: np.ndarray
) -> np.ndarray:
    """(G,) rewards of a group, without penalties, by which a filter tells its members apart.

    A malformed reply also escapes what a failed one costs, e.g. the price of each move: a failure
    with malformed replies therefore counts at most as much as the worst trajectory without any, and
    does not make a group of failures look informative.
    """
    is_whole = is_valid & np.isfinite(task_rewards)
    if not is_whole.any():
        return task_rewards
    worst = task_rewards[is_whole].min()
    return np.where(~is_whole & ~success, np.minimum(task_rewards, worst), task_rewards)


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
    return groups.mean_P


LENGTH = Score(mean, "length")
ENTROPY = Score(mean, "entropy")
ENTROPY_STD = Score(std, "entropy")


@cache
def load_score(name: str) -> Score:
    """The score of this name or `module:attribute`, looked up once in a process."""
    found = SCORES.get_object(name)
    if isinstance(found, Score):
        return found
    if not callable(found):
        raise MooredError(
            f"score {name!r} is of type {type(found).__name__}; name a function of the groups' "
            f"moments and ddof, or a moored.algo.groups.Score"
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
    function, has_two_P = load_score(score).function, groups.count_P >= 2
    scores_P = np.zeros(len(has_two_P))
    if not has_two_P.any():
        return scores_P
    found = np.asarray(function(groups.of(has_two_P), ddof), dtype=np.float64)
    num_scored = int(has_two_P.sum())
    if found.shape != (num_scored,):
        raise MooredError(
            f"score {score!r} must return one number for each of {num_scored} groups, got shape "
            f"{found.shape}"
        )
    scores_P[has_two_P] = found
    return scores_P
