"""Does reasoning depend on its prompt? The MI family from one cross-scoring matrix.

In: `logp[m, j]`, the log-likelihood of reasoning m under prompt j, summed over its tokens. Out: a
`CollapseReport` with every metric per token and per sequence, intervals and p-values.
Shape legend: M reasonings, N columns, P prompts, C tasks, D quantities. `columns_M` is the prompt
each reasoning was written for; with blocks, column j of block b is the prompt (b, j).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from moored.diagnostics.report import STD_EPS, CollapseReport, Interval
from moored.diagnostics.resampling import (
    MIN_COMPARED_TASKS,
    bootstrap_means,
    check_can_bootstrap,
    check_draws,
    column_effects,
    column_influence,
    permutation_p_values,
    standard_errors,
    two_way_error,
)
from moored.diagnostics.verdict import judged
from moored.errors import MooredError, TooFewPromptsError

INTERVAL = (0.025, 0.975)
SAME_PROMPT_RTOL = 0.02
"""Columns named the same prompt may differ this much, the noise of bfloat16 scores."""
COMPARED = ("mi_estimate", "mi_seq_estimate", "retrieval_accuracy")
"""What compares tasks with each other, of all that has a standard error."""
PERMUTATIONS = 999
"""Draws for p-values unless asked otherwise: about 6 ms for 64 reasonings, p down to 0.001."""

_Value = TypeVar("_Value")


def information(
    logp: ArrayLike,
    columns: ArrayLike,
    lengths: ArrayLike,
    *,
    blocks: ArrayLike | None = None,
    tasks: ArrayLike | None = None,
    column_tasks: ArrayLike | None = None,
    prompt_keys: Sequence[Hashable] | None = None,
    control: Control | None = None,
    ks: Sequence[int] = (2, 4, 8),
    bootstrap: int = 0,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> CollapseReport:
    """Measure I(X;Z) and its family from `logp` (M, N), per-sequence sums.

    `columns[m]` is the prompt that reasoning m was written for, `lengths[m]` its token count.
    `blocks[m]` says which set of N prompts row m was scored against, when rows have different
    sets; None is one set for all. `tasks[m]` is the task that row m comes from, when one task has
    several prompts: they are not independent, so uncertainty is that over tasks; None: every
    prompt is a task of its own. `column_tasks[b, j]` is the task of column j of block b; None: that
    of its first row. Columns of tasks without rows are a fixed background. Columns with equal
    `prompt_keys` are one prompt and are merged.
    What a `control` gains from the row's own column is no dependence, and is subtracted from MI and
    retrieval at turns where its mean is positive.
    Rows of length 0 are skipped and counted. `bootstrap` and `permutations` are numbers of draws.
    Intervals and standard errors need reasonings of at least 2 tasks, those of MI and retrieval
    of 3.
    """
    check_draws(bootstrap=bootstrap, permutations=permutations)
    scores = _checked_scores(
        logp, columns, lengths, blocks, tasks, column_tasks, prompt_keys, control
    )
    token = Likelihood.of(scores.logp_MN / scores.lengths_M[:, None], scores.columns_M)
    sequence = Likelihood.of(scores.logp_MN, scores.columns_M)
    gains = _Gains.of(token, sequence, scores.control)
    if bootstrap:
        check_can_bootstrap(scores.tasks_M)
    rng = np.random.default_rng(seed)
    report = _estimates(scores, token, sequence, gains, ks)
    has_two = report.num_used_prompts > 1
    table = _Quantities.of(scores, token, sequence, gains) if has_two else None
    report = replace(
        report,
        standard_errors=table.standard_errors() if table else {},
        intervals=table.intervals(bootstrap, rng) if table and bootstrap else {},
        p_values=_p_values(scores, gains, permutations, rng) if permutations else {},
    )
    return judged(report)


def _estimates(
    scores: _Scores, token: Likelihood, sequence: Likelihood, gains: _Gains, ks: Sequence[int]
) -> CollapseReport:
    """The report without its uncertainty."""
    return CollapseReport(
        num_prompts=scores.num_columns,
        num_used_prompts=len(np.unique(scores.tasks_M)),
        num_reasonings=len(scores.columns_M),
        num_merged_prompts=scores.num_merged,
        num_empty_reasonings=scores.num_empty,
        mean_length=float(scores.lengths_M.mean()),
        mi_upper_bound=math.log(scores.num_columns),
        matched_log_prob_mean=float(token.matched_M.mean()),
        marginal_log_prob_mean=float(token.marginal_M.mean()),
        control_mi=None if scores.control is None else gains.control_mi,
        retrieval_accuracy=float(gains.hits.own_M.mean()),
        retrieval_at={k: float(_hits(sequence, scores.control, k).own_M.mean()) for k in ks},
        **_likelihood_fields(token, gains.token, est="_est", mi="mi_estimate", std=""),
        **_likelihood_fields(
            sequence, gains.sequence, est="_seq_est", mi="mi_seq_estimate", std="_seq"
        ),
    )


def _likelihood_fields(
    view: Likelihood, gain: Gain, *, est: str, mi: str, std: str
) -> dict[str, Any]:
    """The report fields of one view, per token or per sequence."""
    mi_nats, marginal_std = float(gain.own_M.mean()), float(view.marginal_M.std())
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


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """Scores of another task's reasoning in the contexts of each row."""

    logp_MN: np.ndarray
    """0 where there is no control: it gains nothing."""
    lengths_M: np.ndarray
    turns_M: np.ndarray
    """Turn number of each row."""

    @classmethod
    def of(cls, logp: ArrayLike, lengths: ArrayLike, turns: ArrayLike) -> Control:
        """`lengths` are tokens of the controls, 0 where a row has none."""
        lengths_M = np.asarray(lengths)
        logp_MN = np.where(lengths_M[:, None] > 0, np.asarray(logp, dtype=np.float64), 0.0)
        _check_finite(logp_MN, lengths_M > 0)
        return cls(logp_MN, np.maximum(lengths_M, 1), np.asarray(turns))

    def rows(self, used_M: np.ndarray) -> Control:
        return Control(self.logp_MN[used_M], self.lengths_M[used_M], self.turns_M[used_M])


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """What each reasoning gains from its own prompt; its mean is MI, or retrieval."""

    own_M: np.ndarray
    if_MN: np.ndarray
    """Gain of reasoning m if prompt j were its own."""
    without_MN: np.ndarray
    """Gain of reasoning m when prompt j is left out; j = its own is void."""

    def less(self, control: Gain, turns_M: np.ndarray) -> Gain:
        """Minus what the control gains, at turns where that is positive in the mean.

        A reader's control is negative, another task's text fits worse: subtracting it would add.
        """
        counts = np.bincount(turns_M)
        means = np.bincount(turns_M, weights=control.own_M) / np.maximum(counts, 1)
        is_on_M = (means > 0.0)[turns_M].astype(float)
        return Gain(
            self.own_M - is_on_M * control.own_M,
            self.if_MN - is_on_M[:, None] * control.if_MN,
            self.without_MN - is_on_M[:, None] * control.without_MN,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Gains:
    """Per token, per sequence, and of retrieval; less what their controls gain."""

    token: Gain
    sequence: Gain
    hits: Gain
    control_mi: float
    """Nats per token that the control took off."""

    @classmethod
    def of(cls, token: Likelihood, sequence: Likelihood, control: Control | None) -> _Gains:
        raw, raw_sequence, hits = token.gain(), sequence.gain(), _hits(sequence, control)
        if control is None:
            return cls(raw, raw_sequence, hits, 0.0)
        columns_M = token.columns_M
        per_token = Likelihood.of(control.logp_MN / control.lengths_M[:, None], columns_M).gain()
        per_sequence = Likelihood.of(control.logp_MN, columns_M).gain()
        less = raw.less(per_token, control.turns_M)
        taken = float((raw.own_M - less.own_M).mean())
        return cls(less, raw_sequence.less(per_sequence, control.turns_M), hits, taken)


def _hits(sequence: Likelihood, control: Control | None, k: int = 1) -> Gain:
    """Retrieval among the k best, less what the control is retrieved above chance."""
    own = _raw_hits(sequence, k)
    if control is None:
        return own
    chance = k / sequence.logp_MN.shape[1]
    other = _raw_hits(Likelihood.of(control.logp_MN, sequence.columns_M), k)
    above = Gain(other.own_M - chance, other.if_MN - chance, other.without_MN - chance)
    return own.less(above, control.turns_M)


def _raw_hits(sequence: Likelihood, k: int) -> Gain:
    retrieval = Retrieval.of(sequence)
    return Gain(
        retrieval.hit_M(k), hit_if_MN(sequence.logp_MN), hit_without_MN(sequence, retrieval)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Quantities:
    """The means that get a standard error and an interval, and what they are means of."""

    names: tuple[str, ...]
    values_DM: np.ndarray
    influence_DC: np.ndarray
    """What the prompts of each task do as columns of the other rows."""
    errors_D: np.ndarray
    """Standard errors."""
    bounds_D2: np.ndarray
    """What the quantity can be."""
    tasks_M: np.ndarray

    @classmethod
    def of(
        cls, scores: _Scores, token: Likelihood, sequence: Likelihood, gains: _Gains
    ) -> _Quantities:
        where = (scores.columns_M, scores.blocks_M, scores.tasks_M, scores.owners_BN)
        of_token, of_sequence, of_hits = (
            column_effects(gain.own_M, gain.without_MN, *where)
            for gain in (gains.token, gains.sequence, gains.hits)
        )
        none, no_bound = np.zeros_like(of_token), (-math.inf, math.inf)
        most = (-math.inf, math.log(scores.num_columns))
        least = 0.0 if scores.control is None else -1.0
        table = {
            "mi_estimate": (gains.token.own_M, of_token, most),
            "mi_seq_estimate": (gains.sequence.own_M, of_sequence, most),
            "retrieval_accuracy": (gains.hits.own_M, of_hits, (least, 1.0)),
            "conditional_entropy_est": (-token.matched_M, none, no_bound),
            "conditional_entropy_seq_est": (-sequence.matched_M, none, no_bound),
        }
        values, effects, bounds = zip(*table.values(), strict=True)
        names, values_DM, tasks_M = tuple(table), np.stack(values), scores.tasks_M
        influence_DC = np.stack([column_influence(each, len(tasks_M)) for each in effects])
        errors_D = standard_errors(values_DM, influence_DC, tasks_M)
        # Not of MI: one column left out of a mixture says too little where several compete, and
        # the two errors offset each other (docs/diagnostics.md has the coverage).
        errors_D[names.index("retrieval_accuracy")] = two_way_error(
            gains.hits.own_M, of_hits, tasks_M
        )
        return cls(names, values_DM, influence_DC, errors_D, np.array(bounds), tasks_M)

    def standard_errors(self) -> dict[str, float]:
        return self._shown(dict(zip(self.names, self.errors_D.tolist(), strict=True)))

    def intervals(self, draws: int, rng: np.random.Generator) -> dict[str, Interval]:
        means_DB = bootstrap_means(
            self.values_DM, self.influence_DC, self.tasks_M, draws=draws, rng=rng
        )
        ends_D2 = np.clip(
            np.quantile(means_DB, INTERVAL, axis=1).T, *self.bounds_D2.T[..., None]
        ).tolist()
        pairs = zip(self.names, ends_D2, strict=True)
        return self._shown({name: Interval(*ends) for name, ends in pairs})

    def _shown(self, found: Mapping[str, _Value]) -> dict[str, _Value]:
        """Without what so few tasks cannot show."""
        is_enough = self.influence_DC.shape[1] >= MIN_COMPARED_TASKS
        return {k: value for k, value in found.items() if is_enough or k not in COMPARED}


def _p_values(
    scores: _Scores, gains: _Gains, draws: int, rng: np.random.Generator
) -> dict[str, float]:
    values = {
        "mi_estimate": gains.token.if_MN,
        "mi_seq_estimate": gains.sequence.if_MN,
        "retrieval_accuracy": gains.hits.if_MN,
    }
    p_D = permutation_p_values(
        np.stack(list(values.values())), scores.columns_M, scores.blocks_M, draws=draws, rng=rng
    )
    return dict(zip(values, p_D.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """Checked input: non-empty rows, distinct prompts."""

    logp_MN: np.ndarray
    columns_M: np.ndarray
    lengths_M: np.ndarray
    blocks_M: np.ndarray
    """Numbered from 0 without gaps."""
    tasks_M: np.ndarray
    """The same."""
    owners_BN: np.ndarray
    """The task of each column; -1 where no row is of that task."""
    num_empty: int
    num_merged: int
    control: Control | None

    @property
    def num_columns(self) -> int:
        return self.logp_MN.shape[1]


def _checked_scores(
    logp: ArrayLike,
    columns: ArrayLike,
    lengths: ArrayLike,
    blocks: ArrayLike | None,
    tasks: ArrayLike | None,
    column_tasks: ArrayLike | None,
    prompt_keys: Sequence[Hashable] | None,
    control: Control | None,
) -> _Scores:
    logp_MN = np.asarray(logp, dtype=np.float64)
    columns_M, lengths_M = _whole_numbers("columns", columns), np.asarray(lengths)
    if logp_MN.ndim != 2 or not (columns_M.shape == lengths_M.shape == logp_MN.shape[:1]):
        raise MooredError(
            f"logp must be (M, N) with one column and one length per row, got logp "
            f"{logp_MN.shape}, columns {columns_M.shape}, lengths {lengths_M.shape}"
        )
    if control is not None and (control.logp_MN.shape != logp_MN.shape or prompt_keys):
        raise MooredError("control must have the shape of logp, and cannot have prompt_keys")
    num_columns = logp_MN.shape[1]
    if len(columns_M) and not (columns_M.min() >= 0 and columns_M.max() < num_columns):
        raise MooredError(
            f"columns must name one of the {num_columns} prompts, got "
            f"{columns_M.min()} to {columns_M.max()}"
        )
    _check_counts(lengths_M)
    blocks_M = _checked_blocks(blocks, len(columns_M), prompt_keys)
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
    used_blocks, blocks_M = np.unique(blocks_M[filled], return_inverse=True)
    prompts_M = blocks_M * logp_MN.shape[1] + columns_M
    tasks_M = prompts_M if tasks is None else np.asarray(tasks)[filled]
    names, tasks_M = np.unique(tasks_M, return_inverse=True)
    if column_tasks is None:
        owners_BN = np.full((len(used_blocks), logp_MN.shape[1]), -1, dtype=np.intp)
        # From the last row to the first: the first row of a column says whose it is.
        owners_BN[blocks_M[::-1], columns_M[::-1]] = tasks_M[::-1]
    else:
        owners_BN = _owners(column_tasks, names, used_blocks, logp_MN.shape[1])
    return _Scores(
        logp_MN,
        columns_M,
        lengths_M[filled],
        blocks_M,
        tasks_M,
        owners_BN,
        num_empty,
        num_merged,
        None if control is None else control.rows(filled),
    )


def _owners(
    column_tasks: ArrayLike, names: np.ndarray, used_blocks: np.ndarray, num_columns: int
) -> np.ndarray:
    """(B, N) places in `names` of the columns' tasks, of blocks that have rows; -1: none there."""
    given = np.atleast_2d(_whole_numbers("column_tasks", column_tasks))
    if given.shape[1] != num_columns or given.shape[0] <= used_blocks.max():
        raise MooredError(
            f"column_tasks must name a task for each column of each block, "
            f"({used_blocks.max() + 1}, {num_columns}), got {given.shape}"
        )
    given_BN = given[used_blocks]
    places_BN = np.minimum(np.searchsorted(names, given_BN), len(names) - 1)
    return np.where(names[places_BN] == given_BN, places_BN, -1)


def _whole_numbers(name: str, numbers: ArrayLike) -> np.ndarray:
    given = np.asarray(numbers)
    whole = given if given.dtype.kind in "iu" else np.trunc(given.astype(np.float64))
    if not np.array_equal(whole, given):
        raise MooredError(f"{name} must be whole numbers, the positions of prompts, got {numbers}")
    return whole.astype(np.intp)


def _checked_blocks(
    blocks: ArrayLike | None, num_rows: int, prompt_keys: Sequence[Hashable] | None
) -> np.ndarray:
    if blocks is None:
        return np.zeros(num_rows, dtype=np.intp)
    blocks_M = _whole_numbers("blocks", blocks)
    if blocks_M.shape != (num_rows,):
        raise MooredError(f"blocks must have one number per row, {num_rows}, got {blocks_M.shape}")
    if prompt_keys is not None:
        raise MooredError(
            "prompt_keys name the columns of one block and cannot be used with blocks; leave equal "
            "prompts out of a block before scoring"
        )
    return blocks_M


def _check_counts(lengths_M: np.ndarray) -> None:
    is_count_M = np.isfinite(lengths_M) & (lengths_M >= 0)
    if not is_count_M.all():
        bad = int(np.flatnonzero(~is_count_M)[0])
        raise MooredError(
            f"lengths must be token counts >= 0, got lengths[{bad}] = {lengths_M[bad]}"
        )


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

    def gain(self) -> Gain:
        return Gain(self.gain_M, self.gain_if_MN, self.gain_without_MN())

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
