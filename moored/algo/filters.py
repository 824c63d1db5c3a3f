"""SNR-aware filtering: which groups an update uses.

Rewards (or scores) in, kept group indices out. Peers disagree on every detail of this filter, so
every detail has a name here: the score, the rule, what happens to zero scores, and ties. A rule is
a function of a `Ranking` that returns what to keep of it: a slice, a mask or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike

from moored.algo.groups import ROUNDING, GroupIds, group, group_scores, load_score, moments
from moored.errors import MooredError
from moored.names import LOSS_SCALES, RULES, check_name, check_rule_value
from moored.types import Selection


class SelectOptions(TypedDict, total=False):
    """Keyword arguments of `select_groups`."""

    score: str
    ddof: int
    rule: str
    value: float
    eps: float
    largest: bool
    keep_zero: bool


PRESETS: Mapping[str, SelectOptions] = MappingProxyType(
    {
        # RAGEN-2, section 4: mass of the reward variance.
        "paper": {"score": "variance", "ddof": 0, "rule": "top_p", "value": 0.9},
        # RAGEN's code: what it calls reward_variance is the sample std, and an absolute eps
        # lowers the target, so that a batch of tiny scores is dropped whole. Its guide and its runs
        # set rollout_filter_include_zero=False.
        "ragen": {"score": "std", "ddof": 1, "rule": "top_p", "value": 0.9, "eps": 0.01},
        "ragen_softmax": {"score": "std", "ddof": 1, "rule": "top_p_softmax", "value": 0.9},
        # DAPO's dynamic sampling: drop groups whose rewards are all equal.
        "dapo": {"score": "std", "ddof": 0, "rule": "nonzero"},
    }
)


def preset(name: str) -> SelectOptions:
    """Keyword arguments of `select_groups` that reproduce a published filter."""
    check_name("filter preset", name, tuple(PRESETS))
    return PRESETS[name].copy()


def check_filter(score: str, rule: str) -> None:
    """Import both, so that a wrong `module:attribute` fails before any work is done."""
    load_score(score)
    load_rule(rule)


def select_groups(
    rewards: ArrayLike,
    group_ids: GroupIds | None = None,
    *,
    score: str = "variance",
    ddof: int = 0,
    rule: str = "top_p",
    value: float = 0.9,
    eps: float = 0.0,
    largest: bool = True,
    keep_zero: bool = False,
) -> Selection:
    """Score each group and select groups by `rule`.

    `rewards` is (P, G), a list of rows, or flat with `group_ids`; it holds the quantity that
    the score is taken of: rewards for `variance`, `std` and `reward_mean`, tokens per trajectory
    for `length`, mean token entropy per trajectory for `entropy` and `entropy_std`. `score` and
    `rule` may also be `"module:attribute"`: functions as in `groups.py` and below.
    """
    grouped = group(rewards, group_ids)
    stats = moments(grouped)
    scores = group_scores(stats, score=score, ddof=ddof)
    kept = select(scores, rule=rule, value=value, eps=eps, largest=largest, keep_zero=keep_zero)
    return Selection(
        kept=kept,
        scores=scores,
        labels=grouped.labels,
        score=score,
        rule=rule,
        value=value,
        reward_stds=np.sqrt(stats.variance(1)) if load_score(score).quantity == "reward" else None,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ranking:
    """What a rule decides on: the candidates in order, and the options of the filter."""

    scores: np.ndarray
    """Scores of the candidates, best first; never empty."""
    value: float
    eps: float
    largest: bool
    """Is the largest score the best, or the smallest?"""
    num_groups: int
    """All groups, candidates or not."""


Rule = Callable[[Ranking], slice | np.ndarray]


@cache
def load_rule(name: str) -> Rule:
    """The rule of this name or `module:attribute`, looked up once in a process."""
    found = RULES.get_object(name)
    if not callable(found):
        raise MooredError(
            f"rule {name!r} is of type {type(found).__name__}; name a function of a "
            f"moored.algo.filters.Ranking"
        )
    return cast(Rule, found)


def select(
    scores: ArrayLike,
    *,
    rule: str = "top_p",
    value: float = 0.9,
    eps: float = 0.0,
    largest: bool = True,
    keep_zero: bool = False,
) -> np.ndarray:
    """Sorted indices of the groups that `rule` keeps.

    Candidates (all groups, or with `keep_zero=False` those whose score is not zero) are sorted by
    score, `largest` first or last, ties in their given order; the rule then keeps some of them.

    | rule | keeps | `value` |
    |---|---|---|
    | `top_p` | smallest prefix with cumulative score >= value * total - eps | mass, 0.9; 1: all |
    | `top_p_softmax` | smallest prefix with cumulative softmax(score) >= value | mass; 1: all |
    | `top_k` | floor(value * P) groups, at least 1 | fraction of all groups |
    | `top_k_count` | `value` groups | count |
    | `min_p` | score >= value * max (`largest=False`: score <= min / value) | fraction |
    | `nonzero` | score > eps | unused |
    | `quantile` | one quarter of the candidates, 1 = first in order | 1, 2, 3 or 4 |
    | `none` | every group | unused |
    """
    keep = load_rule(rule)
    scores_P = np.asarray(scores, dtype=np.float64)
    _check_scores(scores_P, rule, value, eps)
    takes_all = keep_zero or rule == "none"
    candidates = np.arange(len(scores_P)) if takes_all else np.flatnonzero(scores_P)
    if len(candidates) == 0:
        return candidates
    order = candidates[_ranked(scores_P[candidates], largest=largest)]
    ranking = Ranking(
        scores=scores_P[order], value=value, eps=eps, largest=largest, num_groups=len(scores_P)
    )
    return _kept(order, keep(ranking), rule)


def _ranked(scores: np.ndarray, *, largest: bool) -> np.ndarray:
    """Positions of the scores, best first; those that are equal up to rounding stay in order.

    The same rewards in another order add up to a variance whose last bit differs, and on another
    processor it may be the other one.
    """
    order = np.argsort(-scores if largest else scores, kind="stable")
    ordered = scores[order]
    size = np.maximum(np.abs(ordered[1:]), np.abs(ordered[:-1]))
    is_next = np.abs(np.diff(ordered)) > ROUNDING * size
    return order[np.lexsort((order, np.concatenate([[0], np.cumsum(is_next)])))]


def _kept(order: np.ndarray, chosen: slice | np.ndarray, rule: str) -> np.ndarray:
    """Sorted indices of the chosen groups; what a rule of the user returns is checked."""
    try:
        kept = np.sort(order[chosen])
    except (IndexError, TypeError, ValueError):
        kept = None
    if kept is None or kept.ndim != 1 or (np.diff(kept) == 0).any():
        raise MooredError(
            f"rule {rule!r} must return a slice, a mask or positions without repeats of the "
            f"{len(order)} candidates, got {chosen!r}"
        )
    return kept


def _check_scores(scores_P: np.ndarray, rule: str, value: float, eps: float) -> None:
    check_rule_value(rule, value)
    if scores_P.ndim != 1:
        raise MooredError(f"scores must be flat, one per group, got shape {scores_P.shape}")
    if not np.isfinite(scores_P).all():
        bad = int(np.flatnonzero(~np.isfinite(scores_P))[0])
        raise MooredError(f"scores must be finite, but group {bad} scores {scores_P[bad]}")
    if rule in ("top_p", "min_p") and scores_P.min(initial=0.0) < 0.0:
        raise MooredError(
            f"{rule} needs scores >= 0, got {scores_P.min():g}; use top_k or top_p_softmax"
        )
    if not eps >= 0.0:
        raise MooredError(f"eps must be >= 0, got {eps}")


def top_p(ranking: Ranking) -> slice:
    if ranking.value >= 1.0:
        return slice(None)
    mass = np.cumsum(ranking.scores)
    # A prefix that reaches its target up to rounding counts, else scaling all rewards by 3
    # could move the cut.
    return _reaching(mass, ranking.value * mass[-1] * (1.0 - ROUNDING) - ranking.eps)


def top_p_softmax(ranking: Ranking) -> slice:
    if ranking.value >= 1.0:
        return slice(None)
    logits = ranking.scores if ranking.largest else -ranking.scores
    odds = np.exp(logits - logits[0])
    return _reaching(np.cumsum(odds / odds.sum()), ranking.value * (1.0 - ROUNDING))


def _reaching(mass: np.ndarray, target: float) -> slice:
    """The smallest prefix whose mass reaches the target; nothing for a target of 0."""
    return slice(0, 0 if target <= 0.0 else int(np.searchsorted(mass, target)) + 1)


def top_k(ranking: Ranking) -> slice:
    return slice(0, max(1, int(ranking.value * ranking.num_groups + 1e-9)))


def top_k_count(ranking: Ranking) -> slice:
    return slice(0, int(ranking.value))


def min_p(ranking: Ranking) -> slice:
    ordered, value, best = ranking.scores, ranking.value, ranking.scores[0]
    if ranking.largest:
        return slice(0, int(np.count_nonzero(ordered >= value * best * (1.0 - ROUNDING))))
    # best <= 0 only with keep_zero: nothing but zeros is within a factor of zero.
    return slice(0, int(np.count_nonzero(value * ordered * (1.0 - ROUNDING) <= best)))


def nonzero(ranking: Ranking) -> slice:
    above = int(np.count_nonzero(ranking.scores > ranking.eps))
    num = len(ranking.scores)
    return slice(0, above) if ranking.largest else slice(num - above, None)


def quantile(ranking: Ranking) -> slice:
    edges = [round(len(ranking.scores) * quarter / 4) for quarter in range(5)]
    return slice(edges[int(ranking.value) - 1], edges[int(ranking.value)])


def none(_: Ranking) -> slice:
    return slice(None)


def select_trajectories(
    rewards: ArrayLike, group_ids: GroupIds | None = None, *, best: int, worst: int
) -> np.ndarray:
    """True for the `best` and `worst` finite rewards of each group, in the shape of `rewards`.

    The trajectory-level baseline. Ties keep the earlier trajectory, and one that is among the best
    is not counted among the worst: a group keeps exactly `best + worst`, or all if it has no more.
    """
    if best < 0 or worst < 0 or best + worst == 0:
        raise MooredError(
            f"best and worst must be >= 0 and not both 0, got best={best}, worst={worst}"
        )
    grouped = group(rewards, group_ids)
    finite = np.isfinite(grouped.values_PG)
    is_best = _ranks(np.where(finite, -grouped.values_PG, np.inf)) < best
    is_worst = _ranks(np.where(finite & ~is_best, grouped.values_PG, np.inf)) < worst
    return grouped.ungroup(finite & (is_best | is_worst))


def _ranks(keys_PG: np.ndarray) -> np.ndarray:
    order = np.argsort(keys_PG, axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable")


def loss_scale(kept_fraction: float, mode: str = "none") -> float:
    """Factor on the loss of a filtered update: 1, the kept fraction, or its square root."""
    check_name("loss scale", mode, LOSS_SCALES)
    if not 0.0 <= kept_fraction <= 1.0:
        raise MooredError(f"kept_fraction must lie in [0, 1], got {kept_fraction}")
    return {"none": 1.0, "linear": kept_fraction, "sqrt": kept_fraction**0.5}[mode]


@dataclass(frozen=True, slots=True, eq=False)
class RewardVariance:
    """How reward variance is spread over the groups of one batch."""

    variances: np.ndarray
    """(P,) population variance of the rewards in each group; 0 with fewer than two rewards."""
    is_known: np.ndarray | None = None
    """(P,) groups with two rewards or more, of which the figures below are; None: all."""

    @property
    def known(self) -> np.ndarray:
        """Variances of the groups that have one."""
        return self.variances if self.is_known is None else self.variances[self.is_known]

    @property
    def mean(self) -> float:
        """0 when no group has a variance."""
        return float(self.known.mean()) if len(self.known) else 0.0

    @property
    def std(self) -> float:
        return float(self.known.std()) if len(self.known) else 0.0

    @property
    def std_over_mean(self) -> float:
        """Std(RV) / Mean(RV): high when RV is bimodal. 0 when no group has any variance."""
        return self.std / self.mean if self.mean > 0.0 else 0.0

    @property
    def zero_fraction(self) -> float:
        return float(np.mean(self.known == 0.0)) if len(self.known) else 0.0

    def kept_fraction(self, rho: float) -> float:
        """Share of all groups that `top_p` with this mass keeps."""
        return len(select(self.variances, rule="top_p", value=rho)) / len(self.variances)

    def std_over_mean_interval(
        self, *, draws: int = 1000, level: float = 0.95, seed: int = 0
    ) -> tuple[float, float]:
        """Bootstrap interval over groups: with 8 groups the ratio is a rough number.

        A draw in which no group varies has no ratio and is left out.
        """
        rng = np.random.default_rng(seed)
        known, ratio = self.known, np.full(draws, np.nan)
        if self.mean == 0.0:
            return 0.0, 0.0
        # One draw at a time: all at once would need draws x groups numbers.
        for draw in range(draws):
            sample = known[rng.integers(len(known), size=len(known))]
            mean = sample.mean()
            if mean > 0.0:
                ratio[draw] = sample.std() / mean
        low, high = np.nanquantile(ratio, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def reward_variance(rewards: ArrayLike, group_ids: GroupIds | None = None) -> RewardVariance:
    """RV of each group; `rewards` is (P, G), a list of rows, or flat with `group_ids`."""
    grouped = group(rewards, group_ids)
    if len(grouped.labels) == 0:
        raise MooredError("reward_variance needs at least one group, got none")
    stats = moments(grouped)
    return RewardVariance(stats.variance(0), stats.count_P >= 2)
