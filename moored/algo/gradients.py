"""Gradients by reward variance: rank groups by RV, cut them into buckets, compare what they push.

Works on inner products of gradients, never on the gradients: norms, noise, cosines and jackknife
intervals are all functions of them. The gradients of the groups add up to that of one update.
Shape legend: T terms of the loss, P groups, n groups of one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moored.errors import MooredError

TASK = "task"
Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles for 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFigures:
    """The gradient of one term of the loss over the groups of a bucket; NaN is not known."""

    norm: float
    """Of the mean gradient per token: as if the bucket's tokens were all tokens of the update."""
    norm_interval: Interval
    """95 %, by leaving out one group at a time."""
    noise: float
    """Standard error of that mean: the root of the trace of its covariance over groups."""
    signal: float
    """sqrt(norm² - noise²), or 0: the norm without what noise alone adds to it."""
    snr: float
    """norm / noise; noise alone gives about 1. The paper's SNR is `task_over_regulariser`."""
    snr_interval: Interval
    norm_per_sample: float
    """The norm with trajectories for tokens: as if the bucket's were all of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Groups of similar reward variance."""

    rv_low: float
    rv_high: float
    rv_mean: float
    num_groups: int
    num_tokens: int
    """Sampled tokens, those that the loss is taken of."""
    terms: dict[str, TermFigures]
    cosines: dict[str, float]
    """`task_kl`, `task_entropy`; `task_with_whole`: of the bucket's task gradient with that of all
    groups; `task_with_rest`: with that of all other groups, where noise alone gives 0."""
    task_over_regulariser: float
    """Norm of the task gradient over that of all other terms together, which the paper calls SNR;
    NaN without another term, or where their sum is 0."""
    task_over_regulariser_interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Buckets from the lowest RV to the highest, and all groups together."""

    buckets: list[Bucket]
    whole: Bucket


def rank_buckets(rv: ArrayLike, num_buckets: int) -> list[np.ndarray]:
    """Indices of the groups of each bucket, lowest RV first; sizes differ by at most one."""
    rv_P = np.asarray(rv, dtype=np.float64)
    if not 1 <= num_buckets <= len(rv_P):
        raise MooredError(
            f"{len(rv_P)} groups cannot be cut into {num_buckets} buckets; take more groups, or "
            f"fewer buckets"
        )
    return np.array_split(np.argsort(rv_P, kind="stable"), num_buckets)


def decompose(
    products_TPTP: np.ndarray,
    terms: Sequence[str],
    *,
    rv: ArrayLike,
    num_tokens: ArrayLike,
    num_samples: ArrayLike,
    num_buckets: int,
) -> Decomposition:
    """Figures of each bucket from the inner products of gradients of terms and groups.

    `num_tokens` and `num_samples` (P,) count the sampled tokens and the trajectories of each group.
    """
    batch = _Batch(
        np.asarray(products_TPTP, dtype=np.float64),
        tuple(terms),
        np.asarray(rv, dtype=np.float64),
        np.asarray(num_tokens, dtype=np.float64),
        np.asarray(num_samples, dtype=np.float64),
    )
    return Decomposition(
        buckets=[batch.bucket(members) for members in rank_buckets(batch.rv_P, num_buckets)],
        whole=batch.bucket(np.arange(len(batch.rv_P))),
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    products_TPTP: np.ndarray
    terms: tuple[str, ...]
    rv_P: np.ndarray
    tokens_P: np.ndarray
    samples_P: np.ndarray

    def bucket(self, members: np.ndarray) -> Bucket:
        rv_n = self.rv_P[members]
        ratio, interval = self._task_over_regulariser(members)
        return Bucket(
            rv_low=float(rv_n.min()),
            rv_high=float(rv_n.max()),
            rv_mean=float(rv_n.mean()),
            num_groups=len(members),
            num_tokens=int(self.tokens_P[members].sum()),
            terms={term: self._figures(term, members) for term in self.terms},
            cosines=self._cosines(members),
            task_over_regulariser=ratio,
            task_over_regulariser_interval=interval,
        )

    def _figures(self, term: str, members: np.ndarray) -> TermFigures:
        inner_nn = self._inner(term, term, members, members)
        tokens_n = self.tokens_P[members]
        all_tokens, all_samples = self.tokens_P.sum(), self.samples_P.sum()
        sums = _Sums.of(inner_nn)
        left_out = _Sums.without_each(inner_nn)
        tokens, tokens_left_n = tokens_n.sum(), tokens_n.sum() - tokens_n
        norm, noise = sums.norm, sums.noise
        return TermFigures(
            norm=float(_ratio(norm * all_tokens, tokens)),
            norm_interval=_jackknife(
                _ratio(norm * all_tokens, tokens), _ratio(left_out.norm * all_tokens, tokens_left_n)
            ),
            noise=float(_ratio(noise * all_tokens, tokens)),
            signal=float(_ratio(np.sqrt(np.maximum(norm**2 - noise**2, 0.0)) * all_tokens, tokens)),
            snr=float(_ratio(norm, noise)),
            snr_interval=_jackknife(_ratio(norm, noise), _ratio(left_out.norm, left_out.noise)),
            norm_per_sample=float(_ratio(norm * all_samples, self.samples_P[members].sum())),
        )

    def _task_over_regulariser(self, members: np.ndarray) -> tuple[float, Interval]:
        others = [term for term in self.terms if term != TASK]
        if TASK not in self.terms or not others:
            return math.nan, NO_INTERVAL
        task_nn = self._inner(TASK, TASK, members, members)
        # The square of a sum of gradients is the sum of all their products.
        products = [self._inner(a, b, members, members) for a in others for b in others]
        other_nn = np.sum(products, axis=0)
        ratio = _ratio(_Sums.of(task_nn).norm, _Sums.of(other_nn).norm)
        left_out = [_Sums.without_each(inner_nn).norm for inner_nn in (task_nn, other_nn)]
        return float(ratio), _jackknife(ratio, _ratio(*left_out))

    def _cosines(self, members: np.ndarray) -> dict[str, float]:
        if TASK not in self.terms:
            return {}
        everyone = np.arange(len(self.rv_P))
        rest = np.setdiff1d(everyone, members)
        found = {
            f"{TASK}_{term}": self._cosine(TASK, members, term, members)
            for term in self.terms
            if term != TASK
        }
        found[f"{TASK}_with_whole"] = self._cosine(TASK, members, TASK, everyone)
        found[f"{TASK}_with_rest"] = self._cosine(TASK, members, TASK, rest)
        return found

    def _cosine(self, term: str, members: np.ndarray, other: str, others: np.ndarray) -> float:
        dot = self._inner(term, other, members, others).sum()
        squares = self._inner(term, term, members, members).sum()
        squares *= self._inner(other, other, others, others).sum()
        return float(np.clip(dot / math.sqrt(squares), -1.0, 1.0)) if squares > 0.0 else math.nan

    def _inner(self, term: str, other: str, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        products_PP = self.products_TPTP[self.terms.index(term), :, self.terms.index(other), :]
        return products_PP[np.ix_(rows, columns)]


@dataclass(frozen=True, slots=True)
class _Sums:
    """The sum of some gradients: its square, that of each added up, and how many there are."""

    square: np.ndarray
    each: np.ndarray
    count: int

    @classmethod
    def of(cls, inner_nn: np.ndarray) -> _Sums:
        return cls(inner_nn.sum(), np.trace(inner_nn), len(inner_nn))

    @classmethod
    def without_each(cls, inner_nn: np.ndarray) -> _Sums:
        """(n,) sums that leave out one gradient."""
        own_n = np.diagonal(inner_nn)
        square_n = inner_nn.sum() - 2.0 * inner_nn.sum(axis=1) + own_n
        return cls(square_n, own_n.sum() - own_n, len(inner_nn) - 1)

    @property
    def norm(self) -> np.ndarray:
        return np.sqrt(np.maximum(self.square, 0.0))

    @property
    def noise(self) -> np.ndarray:
        """Standard error of the sum: sqrt(n tr Cov); NaN for a single gradient."""
        if self.count < 2:
            return np.full(np.shape(self.square), np.nan)
        trace = (self.each - self.square / self.count) / (self.count - 1)
        return np.sqrt(np.maximum(self.count * trace, 0.0))


def _ratio(above: ArrayLike, below: ArrayLike) -> np.ndarray:
    """NaN where the denominator is 0."""
    above, below = np.broadcast_arrays(np.asarray(above, float), np.asarray(below, float))
    return np.divide(above, below, out=np.full(below.shape, np.nan), where=below != 0.0)


def _jackknife(value: np.ndarray, without_n: np.ndarray) -> Interval:
    """95 % interval of a figure that is not negative, from its values without one group each."""
    count = len(without_n)
    if count < 2 or not np.isfinite(without_n).all() or not np.isfinite(value):
        return NO_INTERVAL
    spread = math.sqrt((count - 1) / count * ((without_n - without_n.mean()) ** 2).sum())
    half = _student_t(count - 1) * spread
    return max(0.0, float(value) - half), float(value) + half


def _student_t(degrees: int) -> float:
    if degrees <= len(STUDENT_T):
        return STUDENT_T[degrees - 1]
    # Cornish-Fisher: right to 0.1 % from 11 degrees of freedom.
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
