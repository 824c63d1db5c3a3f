"""Does reasoning depend on its prompt? The MI family from one cross-scoring matrix.

In: `logp[m, j]`, the log-likelihood of reasoning m under prompt j, summed over its tokens. Out: a
`CollapseReport` with every metric per token and per sequence, intervals and p-values.
Shape legend: M reasonings, N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moored.diagnostics.likelihood import (
    Likelihood,
    Retrieval,
    bootstrap_means,
    check_can_bootstrap,
    check_draws,
    hit_if_MN,
    hit_without_MN,
    permutation_p_values,
    prompt_influence,
)
from moored.diagnostics.report import STD_EPS, CollapseReport, Interval, Regime, classify
from moored.errors import MooredError, TooFewPromptsError

INTERVAL = (0.025, 0.975)
SAME_PROMPT_RTOL = 0.02
"""Columns named the same prompt may differ this much, the noise of bfloat16 scores."""


def information(
    logp: ArrayLike,
    columns: ArrayLike,
    lengths: ArrayLike,
    *,
    prompt_keys: Sequence[Hashable] | None = None,
    ks: Sequence[int] = (2, 4, 8),
    bootstrap: int = 0,
    permutations: int = 0,
    seed: int = 0,
) -> CollapseReport:
    """Measure I(X;Z) and its family from `logp` (M, N), per-sequence sums.

    `columns[m]` is the prompt that reasoning m was written for, `lengths[m]` its token count.
    Columns with equal `prompt_keys` are one prompt and are merged. Rows of length 0 are skipped
    and counted. `bootstrap` and `permutations` are numbers of draws; intervals need reasonings of
    at least 2 prompts.
    """
    check_draws(bootstrap=bootstrap, permutations=permutations)
    scores = _checked_scores(logp, columns, lengths, prompt_keys)
    token = Likelihood.of(scores.logp_MN / scores.lengths_M[:, None], scores.columns_M)
    sequence = Likelihood.of(scores.logp_MN, scores.columns_M)
    retrieval = Retrieval.of(sequence)
    report = CollapseReport(
        num_prompts=scores.num_prompts,
        num_reasonings=len(scores.columns_M),
        num_merged_prompts=scores.num_merged,
        num_empty_reasonings=scores.num_empty,
        mi_upper_bound=math.log(scores.num_prompts),
        matched_log_prob_mean=float(token.matched_M.mean()),
        marginal_log_prob_mean=float(token.marginal_M.mean()),
        retrieval_accuracy=float(retrieval.hit_M().mean()),
        retrieval_at={k: float(retrieval.hit_M(k).mean()) for k in ks},
        **_likelihood_fields(token, est="_est", mi="mi_estimate", std=""),
        **_likelihood_fields(sequence, est="_seq_est", mi="mi_seq_estimate", std="_seq"),
        regime=Regime.DIVERSE,
    )
    rng = np.random.default_rng(seed)
    return replace(
        report,
        regime=classify(report),
        intervals=_intervals(token, sequence, retrieval, bootstrap, rng) if bootstrap else {},
        p_values=_p_values(token, sequence, permutations, rng) if permutations else {},
    )


def _likelihood_fields(view: Likelihood, *, est: str, mi: str, std: str) -> dict[str, Any]:
    """The report fields of one view, per token or per sequence."""
    mi_nats, marginal_std = float(view.gain_M.mean()), float(view.marginal_M.std())
    zscore = mi_nats / (marginal_std + STD_EPS)
    return {
        mi: mi_nats,
        f"conditional_entropy{est}": -float(view.matched_M.mean()),
        f"reasoning_entropy{est}": -float(view.marginal_M.mean()),
        f"marginal_std{std}": marginal_std,
        f"marginal_std_ema{std}": marginal_std,
        f"mi_zscore{std}": zscore,
        f"mi_zscore_ema{std}": zscore,
    }


def _intervals(
    token: Likelihood,
    sequence: Likelihood,
    retrieval: Retrieval,
    draws: int,
    rng: np.random.Generator,
) -> dict[str, Interval]:
    columns_M, num_prompts = token.columns_M, token.logp_MN.shape[1]
    check_can_bootstrap(columns_M)
    hits_M, no_influence_N = retrieval.hit_M(), np.zeros(num_prompts)
    hits_without_MN = hit_without_MN(sequence, retrieval)
    # Value of each row, influence of each prompt as a column, and what the quantity can be.
    no_bound, most = (-math.inf, math.inf), math.log(num_prompts)
    table = {
        "mi_estimate": (token.gain_M, _gain_influence(token), (-math.inf, most)),
        "mi_seq_estimate": (sequence.gain_M, _gain_influence(sequence), (-math.inf, most)),
        "retrieval_accuracy": (
            hits_M,
            prompt_influence(hits_M, hits_without_MN, columns_M),
            (0.0, 1.0),
        ),
        "conditional_entropy_est": (-token.matched_M, no_influence_N, no_bound),
        "conditional_entropy_seq_est": (-sequence.matched_M, no_influence_N, no_bound),
    }
    values, influences, bounds = zip(*table.values(), strict=True)
    means_DB = bootstrap_means(
        np.stack(values), np.stack(influences), columns_M, draws=draws, rng=rng
    )
    ends_D2 = np.clip(np.quantile(means_DB, INTERVAL, axis=1).T, *np.array(bounds).T[..., None])
    return {
        name: Interval(float(low), float(high))
        for name, (low, high) in zip(table, ends_D2, strict=True)
    }


def _gain_influence(view: Likelihood) -> np.ndarray:
    return prompt_influence(view.gain_M, view.gain_without_MN(), view.columns_M)


def _p_values(
    token: Likelihood, sequence: Likelihood, draws: int, rng: np.random.Generator
) -> dict[str, float]:
    values = {
        "mi_estimate": token.gain_if_MN,
        "mi_seq_estimate": sequence.gain_if_MN,
        "retrieval_accuracy": hit_if_MN(sequence.logp_MN),
    }
    p_D = permutation_p_values(
        np.stack(list(values.values())), token.columns_M, draws=draws, rng=rng
    )
    return dict(zip(values, p_D.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """Checked input: non-empty rows, distinct prompts."""

    logp_MN: np.ndarray
    columns_M: np.ndarray
    lengths_M: np.ndarray
    num_empty: int
    num_merged: int

    @property
    def num_prompts(self) -> int:
        return self.logp_MN.shape[1]


def _checked_scores(
    logp: ArrayLike,
    columns: ArrayLike,
    lengths: ArrayLike,
    prompt_keys: Sequence[Hashable] | None,
) -> _Scores:
    logp_MN = np.asarray(logp, dtype=np.float64)
    columns_M, lengths_M = _whole_numbers(columns), np.asarray(lengths)
    if logp_MN.ndim != 2 or not (columns_M.shape == lengths_M.shape == logp_MN.shape[:1]):
        raise MooredError(
            f"logp must be (M, N) with one column and one length per row, got logp "
            f"{logp_MN.shape}, columns {columns_M.shape}, lengths {lengths_M.shape}"
        )
    num_columns = logp_MN.shape[1]
    if len(columns_M) and not (columns_M.min() >= 0 and columns_M.max() < num_columns):
        raise MooredError(
            f"columns must name one of the {num_columns} prompts, got "
            f"{columns_M.min()} to {columns_M.max()}"
        )
    is_count_M = np.isfinite(lengths_M) & (lengths_M >= 0)
    if not is_count_M.all():
        bad = int(np.flatnonzero(~is_count_M)[0])
        raise MooredError(
            f"lengths must be token counts >= 0, got lengths[{bad}] = {lengths_M[bad]}"
        )
    filled = lengths_M > 0
    _check_finite(logp_MN, filled)
    logp_MN, columns_M = _merge_prompts(logp_MN[filled], columns_M[filled], prompt_keys)
    num_empty = int(np.count_nonzero(~filled))
    if logp_MN.shape[1] < 2 or len(columns_M) == 0:
        raise TooFewPromptsError(
            f"information needs at least 2 distinct prompts and 1 non-empty reasoning, got "
            f"{logp_MN.shape[1]} and {len(columns_M)} ({num_empty} empty reasonings skipped)"
        )
    num_merged = num_columns - logp_MN.shape[1]
    return _Scores(logp_MN, columns_M, lengths_M[filled], num_empty, num_merged)


def _whole_numbers(columns: ArrayLike) -> np.ndarray:
    given = np.asarray(columns)
    whole = given if given.dtype.kind in "iu" else np.trunc(given.astype(np.float64))
    if not np.array_equal(whole, given):
        raise MooredError(f"columns must be whole numbers, the positions of prompts, got {columns}")
    return whole.astype(np.intp)


def _check_finite(logp_MN: np.ndarray, filled: np.ndarray) -> None:
    bad = np.argwhere(~np.isfinite(logp_MN) & filled[:, None])
    if len(bad):
        row, column = bad[0]
        raise MooredError(
            f"logp must be finite, but {len(bad)} entries are not; the first is "
            f"logp[{row}, {column}] = {logp_MN[row, column]}; look at how that pair was scored"
        )


def _merge_prompts(
    logp_MN: np.ndarray, columns_M: np.ndarray, prompt_keys: Sequence[Hashable] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Keep one column per distinct prompt and renumber `columns_M`."""
    if prompt_keys is None:
        return logp_MN, columns_M
    if len(prompt_keys) != logp_MN.shape[1]:
        raise MooredError(
            f"prompt_keys must have one key per column, got {len(prompt_keys)} keys for "
            f"{logp_MN.shape[1]} columns"
        )
    index: dict[Hashable, int] = {}
    target_N = np.array([index.setdefault(key, len(index)) for key in prompt_keys])
    first_N = np.unique(target_N, return_index=True)[1]
    twin_MN = logp_MN[:, first_N[target_N]]
    differs = np.abs(logp_MN - twin_MN) > 1.0 + SAME_PROMPT_RTOL * np.abs(twin_MN)
    if differs.any():
        row, column = np.argwhere(differs)[0]
        raise MooredError(
            f"prompt_keys says that columns {first_N[target_N[column]]} and {column} are the same "
            f"prompt, but reasoning {row} scores {twin_MN[row, column]:.3f} and "
            f"{logp_MN[row, column]:.3f} there; check the keys"
        )
    return logp_MN[:, first_N], target_N[columns_M]
