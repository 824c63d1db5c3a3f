"""Flat or ragged per-trajectory values laid out as one padded (P, G) matrix.

Shape legend: P groups, G trajectories in the largest group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.errors import MooredError

GroupIds = Sequence[object] | np.ndarray
ROUNDING = 1e-12
"""Relative spread below which the members of a group count as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Per-trajectory values by group; NaN marks padding and missing values."""

    values_PG: np.ndarray
    labels: np.ndarray
    """(P,) caller's group ids in order of first appearance."""
    row: np.ndarray | None
    """Group index of each flat entry; None when the input already was (P, G)."""
    col: np.ndarray | None

    def ungroup(self, array_PG: np.ndarray) -> np.ndarray:
        """Put per-trajectory results back into the shape the caller gave."""
        return array_PG if self.row is None else array_PG[self.row, self.col]


@dataclass(frozen=True, slots=True, eq=False)
class GroupMoments:
    """Count, mean and squared deviations of the finite members of each group."""

    count_P: np.ndarray
    mean_P: np.ndarray
    squares_P: np.ndarray
    """Sum of squared deviations; 0 for constant groups and for fewer than two members."""

    def variance(self, ddof: int = 0) -> np.ndarray:
        return self.squares_P / np.maximum(self.count_P - ddof, 1)


def group(values: ArrayLike, group_ids: GroupIds | None = None) -> Grouped:
    """Lay out `values`: (P, G), a list of rows of unequal length, or flat with `group_ids`."""
    flat, group_ids = _as_floats(values, group_ids)
    if group_ids is None:
        if flat.ndim != 2:
            raise MooredError(
                f"values must be (P, G) when no group_ids are given, got shape {flat.shape}; "
                f"give group_ids, one per trajectory"
            )
        return Grouped(flat, np.arange(len(flat)), None, None)
    ids = group_ids if isinstance(group_ids, np.ndarray) else _as_ids(group_ids)
    if flat.shape != ids.shape or flat.ndim != 1:
        raise MooredError(
            f"group_ids must be flat with one id per value, got {flat.shape} values and "
            f"{ids.shape} ids"
        )
    row, starts, counts, order = _runs(ids)
    col = np.empty(len(ids), dtype=np.intp)
    col[order] = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    values_PG = np.full((len(counts), int(counts.max(initial=0))), np.nan)
    values_PG[row, col] = flat
    return Grouped(values_PG, ids[starts], row, col)


def _as_floats(values: ArrayLike, group_ids: GroupIds | None) -> tuple[np.ndarray, GroupIds | None]:
    """Turn the input into a float array; a ragged list of rows becomes flat with ids."""
    try:
        return np.asarray(values, dtype=np.float64), group_ids
    except ValueError:
        rows = list(values)  # pyright: ignore[reportArgumentType]
    if group_ids is not None or not all(isinstance(row, (list, tuple, np.ndarray)) for row in rows):
        raise MooredError("values must be numbers: (P, G), a list of rows, or flat with group_ids")
    lengths = [len(row) for row in rows]
    flat = np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])
    return flat, np.repeat(np.arange(len(rows)), lengths)


def _as_ids(group_ids: GroupIds) -> np.ndarray:
    ids = np.asarray(group_ids)
    if ids.ndim == 1:
        return ids
    # Tuples as ids: keep them whole instead of letting numpy make a second axis.
    whole = np.empty(len(group_ids), dtype=object)
    whole[:] = list(group_ids)
    return whole


def _runs(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group index per entry, first entry and size per group, and entries sorted by group.

    Groups are numbered by first appearance. Contiguous groups, the usual case, need no sort.
    """
    if len(ids) == 0:
        empty = np.zeros(0, dtype=np.intp)
        return empty, empty, empty, empty
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    run_ids = ids[starts].tolist()
    index: dict[object, int] = {}
    run_group = np.array([index.setdefault(label, len(index)) for label in run_ids])
    row = np.repeat(run_group, np.diff(np.append(starts, len(ids))))
    counts = np.bincount(row, minlength=len(index))
    if len(index) == len(run_ids):
        return row, starts, counts, np.arange(len(ids))
    firsts = starts[np.unique(run_group, return_index=True)[1]]
    return row, firsts, counts, np.argsort(row, kind="stable")


def moments(values_PG: np.ndarray) -> GroupMoments:
    """Moments over the finite members of each group.

    A group whose members are equal up to rounding has variance exactly 0: [0.1, 0.1, 0.1] must
    not leave 2e-34 behind.
    """
    finite = np.isfinite(values_PG)
    count = finite.sum(axis=1)
    filled = values_PG if finite.all() else np.where(finite, values_PG, 0.0)
    mean = filled.sum(axis=1) / np.maximum(count, 1)
    deviation = np.where(finite, filled - mean[:, None], 0.0)
    squares = np.einsum("pg,pg->p", deviation, deviation)
    largest = np.sqrt(np.einsum("pg,pg->p", filled, filled))
    is_constant = np.sqrt(squares) <= ROUNDING * largest
    return GroupMoments(count, mean, np.where((count < 2) | is_constant, 0.0, squares))
