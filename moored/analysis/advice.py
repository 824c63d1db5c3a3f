"""What one rollout batch says about filtering: figures, causes, settings, and reasons for them.

Takes rewards by group; `moored.algo.advise` decides whether a filter pays, and this module says
which one, what it would save, and what to do where no filter helps. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.filters import select
from moored.algo.groups import GroupIds, group, moments
from moored.algo.snr import DEFAULT_RHO, FREE_ABOVE, Advice, Recommendation, advise
from moored.analysis.trend import Trend, trend_of
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

    plain: Advice
    """Of `moored.algo.advise`, over all groups together."""
    num_groups: int
    num_steps: int
    group_sizes: tuple[int, int]
    """Smallest and largest number of finite rewards in a group."""
    histogram: Histogram
    effects: tuple[RhoEffect, ...]
    headline: str
    """The recommendation in one sentence, which the reasons explain."""
    settings: FilterSettings | None
    """None when no filter is recommended."""
    reasons: tuple[str, ...]
    trend: Trend | None
    """None for too few steps."""


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
    if plain.recommendation is Recommendation.FILTER:
        settings, headline, reasons = _filter(plain, rv_P, steps_P)
    else:
        settings, headline, reasons = None, *_without_filter(plain, rv_P)
    # Of the groups that have an RV: where episodes end in errors, it is not the signal that falls.
    is_known_P, used = counts_P >= 2, settings or PLAIN_FILTER
    known = rv_P[is_known_P], steps_P[is_known_P]
    of_causes = len(plain.triage.reasons)
    return BatchAdvice(
        plain=plain,
        num_groups=len(rv_P),
        num_steps=len(np.unique(steps_P)),
        group_sizes=(int(counts_P.min()), int(counts_P.max())),
        histogram=rv_histogram(rv_P),
        effects=tuple(_effect(rho, rv_P, steps_P, grouped.sizes, update_share) for rho in rhos),
        headline=headline,
        settings=settings,
        reasons=(
            *plain.reasons[: len(plain.reasons) - of_causes],
            *reasons,
            *_task_reasons(plain, int(np.median(counts_P))),
        ),
        trend=trend_of(*known, _kept(*known, **asdict(used))),
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


def _without_filter(plain: Advice, rv_P: np.ndarray) -> tuple[str, list[str]]:
    """Headline, and reasons beyond those of `moored.algo.advise`."""
    num_groups, num_known = len(rv_P), len(plain.rv.known)
    match plain.recommendation:
        case Recommendation.FIX_REWARD:
            share = plain.triage.share("reward_blind")
            return f"Fix the reward first: in {share:.0%} of the groups it sees no difference", []
        case Recommendation.NO_SIGNAL:
            return f"Nothing to learn from: no reward varies inside any of {num_known} groups", []
        case Recommendation.CHANGE_TASKS:
            none = f"none of {num_known} groups holds both a success and a failure"
            return f"Change the tasks first: {none}", []
        case Recommendation.NO_FILTER:
            headline = "No filter: all groups carry about the same signal"
            num_zero = int(np.count_nonzero(rv_P == 0.0))
            if num_zero == 0:
                return headline, []
            return headline, [
                f"rule nonzero alone is safe: it drops the {num_zero} of {num_groups} groups that "
                f"have no variance at all, and no signal"
            ]
    named, verb = ("1 group", "is") if num_groups == 1 else (f"{num_groups} groups", "are")
    if num_known < num_groups:
        named, verb = f"{num_known} of {num_groups} groups with two rewards to compare", "are"
    if plain.groups_needed is None:
        return f"Cannot tell: {named} lie too near to where filters begin to pay", []
    return f"Cannot tell: {named} {verb} too few, about {plain.groups_needed} would do", []


def _filter(
    plain: Advice, rv_P: np.ndarray, steps_P: np.ndarray
) -> tuple[FilterSettings, str, list[str]]:
    """The filter, the headline, and reasons for the filter and what may stand in its place."""
    per_step = len(rv_P) / len(np.unique(steps_P))
    settings, reasons = _rule(rv_P, per_step)
    kept_P = _kept(rv_P, steps_P, **asdict(settings))
    share, mass = float(kept_P.mean()), float(rv_P[kept_P].sum() / rv_P.sum())
    reasons.append(
        f"{share * per_step:.3g} of {per_step:.3g} groups per step remain: dropping the rest saves "
        f"{1 - share:.0%} of the update"
    )
    if share * per_step < FEW_KEPT_GROUPS:
        more = ""
        if share * MOST_ROLLOUTS >= 1.0:
            more = f", or filter.action=refill, for about {1 / share:.1f} times the rollouts"
        reasons.append(f"an update then rests on few prompts: sample more of them a step{more}")
    free = plain.outcome_free
    if free is not None:
        reasons.append(
            f"{free.num_mixed} groups hold both a success and a failure: filter.reward=success "
            f"filter.rule=nonzero keeps just these"
        )
    headline = "Filter"
    if free is not None and free.divides and free.interval[0] > FREE_ABOVE > free.plain:
        headline = "Filter, or do not divide advantages by the group's std"
        reasons.append(
            "algorithm.advantage=dr_grpo leaves out the division: it protects about as well as the "
            "filter, and the two go together"
        )
    rule = settings.rule if settings.rule == "nonzero" else f"{settings.rule} {settings.value:g}"
    of_known = share * len(rv_P) / len(plain.rv.known)
    headline += f": {rule} keeps {of_known:.0%} of the groups and {mass:.0%} of the signal"
    for cause, remedy in {"too_hard": "easier", "too_easy": "harder"}.items():
        if plain.triage.share(cause) >= MANY:
            headline += f"; take {remedy} tasks too"
    return settings, headline, reasons


def _rule(rv_P: np.ndarray, groups_per_step: float) -> tuple[FilterSettings, list[str]]:
    """`nonzero` where groups with signal carry about as much each, else `top_p`; and why."""
    is_signal_P = rv_P > NOISE * rv_P.max()
    noise, signal = rv_P[(rv_P > 0.0) & ~is_signal_P], rv_P[is_signal_P]
    spread = float(signal.std() / signal.mean())
    among = f"(Std/Mean {spread:.2f} among the {len(signal)} of them)"
    if spread <= EVEN:
        # Between noise and signal, half way on a log scale.
        eps = float(f"{np.sqrt(noise.max() * signal.min()):.2g}") if len(noise) else 0.0
        settings = FilterSettings(rule="nonzero", value=0.0, eps=eps)
        why = (
            f"groups with signal carry about as much each {among}: top_p {DEFAULT_RHO} would drop "
            f"some of them at random, nonzero drops just the {len(rv_P) - len(signal)} others"
        )
        guard = f"eps {eps:g} lies between them and the others"
    else:
        # With it `top_p` keeps nothing of a step whose groups are all noise. Rounded up, or a step
        # with the largest noise would pass; 0 where it would drop a group with signal too.
        eps = float(f"{1.05 * DEFAULT_RHO * groups_per_step * noise.max(initial=0.0):.2g}")
        eps = eps if eps < signal.min() else 0.0
        settings = FilterSettings(rule="top_p", value=DEFAULT_RHO, eps=eps)
        why = (
            f"groups with signal differ in it {among}: top_p {DEFAULT_RHO} drops the faint ones "
            f"too; do not go to {TOO_LOW_RHO} or below, which costs signal"
        )
        guard = f"eps {eps:g} skips a step that has no others"
    if eps == 0.0:
        return settings, [why]
    faint = f"{len(noise)} groups vary, but by no more than {NOISE:.0%} of the largest RV"
    return settings, [why, f"{faint}: {guard}"]


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
