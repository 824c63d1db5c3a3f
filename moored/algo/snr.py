"""Does one rollout batch carry signal, and would the filter help?

Reward variance (RV) inside a group bounds its task gradient. These functions describe how RV is
spread over the groups of a batch, sort low-RV groups by cause, and give advice with reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.filters import select
from moored.algo.groups import Grouped, GroupIds, group, moments
from moored.errors import MooredError

RHO_GRID = (0.6, 0.8, 0.9, 0.95, 0.98, 1.0)
DEFAULT_RHO = 0.9
HELPS_ABOVE = 1.0
"""Std/Mean(RV) from which the filter pays: RAGEN-2 reports 1.16 and 1.29 where it helped."""
HURTS_BELOW = 0.5
"""Std/Mean(RV) up to which it drops at random: RAGEN-2 reports 0.33 where it cost points."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardVariance:
    """How reward variance is spread over the groups of one batch."""

    variances: np.ndarray
    """(P,) population variance of the rewards in each group."""

    @property
    def mean(self) -> float:
        return float(self.variances.mean())

    @property
    def std(self) -> float:
        return float(self.variances.std())

    @property
    def std_over_mean(self) -> float:
        """Std(RV) / Mean(RV): high when RV is bimodal. 0 when no group has any variance."""
        return self.std / self.mean if self.mean > 0.0 else 0.0

    @property
    def zero_fraction(self) -> float:
        return float(np.mean(self.variances == 0.0))

    def kept_fraction(self, rho: float) -> float:
        """Share of groups that `top_p` with this mass keeps."""
        return len(select(self.variances, rule="top_p", value=rho)) / len(self.variances)

    def std_over_mean_interval(
        self, *, draws: int = 1000, level: float = 0.95, seed: int = 0
    ) -> tuple[float, float]:
        """Bootstrap interval over groups: with 8 groups the ratio is a rough number."""
        rng = np.random.default_rng(seed)
        picks = rng.integers(len(self.variances), size=(draws, len(self.variances)))
        sample = self.variances[picks]
        mean = sample.mean(axis=1)
        ratio = np.divide(sample.std(axis=1), mean, out=np.zeros(draws), where=mean > 0.0)
        low, high = np.quantile(ratio, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def reward_variance(rewards: ArrayLike, group_ids: GroupIds | None = None) -> RewardVariance:
    """RV of each group; `rewards` is (P, G), a list of rows, or flat with `group_ids`."""
    grouped = group(rewards, group_ids)
    if len(grouped.labels) == 0:
        raise MooredError("reward_variance needs at least one group, got none")
    return RewardVariance(moments(grouped.values_PG).variance(0))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Triage:
    """Low-RV groups by cause, as indices of groups; the three causes want different cures."""

    too_easy: np.ndarray
    """All succeed: drop."""
    too_hard: np.ndarray
    """All fail: keep for a curriculum."""
    reward_blind: np.ndarray
    """Different behaviours, same reward, neither all good nor all bad: look at the reward."""
    unexplained: np.ndarray
    """Same reward and same behaviour (or behaviours not given), neither all good nor all bad."""
    num_groups: int

    @property
    def num_low(self) -> int:
        return sum(map(len, (self.too_easy, self.too_hard, self.reward_blind, self.unexplained)))

    def share(self, cause: str) -> float:
        """Share of all groups that have this cause."""
        return len(getattr(self, cause)) / self.num_groups


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
    one single reward succeeds when that is > 0). `reward_blind` needs `behaviours`.
    """
    grouped = group(rewards, group_ids)
    variances = moments(grouped.values_PG).variance(0)
    missing = ~np.isfinite(grouped.values_PG)
    won_PG, lost_PG = _outcomes(grouped, success, group_ids, success_reward)
    is_low = variances <= low * variances.max(initial=0.0)
    easy = is_low & (won_PG | missing).all(axis=1) & ~missing.all(axis=1)
    hard = is_low & (lost_PG | missing).all(axis=1) & ~easy
    differs = _behaviours_differ(grouped, behaviours)
    rest = is_low & ~easy & ~hard
    return Triage(
        too_easy=np.flatnonzero(easy),
        too_hard=np.flatnonzero(hard),
        reward_blind=np.flatnonzero(rest & differs),
        unexplained=np.flatnonzero(rest & ~differs),
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
        won_PG = group(success, group_ids).values_PG > 0.5
        if won_PG.shape != rewards_PG.shape:
            raise MooredError("success must be laid out like rewards, one entry per trajectory")
        return won_PG, ~won_PG
    if success_reward is not None:
        return rewards_PG >= success_reward, rewards_PG < success_reward
    finite = rewards_PG[np.isfinite(rewards_PG)]
    low, high = float(finite.min(initial=np.inf)), float(finite.max(initial=-np.inf))
    if not low < high:
        return rewards_PG > 0.0, rewards_PG <= 0.0
    margin = 0.1 * (high - low)
    return rewards_PG >= high - margin, rewards_PG <= low + margin


def _behaviours_differ(grouped: Grouped, behaviours: Sequence[object] | None) -> np.ndarray:
    """(P,) True where a group shows at least two different behaviours."""
    num_groups = len(grouped.labels)
    if behaviours is None:
        return np.zeros(num_groups, dtype=bool)
    if grouped.row is None:
        rows = [list(row) for row in behaviours]  # pyright: ignore[reportArgumentType]
        flat = [item for row in rows for item in row]
        index = [i for i, row in enumerate(rows) for _ in row]
    else:
        flat, index = list(behaviours), grouped.row.tolist()
    if len(flat) != len(index) or (index and max(index) >= num_groups):
        raise MooredError("behaviours must be laid out like rewards, one entry per trajectory")
    seen: list[set[str]] = [set() for _ in range(num_groups)]
    for position, behaviour in zip(index, flat, strict=True):
        seen[position].add(str(behaviour))
    return np.array([len(kinds) > 1 for kinds in seen], dtype=bool)


class Recommendation(StrEnum):
    """What to do about filtering, in one word."""

    FILTER = "filter"
    TRY_FILTER = "try_filter"
    NO_FILTER = "no_filter"
    FIX_REWARD = "fix_reward"
    NO_SIGNAL = "no_signal"
    MORE_GROUPS = "more_groups"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Advice:
    """A recommendation with the figures and sentences it rests on."""

    recommendation: Recommendation
    rho: float | None
    """Mass to give `top_p`; None when no filter is recommended."""
    reasons: tuple[str, ...]
    rv: RewardVariance
    std_over_mean_interval: tuple[float, float]
    kept_fraction: dict[float, float]
    """Kept share of the groups for each rho of the grid."""
    step_time_saved: dict[float, float] | None
    """Saved share of the step time for each rho; None when update_share was not given."""
    triage: Triage


def advise(
    rewards: ArrayLike,
    group_ids: GroupIds | None = None,
    *,
    success: ArrayLike | None = None,
    behaviours: Sequence[object] | None = None,
    success_reward: float | None = None,
    update_share: float | None = None,
    rhos: Sequence[float] = RHO_GRID,
    min_groups: int = 4,
    seed: int = 0,
) -> Advice:
    """Recommend for or against the filter from the rewards of one rollout batch.

    `update_share` is the share of the step time spent in the update (the part a filter saves).
    """
    if update_share is not None and not 0.0 <= update_share <= 1.0:
        raise MooredError(f"update_share must lie in [0, 1], got {update_share}")
    rv = reward_variance(rewards, group_ids)
    causes = triage(
        rewards, group_ids, success=success, behaviours=behaviours, success_reward=success_reward
    )
    interval = rv.std_over_mean_interval(seed=seed)
    kept = {rho: rv.kept_fraction(rho) for rho in rhos}
    recommendation, reasons = _decide(rv, interval, causes, min_groups)
    saved = None
    if update_share is not None:
        saved = {rho: update_share * (1.0 - fraction) for rho, fraction in kept.items()}
    uses_filter = recommendation in (Recommendation.FILTER, Recommendation.TRY_FILTER)
    return Advice(
        recommendation=recommendation,
        rho=DEFAULT_RHO if uses_filter else None,
        reasons=(*reasons, *_cause_reasons(causes)),
        rv=rv,
        std_over_mean_interval=interval,
        kept_fraction=kept,
        step_time_saved=saved,
        triage=causes,
    )


def _decide(
    rv: RewardVariance, interval: tuple[float, float], causes: Triage, min_groups: int
) -> tuple[Recommendation, list[str]]:
    num_groups = len(rv.variances)
    if rv.mean == 0.0:
        return Recommendation.NO_SIGNAL, [
            f"no reward varies inside any of the {num_groups} groups: there is nothing to learn "
            f"from this batch, and nothing to filter"
        ]
    if causes.share("reward_blind") > 0.25:
        return Recommendation.FIX_REWARD, [
            f"{causes.share('reward_blind'):.0%} of the groups behave differently for the same "
            f"reward: a filter would hide a reward that cannot tell them apart"
        ]
    if num_groups < min_groups:
        return Recommendation.MORE_GROUPS, [
            f"{num_groups} groups say too little about the spread of RV; give at least {min_groups}"
        ]
    ratio = rv.std_over_mean
    figure = f"Std/Mean of RV is {ratio:.2f} (95% interval {interval[0]:.2f} to {interval[1]:.2f})"
    if ratio >= HELPS_ABOVE:
        return Recommendation.FILTER, [
            f"{figure}: RV is bimodal, so top_p {DEFAULT_RHO} drops noise and keeps "
            f"{rv.kept_fraction(DEFAULT_RHO):.0%} of the groups"
        ]
    if ratio <= HURTS_BELOW:
        return Recommendation.NO_FILTER, [
            f"{figure}: RV is nearly even, so a filter would drop groups at random"
        ]
    return Recommendation.TRY_FILTER, [
        f"{figure}: between the published cases (0.33 hurt, 1.16 helped); compare both"
    ]


def _cause_reasons(causes: Triage) -> list[str]:
    texts = {
        "too_easy": "all succeed: safe to drop, or draw harder tasks",
        "too_hard": "all fail: keep them for a curriculum",
        "reward_blind": "behave differently for the same reward: look at the reward function",
        "unexplained": "give one reward without all succeeding or all failing",
    }
    counts = {cause: len(getattr(causes, cause)) for cause in texts}
    return [
        f"{count} of {causes.num_groups} groups {texts[cause]}"
        for cause, count in counts.items()
        if count
    ]
