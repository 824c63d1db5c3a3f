"""What one rollout batch says about filtering: figures, causes, settings, and reasons for them.

Takes rewards by group; `moored.algo.advise` decides whether a filter pays, and this module says
which one, what it would save, and what to do where no filter helps. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.causes import Triage
from moored.algo.filters import RewardVariance, select
from moored.algo.groups import GroupIds, group, moments
from moored.algo.snr import (
    DEFAULT_RHO,
    FREE_ABOVE,
    Advice,
    OutcomeFree,
    Recommendation,
    advise,
)
from moored.analysis.trend import MIN_TREND_STEPS, Trend, trend_of
from moored.errors import MooredError

RHOS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOO_LOW_RHO = 0.6
"""RAGEN-2 reports that `top_p` hurts from here down."""
NOISE = 0.01
"""A group whose RV is not zero but at most this share of the largest carries only noise."""
EVEN = 0.5
"""Std/Mean up to which groups with signal carry about as much each."""
FEW_KEPT_GROUPS = 4
"""Below this many groups per step an update rests on few prompts."""
MOST_ROLLOUTS = 5.0
"""Times the rollouts that refilling may take: the first, and 4 by `filter.max_refills`."""
MANY = 0.5
"""Share of too easy or too hard groups from which the tasks should change."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """RV over groups: exact zeros apart, then bins of equal width up to the largest."""

    num_zero: int
    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RhoEffect:
    """What `top_p` with mass `rho` would do to this batch, step by step."""

    rho: float
    kept_fraction: float
    """Share of the groups."""
    kept_mass: float
    """Share of the reward variance; a little above rho, because groups are kept whole."""
    update_saved: float
    """Share of the trajectories that is not trained on; about the share of update time saved."""
    step_saved: float | None
    """Share of the step's time; None when the update's share of it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    """Options of `filter` in a configuration, and of `moored.algo.select_groups`."""

    rule: str
    value: float
    eps: float


PLAIN_FILTER = FilterSettings(rule="top_p", value=DEFAULT_RHO, eps=0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchAdvice:
    """Everything `moored advise` prints."""

    num_groups: int
    num_steps: int
    group_sizes: tuple[int, int]
    """Smallest and largest number of finite rewards in a group."""
    rv: RewardVariance
    std_over_mean_interval: tuple[float, float]
    outcome_free: OutcomeFree | None
    """None where outcomes are not known."""
    groups_needed: int | None
    """About as many as would tell, where the advice cannot."""
    histogram: Histogram
    effects: tuple[RhoEffect, ...]
    triage: Triage
    recommendation: Recommendation
    headline: str
    """The recommendation in one sentence, which the reasons explain."""
    settings: FilterSettings | None
    """None when no filter is recommended."""
    reasons: tuple[str, ...]
    trend: Trend | None
    """None for fewer than `MIN_TREND_STEPS` steps."""


def advise_batch(
    rewards: ArrayLike,
    group_ids: GroupIds,
    *,
    steps: ArrayLike | None = None,
    success: ArrayLike | None = None,
    behaviours: Sequence[object] | None = None,
    success_reward: float | None = None,
    earned: ArrayLike | None = None,
    divides: bool = True,
    update_share: float | None = None,
    rhos: Sequence[float] = RHOS,
) -> BatchAdvice:
    """Advice on flat `rewards` with their `group_ids`; `steps` (P,) is the step of each group.

    Filters work on one step at a time, so their effect is counted within steps; everything else is
    over all groups together. The other arguments are those of `moored.algo.advise`.
    """
    grouped = group(rewards, group_ids)
    counts_P = moments(grouped).count_P
    steps_P = np.zeros(len(counts_P), dtype=int) if steps is None else np.asarray(steps)
    _check(counts_P, steps_P)
    plain = advise(
        rewards,
        group_ids,
        success=success,
        behaviours=behaviours,
        success_reward=success_reward,
        earned=earned,
        divides=divides,
        update_share=update_share,
    )
    rv_P = plain.rv.variances
    decision = _decide(plain, rv_P, steps_P)
    return BatchAdvice(
        num_groups=len(rv_P),
        num_steps=len(np.unique(steps_P)),
        group_sizes=(int(counts_P.min()), int(counts_P.max())),
        rv=plain.rv,
        std_over_mean_interval=plain.std_over_mean_interval,
        outcome_free=plain.outcome_free,
        groups_needed=plain.groups_needed,
        histogram=rv_histogram(rv_P),
        effects=tuple(_effect(rho, rv_P, steps_P, grouped.sizes, update_share) for rho in rhos),
        triage=plain.triage,
        recommendation=decision.recommendation,
        headline=_headline(decision, plain, rv_P),
        settings=decision.settings,
        reasons=(*decision.reasons, *_task_reasons(plain, int(np.median(counts_P)))),
        trend=find_trend(rv_P, steps_P, decision.settings or PLAIN_FILTER, counts_P >= 2),
    )


def _check(counts_P: np.ndarray, steps_P: np.ndarray) -> None:
    if len(counts_P) == 0:
        raise MooredError("advice needs rewards, got none")
    if steps_P.shape != counts_P.shape:
        raise MooredError(
            f"steps must hold one entry per group, got {steps_P.shape} for {len(counts_P)} groups"
        )
    if counts_P.max() < 2:
        raise MooredError(
            f"none of the {len(counts_P)} groups has two rewards to compare; give all trajectories "
            f"of a prompt the same group, and sample each prompt several times"
        )


def rv_histogram(rv_P: np.ndarray, bins: int = 8) -> Histogram:
    """Count the groups by RV; a batch without any variance has no bins."""
    positive = rv_P[rv_P > 0.0]
    num_zero = len(rv_P) - len(positive)
    if len(positive) == 0:
        return Histogram(num_zero, np.zeros(1), np.zeros(0, dtype=int))
    counts, edges = np.histogram(positive, bins=bins, range=(0.0, float(positive.max())))
    return Histogram(num_zero, edges, counts)


def _kept(rv_P: np.ndarray, steps_P: np.ndarray, **rule: float | str) -> np.ndarray:
    """(P,) groups that a rule keeps when it looks at one step at a time."""
    kept_P = np.zeros(len(rv_P), dtype=bool)
    for step in np.unique(steps_P):
        here = np.flatnonzero(steps_P == step)
        kept_P[here[select(rv_P[here], **rule)]] = True  # pyright: ignore[reportArgumentType]
    return kept_P


def find_trend(
    rv_P: np.ndarray, steps_P: np.ndarray, settings: FilterSettings, is_known_P: np.ndarray
) -> Trend | None:
    """How RV, and the share of groups that the filter keeps, change over the steps.

    Of the groups that have an RV: where episodes end in errors, it is not the signal that falls.
    """
    rv_P, steps_P = rv_P[is_known_P], steps_P[is_known_P]
    rule = {"rule": settings.rule, "value": settings.value, "eps": settings.eps}
    kept_P = _kept(rv_P, steps_P, **rule)
    steps_S = np.unique(steps_P)
    if len(steps_S) < MIN_TREND_STEPS:
        return None
    members = [steps_P == step for step in steps_S]
    rv_S = np.array([rv_P[member].mean() for member in members])
    return trend_of(steps_S, rv_S, np.array([kept_P[member].mean() for member in members]))


def _effect(
    rho: float,
    rv_P: np.ndarray,
    steps_P: np.ndarray,
    sizes_P: np.ndarray,
    update_share: float | None,
) -> RhoEffect:
    kept_P = _kept(rv_P, steps_P, rule="top_p", value=rho)
    saved = 1.0 - float(sizes_P[kept_P].sum() / sizes_P.sum())
    total = float(rv_P.sum())
    return RhoEffect(
        rho=rho,
        kept_fraction=float(kept_P.mean()),
        kept_mass=float(rv_P[kept_P].sum()) / total if total > 0.0 else 0.0,
        update_saved=saved,
        step_saved=None if update_share is None else update_share * saved,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What to do, with which filter, and why."""

    recommendation: Recommendation
    settings: FilterSettings | None
    reasons: tuple[str, ...]
    kept: _Kept | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a filter leaves."""

    share: float
    """Of the groups."""
    mass: float
    """Of the reward variance."""
    groups_per_step: float
    """Before filtering."""

    @property
    def per_step(self) -> float:
        return self.share * self.groups_per_step


def _decide(plain: Advice, rv_P: np.ndarray, steps_P: np.ndarray) -> _Decision:
    """The recommendation of `moored.algo.advise`, with the filter's settings where it is one."""
    if plain.recommendation is not Recommendation.FILTER:
        return _Decision(
            recommendation=plain.recommendation,
            settings=None,
            reasons=(*_first(plain), *_without_filter(plain.recommendation, rv_P)),
        )
    settings = _rule(rv_P, steps_P)
    kept = _left_by(settings, rv_P, steps_P)
    return _Decision(
        recommendation=plain.recommendation,
        settings=settings,
        reasons=(*_first(plain), *_rule_reasons(settings, rv_P), *_remedies(plain, kept)),
        kept=kept,
    )


def _first(plain: Advice) -> tuple[str, ...]:
    """The reasons of the decision, without those of the causes."""
    return plain.reasons[: len(plain.reasons) - len(plain.triage.reasons)]


def _headline(decision: _Decision, plain: Advice, rv_P: np.ndarray) -> str:
    kept, settings, num_known = decision.kept, decision.settings, len(plain.rv.known)
    match decision.recommendation:
        case Recommendation.FIX_REWARD:
            share = plain.triage.share("reward_blind")
            return f"Fix the reward first: in {share:.0%} of the groups it sees no difference"
        case Recommendation.NO_SIGNAL:
            return f"Nothing to learn from: no reward varies inside any of {num_known} groups"
        case Recommendation.CANNOT_TELL:
            return f"Cannot tell: {_too_few(plain, len(rv_P))}"
        case Recommendation.NO_FILTER:
            return "No filter: all groups carry about the same signal"
        case Recommendation.CHANGE_TASKS:
            return (
                f"Change the tasks first: none of {num_known} groups holds both a success and a "
                f"failure"
            )
    assert kept is not None and settings is not None
    rule = settings.rule if settings.rule == "nonzero" else f"{settings.rule} {settings.value:g}"
    share = kept.share * len(rv_P) / num_known
    found = f"{rule} keeps {share:.0%} of the groups and {kept.mass:.0%} of the signal"
    for cause, remedy in {"too_hard": "easier", "too_easy": "harder"}.items():
        if plain.triage.share(cause) >= MANY:
            found += f"; take {remedy} tasks too"
    if _may_leave_out_division(plain):
        return f"Filter, or do not divide advantages by the group's std: {found}"
    return f"Filter: {found}"


def _may_leave_out_division(plain: Advice) -> bool:
    free = plain.outcome_free
    return free is not None and free.divides and free.interval[0] > FREE_ABOVE > free.plain


def _too_few(plain: Advice, num_groups: int) -> str:
    num_known, needed = len(plain.rv.known), plain.groups_needed
    of = f"{num_known} of {num_groups} groups with two rewards to compare"
    named = (
        of if num_known < num_groups else "1 group" if num_groups == 1 else f"{num_groups} groups"
    )
    if needed is None:
        return f"{named} lie too near to where filters begin to pay"
    verb = "is" if named == "1 group" else "are"
    return f"{named} {verb} too few, about {needed} would do"


def _rule(rv_P: np.ndarray, steps_P: np.ndarray) -> FilterSettings:
    groups_per_step = len(rv_P) / len(np.unique(steps_P))
    noise, signal = _noise_and_signal(rv_P)
    if _spread(signal) <= EVEN:
        rule, value, eps = "nonzero", 0.0, _gap(noise, signal)
    else:
        rule, value, eps = "top_p", DEFAULT_RHO, _noise_guard(noise, signal, groups_per_step)
    return FilterSettings(rule=rule, value=value, eps=eps)


def _left_by(settings: FilterSettings, rv_P: np.ndarray, steps_P: np.ndarray) -> _Kept:
    kept_P = _kept(rv_P, steps_P, rule=settings.rule, value=settings.value, eps=settings.eps)
    mass = float(rv_P[kept_P].sum() / rv_P.sum())
    return _Kept(float(kept_P.mean()), mass, len(rv_P) / len(np.unique(steps_P)))


def _noise_and_signal(rv_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    is_signal = rv_P > NOISE * rv_P.max()
    return rv_P[(rv_P > 0.0) & ~is_signal], rv_P[is_signal]


def _spread(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def _gap(noise: np.ndarray, signal: np.ndarray) -> float:
    """A threshold for `nonzero` between noise and signal, half way on a log scale."""
    return float(f"{np.sqrt(noise.max() * signal.min()):.2g}") if len(noise) else 0.0


def _noise_guard(noise: np.ndarray, signal: np.ndarray, groups_per_step: float) -> float:
    """`eps` with which `top_p` keeps nothing of a step whose groups are all noise.

    0 when it would be as large as a group with signal, which `top_p` would then drop.
    """
    # Rounded up, or a step with the largest noise would pass.
    guard = float(f"{1.05 * DEFAULT_RHO * groups_per_step * noise.max(initial=0.0):.2g}")
    return guard if guard < signal.min() else 0.0


def _without_filter(recommendation: Recommendation, rv_P: np.ndarray) -> list[str]:
    num_zero = int(np.count_nonzero(rv_P == 0.0))
    if recommendation is not Recommendation.NO_FILTER or num_zero == 0:
        return []
    return [
        f"rule nonzero alone is safe: it drops the {num_zero} of {len(rv_P)} groups that have no "
        f"variance at all, and no signal"
    ]


def _rule_reasons(settings: FilterSettings, rv_P: np.ndarray) -> list[str]:
    noise, signal = _noise_and_signal(rv_P)
    among = f"(Std/Mean {_spread(signal):.2f} among the {len(signal)} of them)"
    faint = f"{len(noise)} groups vary, but by no more than {NOISE:.0%} of the largest RV"
    if settings.rule == "nonzero":
        reasons = [
            f"groups with signal carry about as much each {among}: top_p {DEFAULT_RHO} would drop "
            f"some of them at random, nonzero drops just the {len(rv_P) - len(signal)} others"
        ]
        guard = f"{faint}: eps {settings.eps:g} lies between them and the others"
    else:
        reasons = [
            f"groups with signal differ in it {among}: top_p {settings.value} drops the faint ones "
            f"too; do not go to {TOO_LOW_RHO} or below, which costs signal"
        ]
        guard = f"{faint}: eps {settings.eps:g} skips a step that has no others"
    return [*reasons, guard] if settings.eps > 0.0 else reasons


def _remedies(plain: Advice, kept: _Kept) -> list[str]:
    """What the filter leaves and saves, and what may stand in its place."""
    saved, free = 1 - kept.share, plain.outcome_free
    reasons = [
        f"{kept.per_step:.3g} of {kept.groups_per_step:.3g} groups per step remain: dropping the "
        f"rest saves {saved:.0%} of the update"
    ]
    if kept.per_step < FEW_KEPT_GROUPS:
        more = ""
        if kept.share * MOST_ROLLOUTS >= 1.0:
            times = f"{1 / kept.share:.1f}"
            more = f", or filter.action=refill, for about {times} times the rollouts"
        reasons.append(f"an update then rests on few prompts: sample more of them a step{more}")
    if free is not None:
        reasons.append(
            f"{free.num_mixed} groups hold both a success and a failure: filter.reward=success "
            f"filter.rule=nonzero keeps just these"
        )
    if _may_leave_out_division(plain):
        reasons.append(
            "algorithm.advantage=dr_grpo leaves out the division: it protects about as well as the "
            "filter, and the two go together"
        )
    return reasons


def _task_reasons(plain: Advice, group_size: int) -> list[str]:
    """What the causes of low RV say about tasks and rewards."""
    reasons = list(plain.triage.reasons)
    if plain.triage.share("too_easy") >= MANY:
        reasons.append("most groups succeed throughout: take harder tasks, which add signal")
    if plain.triage.share("too_hard") >= MANY:
        chance = 1.0 - 0.05 ** (1.0 / group_size)
        reasons.append(
            f"most groups fail throughout: take easier tasks or larger groups; {group_size} "
            f"failures still allow a success rate of {chance:.0%} (95% bound)"
        )
    return reasons
