"""Why do the rewards of a group not vary? Low-RV groups sorted by cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.groups import Grouped, GroupIds, group, moments
from moored.errors import MooredError

CAUSES = {
    "too_easy": "all succeed: safe to drop, or draw harder tasks",
    "too_hard": "all fail: keep them for a curriculum",
    "reward_blind": "behave differently for the same reward: look at the reward function",
    "unexplained": "give one reward without all succeeding or all failing",
    "errored": "have no reward: all their trajectories ended in an error",
}
"""Why a group's RV is low, and what that says; the fields of `Triage`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Triage:
    """Low-RV groups by cause, as indices of groups; each calls for a different remedy."""

    too_easy: np.ndarray
    """All succeed: drop."""
    too_hard: np.ndarray
    """All fail: keep for a curriculum."""
    reward_blind: np.ndarray
    """Different behaviours, same reward, neither all good nor all bad: look at the reward."""
    unexplained: np.ndarray
    """Same reward and same behaviour (or behaviours not given), neither all good nor all bad."""
    errored: np.ndarray
    """No finite reward: every trajectory ended in an error, which says nothing about the task."""
    num_groups: int

    @property
    def num_low(self) -> int:
        return sum(len(getattr(self, cause)) for cause in CAUSES)

    def share(self, cause: str) -> float:
        """Share of all groups that have this cause."""
        return len(getattr(self, cause)) / self.num_groups

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each cause that a group has."""
        counts = {cause: len(getattr(self, cause)) for cause in CAUSES}
        return tuple(
            f"{count} of {self.num_groups} groups {CAUSES[cause]}"
            for cause, count in counts.items()
            if count
        )


def triage(
    rewards: ArrayLike,
    group_ids: GroupIds | None = None,
    *,
    success: ArrayLike | None = None,
    behaviours: Sequence[object] | None = None,
    success_reward: float | None = None,
    low: float = 0.01,
) -> Triage:
    """Sort the groups whose RV is at most `low` times the batch's largest RV by cause.

    `success` and `behaviours` (actions or texts) are laid out like `rewards`. Without `success`, a
    trajectory succeeds when its reward reaches `success_reward`, else it fails. Without either, it
    succeeds in the top tenth of the batch's reward range and fails in the bottom tenth (a batch of
    one single reward succeeds when that is > 0). `reward_blind` needs `behaviours`. Trajectories
    without a finite reward take no part.
    """
    grouped = group(rewards, group_ids)
    variances = moments(grouped).variance(0)
    missing = ~np.isfinite(grouped.values_PG)
    won_PG, lost_PG = _outcomes(grouped, success, group_ids, success_reward)
    errored = missing.all(axis=1)
    is_low = (variances <= low * variances.max(initial=0.0)) & ~errored
    easy = is_low & (won_PG | missing).all(axis=1)
    hard = is_low & (lost_PG | missing).all(axis=1) & ~easy
    differs = _behaviours_differ(grouped, behaviours, is_flat=group_ids is not None)
    rest = is_low & ~easy & ~hard
    return Triage(
        too_easy=np.flatnonzero(easy),
        too_hard=np.flatnonzero(hard),
        reward_blind=np.flatnonzero(rest & differs),
        unexplained=np.flatnonzero(rest & ~differs),
        errored=np.flatnonzero(errored),
        num_groups=len(grouped.labels),
    )


def _outcomes(
    grouped: Grouped,
    success: ArrayLike | None,
    group_ids: GroupIds | None,
    success_reward: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(P, G) trajectories that succeeded and that failed; partial credit may be neither."""
    rewards_PG = grouped.values_PG
    if success is not None:
        given = group(success, group_ids)
        if given.sizes.tolist() != grouped.sizes.tolist():
            raise MooredError("success must be laid out like rewards, one entry per trajectory")
        won_PG = given.values_PG > 0.5
        return won_PG, ~won_PG
    if success_reward is not None:
        return rewards_PG >= success_reward, rewards_PG < success_reward
    finite = rewards_PG[np.isfinite(rewards_PG)]
    low, high = float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf))
    if not low < high:
        return rewards_PG > 0.0, rewards_PG <= 0.0
    margin = 0.1 * (high - low)
    return rewards_PG >= high - margin, rewards_PG <= low + margin


def _behaviours_differ(
    grouped: Grouped, behaviours: Sequence[object] | None, *, is_flat: bool
) -> np.ndarray:
    """(P,) True where the trajectories with a reward show at least two different behaviours."""
    num_groups = len(grouped.labels)
    if behaviours is None:
        return np.zeros(num_groups, dtype=bool)
    flat = list(behaviours) if is_flat else _flattened(behaviours, grouped.sizes)
    rewards = grouped.ungroup(grouped.values_PG).ravel()
    if len(flat) != len(rewards):
        raise MooredError(
            f"behaviours must be laid out like rewards, one entry per trajectory, got {len(flat)} "
            f"for {len(rewards)}"
        )
    index = np.repeat(np.arange(num_groups), grouped.sizes) if grouped.row is None else grouped.row
    seen: list[set[str]] = [set() for _ in range(num_groups)]
    for position in np.flatnonzero(np.isfinite(rewards)).tolist():
        seen[index[position]].add(str(flat[position]))
    return np.array([len(kinds) > 1 for kinds in seen], dtype=bool)


def _flattened(behaviours: Sequence[object], sizes: np.ndarray) -> list[object]:
    """Rows of behaviours end to end, each checked to be as long as its group."""
    if len(behaviours) != len(sizes):
        raise MooredError(
            f"behaviours must be laid out like rewards, one row per group, got {len(behaviours)} "
            f"rows for {len(sizes)} groups"
        )
    flat: list[object] = []
    for position, (row, size) in enumerate(zip(behaviours, sizes.tolist(), strict=True)):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence | np.ndarray):
            raise MooredError(f"behaviours[{position}] must be a row, one entry per trajectory")
        if len(row) != size:
            raise MooredError(
                f"behaviours[{position}] has {len(row)} entries for {size} trajectories"
            )
        flat.extend(row)
    return flat
