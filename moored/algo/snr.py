"""Does one rollout batch carry signal, and would the filter help?

Reward variance (RV) inside a group bounds its task gradient. These functions describe how RV, and
the push of an update, are spread over the groups of a batch, and give advice with reasons.
Shape legend: P groups, G trajectories, D draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.causes import Triage, triage
from moored.algo.filters import RewardVariance, reward_variance
from moored.algo.groups import Grouped, GroupIds, group, moments
from moored.errors import MooredError

RHO_GRID = (0.6, 0.8, 0.9, 0.95, 0.98, 1.0)
DEFAULT_RHO = 0.9
HELPS_ABOVE = 1.0
"""Std/Mean(RV) above which the filter pays: RAGEN-2 reports 1.16 and 1.29 where it helped, and 0.33
where it cost points."""
FREE_ABOVE = 0.5
"""Outcome-free share above which most of an update is about something else than the outcome."""
FIRST_STEPS = 10
"""Steps of a run over which its outcome-free share is judged."""
BLIND_ABOVE = 0.25
"""Share of reward-blind groups above which the reward should be fixed before any filter."""
MIN_GROUPS = 8
"""Fewer say too little: of eight groups that all vary, 31 % may still be without variance."""
MANY_GROUPS = 1000
"""More than these would be needed only where a figure lies at its bar."""


class Recommendation(StrEnum):
    """What to do about filtering, in one word."""

    FILTER = "filter"
    NO_FILTER = "no_filter"
    CANNOT_TELL = "cannot_tell"
    FIX_REWARD = "fix_reward"
    CHANGE_TASKS = "change_tasks"
    NO_SIGNAL = "no_signal"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OutcomeFree:
    """What part of an update's push lies in groups whose trajectories all ended alike."""

    divided: float
    """With advantages that are divided by the group's std, as in GRPO."""
    plain: float
    """Without the division, as in Dr. GRPO."""
    divides: bool
    """Which of the two the advice goes by."""
    interval: tuple[float, float]
    """95 % bootstrap interval, over groups, of that one."""
    num_mixed: int
    """Groups that hold both outcomes."""

    @property
    def share(self) -> float:
        return self.divided if self.divides else self.plain


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Advice:
    """A recommendation with the figures and sentences it rests on."""

    recommendation: Recommendation
    rho: float | None
    """Mass to give `top_p`; None when no filter is recommended."""
    reasons: tuple[str, ...]
    rv: RewardVariance
    std_over_mean_interval: tuple[float, float]
    outcome_free: OutcomeFree | None
    """None where outcomes are not known, or nothing pushes."""
    groups_needed: int | None
    """About as many as would tell, where the advice cannot; None: no number of them, or no need."""
    kept_fraction: dict[float, float]
    """Kept share of the groups for each rho of the grid."""
    step_time_saved: dict[float, float] | None
    """Saved share of the step time for each rho; None when update_share was not given."""
    triage: Triage


def outcome_free_share(
    advantages: ArrayLike,
    success: ArrayLike,
    group_ids: GroupIds | None = None,
    *,
    tokens: ArrayLike | None = None,
) -> float:
    """Share of the push that lies in groups whose trajectories all succeeded or all failed.

    The push of a trajectory is |advantage| * tokens, without `tokens` |advantage|. All are laid out
    alike: (P, G), a list of rows, or flat with `group_ids`. A trajectory whose success is NaN takes
    no part. NaN when nothing pushes.
    """
    pushed, ended = group(advantages, group_ids), group(success, group_ids)
    lengths = pushed if tokens is None else group(tokens, group_ids)
    _check_layouts(pushed, ended, lengths)
    push_PG = np.abs(pushed.values_PG) * (1.0 if tokens is None else lengths.values_PG)
    push_P, is_free_P = _by_group(push_PG, ended.values_PG)
    return _share(push_P, is_free_P)


def _check_layouts(first: Grouped, *others: Grouped) -> None:
    if any(other.sizes.tolist() != first.sizes.tolist() for other in others):
        raise MooredError("success and tokens must be laid out like the rewards or advantages")


def _by_group(push_PG: np.ndarray, success_PG: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P,) push of each group, and whether all of its known outcomes are equal."""
    is_known_PG = np.isfinite(success_PG)
    won_P = (is_known_PG & (success_PG > 0.5)).sum(axis=1)
    is_free_P = (won_P == 0) | (won_P == is_known_PG.sum(axis=1))
    return np.where(is_known_PG, np.nan_to_num(push_PG), 0.0).sum(axis=1), is_free_P


def _share(push_P: np.ndarray, is_free_P: np.ndarray) -> float:
    total = float(push_P.sum())
    return float(push_P[is_free_P].sum()) / total if total > 0.0 else math.nan


def advise(
    rewards: ArrayLike,
    group_ids: GroupIds | None = None,
    *,
    success: ArrayLike | None = None,
    behaviours: Sequence[object] | None = None,
    success_reward: float | None = None,
    earned: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    divides: bool = True,
    update_share: float | None = None,
    rhos: Sequence[float] = RHO_GRID,
    min_groups: int = MIN_GROUPS,
    seed: int = 0,
) -> Advice:
    """Recommend for or against the filter from the rewards of one rollout batch.

    With `success`, or rewards from `success_reward` on, outcomes are known and count too: the
    outcome-free share of GRPO's advantages, of Dr. GRPO's with `divides=False`. `earned` are the
    rewards that advantages are made of, where they are not those that the filter scores; `tokens`
    the trained tokens of each trajectory. `update_share` is the share of the step time spent in the
    update (the part a filter saves).
    """
    if update_share is not None and not 0.0 <= update_share <= 1.0:
        raise MooredError(f"update_share must lie in [0, 1], got {update_share}")
    rv = reward_variance(rewards, group_ids)
    causes = triage(
        rewards, group_ids, success=success, behaviours=behaviours, success_reward=success_reward
    )
    pushed = group(rewards if earned is None else earned, group_ids)
    lengths = pushed if tokens is None else group(tokens, group_ids)
    if success is None and success_reward is not None:
        ended = _reached(group(rewards, group_ids), success_reward)
    else:
        ended = None if success is None else group(success, group_ids)
    free = None
    if ended is not None:
        _check_layouts(pushed, ended, lengths)
        tokens_PG = np.ones(pushed.values_PG.shape) if tokens is None else lengths.values_PG
        free = _outcome_free(pushed, ended.values_PG, tokens_PG, divides=divides, seed=seed)
    interval = rv.std_over_mean_interval(seed=seed)
    kept = {rho: rv.kept_fraction(rho) for rho in rhos}
    found = _decide(rv, interval, free, causes, min_groups)
    saved = None
    if update_share is not None:
        saved = {rho: update_share * (1.0 - fraction) for rho, fraction in kept.items()}
    return Advice(
        recommendation=found.recommendation,
        rho=DEFAULT_RHO if found.recommendation is Recommendation.FILTER else None,
        reasons=(*found.reasons, *causes.reasons),
        rv=rv,
        std_over_mean_interval=interval,
        outcome_free=free,
        groups_needed=found.groups_needed,
        kept_fraction=kept,
        step_time_saved=saved,
        triage=causes,
    )


def _reached(rewards: Grouped, success_reward: float) -> Grouped:
    values_PG = rewards.values_PG
    won_PG = np.where(np.isfinite(values_PG), values_PG >= success_reward, np.nan)
    return replace(rewards, values_PG=won_PG)


def _outcome_free(
    rewards: Grouped,
    success_PG: np.ndarray,
    tokens_PG: np.ndarray,
    *,
    divides: bool,
    seed: int,
) -> OutcomeFree | None:
    stats = moments(rewards)
    plain_PG = np.abs(stats.deviation_PG) * tokens_PG
    # As in `grpo`.
    divided_PG = plain_PG / (np.sqrt(stats.variance())[:, None] + 1e-6)
    ended_PG = np.where(np.isfinite(rewards.values_PG), success_PG, np.nan)
    plain_P, is_free_P = _by_group(plain_PG, ended_PG)
    divided_P, _ = _by_group(divided_PG, ended_PG)
    if not plain_P.any():
        return None
    return OutcomeFree(
        divided=_share(divided_P, is_free_P),
        plain=_share(plain_P, is_free_P),
        divides=divides,
        interval=_share_interval(divided_P if divides else plain_P, is_free_P, seed=seed),
        num_mixed=int(np.count_nonzero(~is_free_P)),
    )


def _share_interval(
    push_P: np.ndarray, is_free_P: np.ndarray, *, draws: int = 1000, seed: int
) -> tuple[float, float]:
    """95 % bootstrap interval over groups; draws in which nothing pushes are left out."""
    rng, shares = np.random.default_rng(seed), []
    for _ in range(draws):
        drawn = rng.integers(len(push_P), size=len(push_P))
        shares.append(_share(push_P[drawn], is_free_P[drawn]))
    low, high = np.nanquantile(shares, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its 95 % interval, and where that stands to the bar of the figure."""

    value: float
    low: float
    high: float
    bar: float

    def __str__(self) -> str:
        return f"{self.value:.2f} (95% interval {self.low:.2f} to {self.high:.2f})"

    @property
    def is_above(self) -> bool:
        return self.low > self.bar

    @property
    def is_below(self) -> bool:
        return self.high < self.bar

    def groups_needed(self, num_groups: int) -> float:
        """About as many would put the bar outside of the interval: its width goes as 1/sqrt."""
        gap = self.value - self.bar
        reach = self.value - self.low if gap > 0.0 else self.high - self.value
        return num_groups * (reach / gap) ** 2 if gap else math.inf


@dataclass(frozen=True, slots=True)
class _Decision:
    recommendation: Recommendation
    reasons: tuple[str, ...]
    groups_needed: int | None = None


def _decide(
    rv: RewardVariance,
    interval: tuple[float, float],
    free: OutcomeFree | None,
    causes: Triage,
    min_groups: int,
) -> _Decision:
    """The rule of docs/filtering.md, from top to bottom of its table."""
    num_groups = len(rv.known)
    if causes.share("reward_blind") > BLIND_ABOVE:
        reason = (
            f"{causes.share('reward_blind'):.0%} of the groups behave differently for the same "
            f"reward: a filter would hide a reward that cannot tell them apart"
        )
        return _Decision(Recommendation.FIX_REWARD, (reason,))
    if rv.mean == 0.0:
        reason = (
            f"no reward varies inside any of the {num_groups} groups: there is nothing to learn "
            f"from this batch, and nothing to filter"
        )
        return _Decision(Recommendation.NO_SIGNAL, (reason,))
    ratio = Figure(rv.std_over_mean, *interval, bar=HELPS_ABOVE)
    spread = f"Std/Mean of RV is {ratio}"
    if num_groups < min_groups:
        reason = f"{spread}: {num_groups} groups say too little; give at least {min_groups}"
        return _Decision(Recommendation.CANNOT_TELL, (reason,), min_groups)
    if free is not None and free.num_mixed == 0:
        return _Decision(Recommendation.CHANGE_TASKS, (_nothing_mixed(num_groups), spread))
    share = None if free is None else Figure(free.share, *free.interval, bar=FREE_ABOVE)
    about = () if free is None else (_about(free),)
    recommendation = recommend(ratio, share)
    if recommendation is Recommendation.FILTER:
        by_share = share is not None and share.is_above
        reason = f"{spread}: some groups carry the signal, others next to none"
        return _Decision(recommendation, (*about, spread) if by_share else (reason, *about))
    if recommendation is Recommendation.NO_FILTER:
        reason = f"{spread}: RV is spread evenly, so a filter would drop groups at random"
        return _Decision(recommendation, (reason, *about))
    needed = _groups_needed([ratio] if share is None else [ratio, share], num_groups)
    more = f"about {needed} would tell" if needed else "it lies too near to tell by more of them"
    reason = (
        f"{spread}, and filters pay above {HELPS_ABOVE:g}: {num_groups} groups cannot tell, {more}"
    )
    return _Decision(recommendation, (reason, *about), needed)


def recommend(ratio: Figure, share: Figure | None) -> Recommendation:
    """By Std/Mean of RV, and by the outcome-free share where it is known.

    Filter when one of them lies clearly above its bar, do not when all lie clearly below, and else
    there is no telling.
    """
    known = [ratio] if share is None else [ratio, share]
    if any(figure.is_above for figure in known):
        return Recommendation.FILTER
    if all(figure.is_below for figure in known):
        return Recommendation.NO_FILTER
    return Recommendation.CANNOT_TELL


def _about(free: OutcomeFree) -> str:
    low, high = free.interval
    figure = f"{free.share:.2f} (95% interval {low:.2f} to {high:.2f})"
    if not free.divides:
        return (
            f"outcome-free share {figure}: the part of the push that no success or failure decides"
        )
    return (
        f"outcome-free share {figure} where advantages are divided by the group's std, as in GRPO, "
        f"and {free.plain:.2f} where they are not: the part of the push in groups that hold no "
        f"success, or no failure"
    )


def _nothing_mixed(num_groups: int) -> str:
    most = 1.0 - 0.05 ** (1.0 / num_groups)
    return (
        f"none of {num_groups} groups holds both a success and a failure, so at most {most:.0%} of "
        f"such groups do (95% bound), and no filter finds them here"
    )


def _groups_needed(figures: Sequence[Figure], num_groups: int) -> int | None:
    """About as many as would decide: one figure above its bar, or all of them below."""
    open_ = [figure for figure in figures if not figure.is_below]
    above = [figure.groups_needed(num_groups) for figure in open_ if figure.value > figure.bar]
    below = [figure.groups_needed(num_groups) for figure in open_]
    needed = max(min(above) if above else max(below), num_groups + 1)
    if needed > MANY_GROUPS:
        return None
    rounded = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    return math.ceil(needed / rounded) * rounded
