"""The quantities computed from a cross-scoring matrix, and their uncertainty.

For each row: likelihood gains and retrieval. For means over rows: bootstrap intervals and
permutation p-values. Shape legend: M reasonings, N prompts, B draws. `columns_M` is the prompt
each reasoning was written for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moored.errors import MooredError, TooFewPromptsError

MAX_ELEMENTS = 1 << 22
"""Bound on the size of one resampled block."""


@dataclass(frozen=True, slots=True, eq=False)
class Likelihood:
    """Matched and marginal log-likelihood of each reasoning, per token or per sequence."""

    logp_MN: np.ndarray
    columns_M: np.ndarray
    matched_M: np.ndarray
    """log-likelihood under the reasoning's own prompt."""
    marginal_M: np.ndarray
    """log-likelihood under a uniform mixture of all N prompts."""

    @classmethod
    def of(cls, logp_MN: np.ndarray, columns_M: np.ndarray) -> Likelihood:
        matched_M = logp_MN[np.arange(len(columns_M)), columns_M]
        return cls(logp_MN, columns_M, matched_M, log_mean_exp(logp_MN))

    @property
    def gain_M(self) -> np.ndarray:
        """How much likelier each reasoning is under its own prompt; its mean is the MI."""
        return self.matched_M - self.marginal_M

    @property
    def gain_if_MN(self) -> np.ndarray:
        """Gain that reasoning m would have if prompt j were its own."""
        return self.logp_MN - self.marginal_M[:, None]

    def gain_without_MN(self) -> np.ndarray:
        """Gain of reasoning m when prompt j is left out of the mixture; j = columns_M is void."""
        num_prompts = self.logp_MN.shape[1]
        rows = np.arange(len(self.logp_MN))
        top_M = self.logp_MN.argmax(axis=1)
        peak_M = self.logp_MN[rows, top_M]
        odds_MN = np.exp(self.logp_MN - peak_M[:, None])
        # Taking the peak out of a sum by subtraction would leave rounding noise: sum the others.
        with np.errstate(divide="ignore"):
            rest_MN = np.log(np.maximum(odds_MN.sum(axis=1, keepdims=True) - odds_MN, 0.0))
        others_MN = self.logp_MN.copy()
        others_MN[rows, top_M] = -np.inf
        rest_MN[rows, top_M] = log_mean_exp(others_MN) + math.log(num_prompts) - peak_M
        marginal_MN = rest_MN + peak_M[:, None] - math.log(num_prompts - 1)
        return self.matched_M[:, None] - marginal_MN


@dataclass(frozen=True, slots=True, eq=False)
class Retrieval:
    """Place of each reasoning's own prompt among all prompts, best likelihood first.

    Ties count as a fair draw among the tied, so that identical columns give exactly chance and
    the order of prompts changes nothing.
    """

    num_better_M: np.ndarray
    num_tied_M: np.ndarray
    """Prompts with the same likelihood, its own included."""

    @classmethod
    def of(cls, likelihood: Likelihood) -> Retrieval:
        logp_MN, matched_M1 = likelihood.logp_MN, likelihood.matched_M[:, None]
        return cls((logp_MN > matched_M1).sum(axis=1), (logp_MN == matched_M1).sum(axis=1))

    def hit_M(self, k: int = 1) -> np.ndarray:
        """Probability that the own prompt is among the k best."""
        return np.clip((k - self.num_better_M) / self.num_tied_M, 0.0, 1.0)


def hit_if_MN(logp_MN: np.ndarray) -> np.ndarray:
    """Probability that reasoning m retrieves prompt j: 1 for the best, shared by ties."""
    is_best_MN = logp_MN == logp_MN.max(axis=1, keepdims=True)
    return is_best_MN / is_best_MN.sum(axis=1, keepdims=True)


def hit_without_MN(likelihood: Likelihood, retrieval: Retrieval) -> np.ndarray:
    """Probability that reasoning m finds its prompt when prompt j is left out; j = own is void."""
    logp_MN, matched_M1 = likelihood.logp_MN, likelihood.matched_M[:, None]
    better_MN = retrieval.num_better_M[:, None] - (logp_MN > matched_M1)
    tied_MN = np.maximum(retrieval.num_tied_M[:, None] - (logp_MN == matched_M1), 1)
    return np.clip((1 - better_MN) / tied_MN, 0.0, 1.0)


def log_mean_exp(logp_MN: np.ndarray) -> np.ndarray:
    """(M,) logsumexp over columns minus log N."""
    peak_M = logp_MN.max(axis=1)
    return peak_M + np.log(np.exp(logp_MN - peak_M[:, None]).mean(axis=1))


def check_draws(**draws: int) -> None:
    """Raise when a number of draws, given by its option's name, is negative."""
    for name, count in draws.items():
        if count < 0:
            raise MooredError(f"{name} must be a number of draws >= 0, got {count}; 0 turns it off")


def check_can_bootstrap(columns_M: np.ndarray) -> None:
    """Raise when there are not two prompts with reasonings to draw from."""
    num_used = len(np.unique(columns_M))
    if num_used < 2:
        raise TooFewPromptsError(
            f"bootstrap intervals draw prompts and need reasonings of at least 2 of them, got "
            f"reasonings of {num_used}; set bootstrap=0"
        )


def prompt_influence(
    value_M: np.ndarray, without_MN: np.ndarray, columns_M: np.ndarray
) -> np.ndarray:
    """(N,) how much each prompt moves the mean of `value_M` by standing in the other rows' columns.

    `without_MN[m, j]` is the value of row m when prompt j is left out. The jackknife pseudo-value
    of a prompt minus its own rows' mean, centred: what resampling rows alone would miss. Prompts
    without rows are never drawn: they are a fixed background and have influence 0.
    """
    num_rows, num_prompts = without_MN.shape
    counts_N = np.bincount(columns_M, minlength=num_prompts)
    is_used_N = counts_N > 0
    num_used = np.count_nonzero(is_used_N)
    own_MN = columns_M[:, None] == np.arange(num_prompts)
    totals_N = np.where(own_MN, 0.0, without_MN).sum(axis=0)
    means_N = totals_N / np.maximum(num_rows - counts_N, 1)
    row_sums_N = np.bincount(columns_M, weights=value_M, minlength=num_prompts)
    row_part_N = (row_sums_N - counts_N * value_M.mean()) * num_used / num_rows
    influence_N = -(num_used - 1) * means_N - row_part_N
    return np.where(is_used_N, influence_N - influence_N[is_used_N].mean(), 0.0)


def bootstrap_means(
    values_DM: np.ndarray,
    influence_DN: np.ndarray,
    columns_M: np.ndarray,
    *,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """(D, B) resampled means: prompts drawn with replacement, then reasonings inside each.

    D quantities share their draws. `influence_DN` (see `prompt_influence`) carries what a drawn
    prompt does as a column.
    """
    order = np.argsort(columns_M, kind="stable")
    prompts, starts, counts = np.unique(columns_M[order], return_index=True, return_counts=True)
    sorted_DM = values_DM[:, order]
    widest = int(counts.max())
    block = max(1, MAX_ELEMENTS // (len(prompts) * widest))
    means = []
    for first in range(0, draws, block):
        size = min(block, draws - first)
        picks_BP = rng.integers(len(prompts), size=(size, len(prompts)))
        counts_BP = counts[picks_BP]
        offset_BPK = rng.random((size, len(prompts), widest)) * counts_BP[..., None]
        rows_BPK = starts[picks_BP][..., None] + offset_BPK.astype(np.intp)
        inside_BPK = np.arange(widest) < counts_BP[..., None]
        total_B = counts_BP.sum(axis=1)
        for_D = [(row[rows_BPK] * inside_BPK).sum(axis=(1, 2)) / total_B for row in sorted_DM]
        as_columns_DB = influence_DN[:, prompts][:, picks_BP].mean(axis=2)
        means.append(np.stack(for_D) + as_columns_DB)
    return np.concatenate(means, axis=1)


def permutation_p_values(
    value_if_DMN: np.ndarray, columns_M: np.ndarray, *, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """(D,) chance that a mean is as large when reasonings and prompts are paired at random.

    `value_if_DMN[d, m, j]` is the value of row m if prompt j were its own. One-sided, with the
    observed pairing counted as one draw, so p is never 0.
    """
    rows_M = np.arange(len(columns_M))
    observed_D = value_if_DMN[:, rows_M, columns_M].mean(axis=1)
    # Float sums of the same numbers in another order differ by rounding; that is a tie.
    slack_D = 1e-9 * (1.0 + np.abs(observed_D))
    num_as_large_D = np.ones(len(observed_D))
    block = max(1, MAX_ELEMENTS // len(columns_M))
    for first in range(0, draws, block):
        size = min(block, draws - first)
        shuffled_BM = rng.permuted(np.tile(columns_M, (size, 1)), axis=1)
        null_DB = value_if_DMN[:, rows_M, shuffled_BM].mean(axis=2)
        num_as_large_D += (null_DB >= (observed_D - slack_D)[:, None]).sum(axis=1)
    return num_as_large_D / (draws + 1)
