"""What is read off a cross-scoring matrix, row by row: likelihood gains and retrieval.

Shape legend: M reasonings, N prompts. `columns_M` is the prompt each reasoning was written for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


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
