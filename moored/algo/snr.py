"""Does one rollout batch carry signal, and would the filter help?

Reward variance (RV) inside a group bounds its task gradient. These functions describe how RV is
spread over the groups of a batch and give advice with reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from numpy.typing import ArrayLike

from moored.algo.causes import CAUSES, Triage, triage
from moored.algo.filters import RewardVariance, reward_variance
from moored.algo.groups import GroupIds
from moored.errors import MooredError

RHO_GRID = (0.6, 0.8, 0.9, 0.95, 0.98, 1.0)
DEFAULT_RHO = 0.9
HELPS_ABOVE = 1.0
"""Std/Mean(RV) from which the filter pays: RAGEN-2 reports 1.16 and 1.29 where it helped."""
HURTS_BELOW = 0.5
"""Std/Mean(RV) up to which it drops at random: RAGEN-2 reports 0.33 where it cost points."""
BLIND_ABOVE = 0.25
"""Share of reward-blind groups above which the reward should be fixed before any filter."""


class Recommendation(StrEnum):
    """What to do about filtering, in one word."""

    FILTER = "filter"
    TRY_FILTER = "try_filter"
    NO_FILTER = "no_filter"
    FIX_REWARD = "fix_reward"
    CHANGE_TASKS = "change_tasks"
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
    num_groups = len(rv.known)
    if causes.share("reward_blind") > BLIND_ABOVE:
        return Recommendation.FIX_REWARD, [
            f"{causes.share('reward_blind'):.0%} of the groups behave differently for the same "
            f"reward: a filter would hide a reward that cannot tell them apart"
        ]
    if rv.mean == 0.0:
        return Recommendation.NO_SIGNAL, [
            f"no reward varies inside any of the {num_groups} groups: there is nothing to learn "
            f"from this batch, and nothing to filter"
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
    counts = {cause: len(getattr(causes, cause)) for cause in CAUSES}
    return [
        f"{count} of {causes.num_groups} groups {CAUSES[cause]}"
        for cause, count in counts.items()
        if count
    ]
