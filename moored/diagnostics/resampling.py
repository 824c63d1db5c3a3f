"""How sure is a mean over reasonings? Bootstrap intervals and permutation p-values.

Shape legend: M reasonings, N prompts, B draws.
"""

from __future__ import annotations

import numpy as np

from moored.errors import MooredError, TooFewPromptsError

MAX_ELEMENTS = 1 << 22
"""Bound on the size of one resampled block."""


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
    without rows are never drawn: they stand as a fixed background and have influence 0.
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
