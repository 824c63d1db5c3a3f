"""Selection rules: which of the ranked groups are kept.

A rule is a function of a `Ranking` that returns what to keep of it: a slice, a mask or positions.
`select` in `filters.py` ranks the groups and has the table of all built-in rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from moored.algo.groups import ROUNDING
from moored.errors import MooredError
from moored.names import RULES


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


def load_rule(name: str) -> Rule:
    """The rule of this name or `module:attribute`."""
    found = RULES.get_object(name)
    if not callable(found):
        raise MooredError(
            f"rule {name!r} is of type {type(found).__name__}; name a function of a "
            f"moored.algo.rules.Ranking"
        )
    return cast(Rule, found)


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
