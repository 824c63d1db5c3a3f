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
from moored.algo.snr import DEFAULT_RHO, HURTS_BELOW, Advice, Recommendation, advise
from moored.errors import MooredError

RHOS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOO_LOW_RHO = 0.6
"""RAGEN-2 reports that `top_p` hurts from here down."""
NOISE = 0.01
"""A group whose RV is not zero but at most this share of the largest carries only noise."""
MIN_KEPT_GROUPS = 4
"""Below this many groups per step an update rests on too few prompts, so refilling pays."""
MAX_REFILL = 5.0
"""Refilling pays up to this many times the rollouts: the first, and 4 by `filter.max_refills`."""
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
    action: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchAdvice:
    """Everything `moored advise` prints."""

    num_groups: int
    num_steps: int
    group_sizes: tuple[int, int]
    """Smallest and largest number of finite rewards in a group."""
    rv: RewardVariance
    std_over_mean_interval: tuple[float, float]
    histogram: Histogram
    effects: tuple[RhoEffect, ...]
    triage: Triage
    recommendation: Recommendation
    settings: FilterSettings | None
    """None when no filter is recommended."""
    reasons: tuple[str, ...]


def advise_batch(
    rewards: ArrayLike,
    group_ids: GroupIds,
    *,
    steps: ArrayLike | None = None,
    success: ArrayLike | None = None,
    behaviours: Sequence[object] | None = None,
    success_reward: float | None = None,
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
        update_share=update_share,
    )
    rv_P = plain.rv.variances
    settings = _settings(plain.recommendation, rv_P, steps_P)
    return BatchAdvice(
        num_groups=len(rv_P),
        num_steps=len(np.unique(steps_P)),
        group_sizes=(int(counts_P.min()), int(counts_P.max())),
        rv=plain.rv,
        std_over_mean_interval=plain.std_over_mean_interval,
        histogram=rv_histogram(rv_P),
        effects=tuple(_effect(rho, rv_P, steps_P, grouped.sizes, update_share) for rho in rhos),
        triage=plain.triage,
        recommendation=plain.recommendation,
        settings=settings,
        reasons=(
            *_filter_reasons(plain, settings, rv_P, steps_P),
            *_task_reasons(plain, int(np.median(counts_P))),
        ),
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


def _settings(
    recommendation: Recommendation, rv_P: np.ndarray, steps_P: np.ndarray
) -> FilterSettings | None:
    if recommendation not in (Recommendation.FILTER, Recommendation.TRY_FILTER):
        return None
    groups_per_step = len(rv_P) / len(np.unique(steps_P))
    noise, signal = _noise_and_signal(rv_P)
    if _spread(signal) <= HURTS_BELOW:
        rule, value, eps = "nonzero", 0.0, _gap(noise, signal)
    else:
        rule, value, eps = "top_p", DEFAULT_RHO, _noise_guard(noise, signal, groups_per_step)
    share = float(_kept(rv_P, steps_P, rule=rule, value=value, eps=eps).mean())
    is_thin = share * groups_per_step < MIN_KEPT_GROUPS
    action = "refill" if is_thin and share * MAX_REFILL >= 1.0 else "drop"
    return FilterSettings(rule=rule, value=value, eps=eps, action=action)


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


def _filter_reasons(
    plain: Advice, settings: FilterSettings | None, rv_P: np.ndarray, steps_P: np.ndarray
) -> list[str]:
    if settings is None:
        return [plain.reasons[0], *_without_filter(plain.recommendation, rv_P)]
    low, high = plain.std_over_mean_interval
    first = plain.reasons[0]
    if plain.recommendation is Recommendation.FILTER:
        first = (
            f"Std/Mean of RV is {plain.rv.std_over_mean:.2f} (95% interval {low:.2f} to "
            f"{high:.2f}): some groups carry the signal, others next to none"
        )
    return [first, *_rule_reasons(settings, rv_P), _action_reason(settings, rv_P, steps_P)]


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


def _action_reason(settings: FilterSettings, rv_P: np.ndarray, steps_P: np.ndarray) -> str:
    per_step = len(rv_P) / len(np.unique(steps_P))
    kept_P = _kept(rv_P, steps_P, rule=settings.rule, value=settings.value, eps=settings.eps)
    share = float(kept_P.mean())
    left = f"{share * per_step:.3g} of {per_step:.3g} groups per step remain"
    if share * per_step >= MIN_KEPT_GROUPS:
        return f"{left}: dropping the rest saves {1 - share:.0%} of the update; no refill is needed"
    if settings.action == "refill":
        return (
            f"{left}, fewer than {MIN_KEPT_GROUPS}: refill samples new prompts in place of the "
            f"rest, for about {1 / share:.1f} times the rollouts"
        )
    return (
        f"{left}, too few to refill (at most {MAX_REFILL:g} times the rollouts pay): a filter "
        f"cannot make up for these tasks; change them first"
    )


def _task_reasons(plain: Advice, group_size: int) -> list[str]:
    """What the causes of low RV say about tasks and rewards."""
    reasons = list(plain.reasons[1:])
    if plain.triage.share("too_easy") >= MANY:
        reasons.append("most groups succeed throughout: take harder tasks; no filter adds signal")
    if plain.triage.share("too_hard") >= MANY:
        chance = 1.0 - 0.05 ** (1.0 / group_size)
        reasons.append(
            f"most groups fail throughout: take easier tasks or larger groups; {group_size} "
            f"failures still allow a success rate of {chance:.0%} (95% bound)"
        )
    return reasons
