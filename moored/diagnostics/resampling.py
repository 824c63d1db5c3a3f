"""How sure a mean over reasonings is: standard errors, bootstrap, permutation null.

Reasonings of one task are not independent, so tasks are the units that count. Mostly a task is one
prompt; over several turns it has many. A prompt is a (block, column) pair: rows of one block were
scored against the same N columns.
Shape legend: M reasonings, N columns, P prompts (blocks x columns), C tasks, B draws, D quantities.
"""

from __future__ import annotations

import math

import numpy as np

from moored.errors import MooredError, TooFewPromptsError

MAX_ELEMENTS = 1 << 22
"""Bound on the size of one resampled block."""


def check_draws(**draws: int) -> None:
    """Raise when a number of draws, given by its option's name, is negative."""
    for name, count in draws.items():
        if count < 0:
            raise MooredError(f"{name} must be a number of draws >= 0, got {count}; 0 turns it off")


def check_can_bootstrap(tasks_M: np.ndarray) -> None:
    """Raise when there are not two tasks with reasonings to draw from."""
    num_used = len(np.unique(tasks_M))
    if num_used < 2:
        raise TooFewPromptsError(
            f"bootstrap intervals draw tasks and need reasonings of at least 2 of them, got "
            f"reasonings of {num_used}; set bootstrap=0"
        )


def prompt_influence(
    value_M: np.ndarray,
    without_MN: np.ndarray,
    columns_M: np.ndarray,
    blocks_M: np.ndarray | None = None,
) -> np.ndarray:
    """(P,) how much each prompt moves the mean of `value_M` through the other rows of its block.

    `without_MN[m, j]` is the value of row m when column j of its block is left out. The jackknife
    pseudo-value of a prompt minus its own rows' mean, centred: what resampling rows alone would
    miss. Prompts without rows are never drawn: they are a fixed background and have influence 0.
    """
    num_rows, num_columns = without_MN.shape
    blocks_M = np.zeros(num_rows, dtype=np.intp) if blocks_M is None else blocks_M
    num_blocks = int(blocks_M.max()) + 1
    prompts_M = blocks_M * num_columns + columns_M
    num_prompts = num_blocks * num_columns
    counts_P = np.bincount(prompts_M, minlength=num_prompts)
    is_used_P = counts_P > 0
    num_used = np.count_nonzero(is_used_P)
    if num_prompts == 2:
        return np.zeros(2)  # Without one of two prompts there is no mixture to compare with.
    own_MN = columns_M[:, None] == np.arange(num_columns)
    totals_BN = np.zeros((num_blocks, num_columns))
    np.add.at(totals_BN, blocks_M, np.where(own_MN, 0.0, without_MN))
    # Leaving a prompt out changes nothing in the rows of other blocks.
    block_sums_B = np.bincount(blocks_M, weights=value_M, minlength=num_blocks)
    totals_BN += (block_sums_B.sum() - block_sums_B)[:, None] if num_blocks > 1 else 0.0
    means_P = totals_BN.ravel() / np.maximum(num_rows - counts_P, 1)
    row_sums_P = np.bincount(prompts_M, weights=value_M, minlength=num_prompts)
    row_part_P = (row_sums_P - counts_P * value_M.mean()) * num_used / num_rows
    influence_P = -(num_used - 1) * means_P - row_part_P
    return np.where(is_used_P, influence_P - influence_P[is_used_P].mean(), 0.0)


def influence_of_tasks(
    influence_DP: np.ndarray, prompts_M: np.ndarray, tasks_M: np.ndarray
) -> np.ndarray:
    """(D, C) influence of the prompts of each of C tasks together, as `standard_errors` takes it.

    A prompt belongs to the task of its first row. `tasks_M` is numbered from 0 without gaps.
    """
    used, first = np.unique(prompts_M, return_index=True)
    num_tasks = int(tasks_M.max()) + 1
    sums = [
        np.bincount(tasks_M[first], weights=row[used], minlength=num_tasks) for row in influence_DP
    ]
    return np.stack(sums) * num_tasks / len(used)


def standard_errors(
    values_DM: np.ndarray, influence_DC: np.ndarray, tasks_M: np.ndarray
) -> np.ndarray:
    """(D,) standard error of each mean, tasks as independent units, without any draw.

    Linearised: a task contributes its rows' deviation from the mean and its influence as columns;
    the variance of the mean is that of the contributions over the number of tasks.
    """
    num_tasks = influence_DC.shape[1]
    assert num_tasks >= 2, "a standard error needs reasonings of two tasks"
    deviation_DM = values_DM - values_DM.mean(axis=1, keepdims=True)
    sums_DC = np.stack(
        [np.bincount(tasks_M, weights=row, minlength=num_tasks) for row in deviation_DM]
    )
    part_DC = sums_DC * num_tasks / len(tasks_M) + influence_DC
    return np.sqrt((part_DC**2).sum(axis=1) / (num_tasks * (num_tasks - 1)))


def bootstrap_means(
    values_DM: np.ndarray,
    influence_DC: np.ndarray,
    tasks_M: np.ndarray,
    *,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """(D, B) resampled means: tasks drawn with replacement, then reasonings inside each.

    D quantities share their draws. `influence_DC` (see `influence_of_tasks`) carries what the
    prompts of a drawn task do as columns.
    """
    order = np.argsort(tasks_M, kind="stable")
    drawn, starts, counts = np.unique(tasks_M[order], return_index=True, return_counts=True)
    sorted_DM = values_DM[:, order]
    widest = int(counts.max())
    block = max(1, MAX_ELEMENTS // (len(drawn) * widest))
    means = []
    for first in range(0, draws, block):
        size = min(block, draws - first)
        picks_BC = rng.integers(len(drawn), size=(size, len(drawn)))
        counts_BC = counts[picks_BC]
        offset_BCK = rng.random((size, len(drawn), widest)) * counts_BC[..., None]
        rows_BCK = starts[picks_BC][..., None] + offset_BCK.astype(np.intp)
        inside_BCK = np.arange(widest) < counts_BC[..., None]
        total_B = counts_BC.sum(axis=1)
        for_D = [(row[rows_BCK] * inside_BCK).sum(axis=(1, 2)) / total_B for row in sorted_DM]
        as_columns_DB = influence_DC[:, drawn][:, picks_BC].mean(axis=2)
        means.append(np.stack(for_D) + as_columns_DB)
    return np.concatenate(means, axis=1)


def permutation_p_values(
    value_if_DMN: np.ndarray,
    columns_M: np.ndarray,
    blocks_M: np.ndarray | None = None,
    *,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """(D,) chance that a mean is as large when reasonings and prompts are paired at random.

    `value_if_DMN[d, m, j]` is the value of row m if column j were its own. Columns are shuffled
    among the rows of a block. One-sided, with the observed pairing counted as one draw, so p is
    never 0.
    """
    rows_M = np.arange(len(columns_M))
    members = [rows_M] if blocks_M is None else _rows_by_block(blocks_M)
    observed_D = value_if_DMN[:, rows_M, columns_M].mean(axis=1)
    # Float sums of the same numbers in another order differ by rounding; that is a tie.
    slack_D = 1e-9 * (1.0 + np.abs(observed_D))
    num_as_large_D = np.ones(len(observed_D))
    block = max(1, MAX_ELEMENTS // len(columns_M))
    for first in range(0, draws, block):
        size = min(block, draws - first)
        shuffled_BM = np.tile(columns_M, (size, 1))
        for rows in members:
            shuffled_BM[:, rows] = rng.permuted(shuffled_BM[:, rows], axis=1)
        null_DB = value_if_DMN[:, rows_M, shuffled_BM].mean(axis=2)
        num_as_large_D += (null_DB >= (observed_D - slack_D)[:, None]).sum(axis=1)
    return num_as_large_D / (draws + 1)


def _rows_by_block(blocks_M: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(blocks_M, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(blocks_M[order])) + 1)


def t_quantile(num_degrees: float, level: float = 0.95) -> float:
    """Half the width of a 95 % (or 99 %) interval in standard errors, by Student's t.

    Hill's expansion in 1 / degrees of freedom; below 5 it is too rough, and a table stands in.
    """
    z, exact = _NORMAL_AND_SMALL[level]
    if num_degrees < 1.0:
        return math.inf
    if num_degrees < 5.0:
        return exact[int(num_degrees) - 1]
    n = num_degrees
    return z + (
        (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


_NORMAL_AND_SMALL = {
    0.95: (1.959964, (12.706, 4.303, 3.182, 2.776)),
    0.99: (2.575829, (63.657, 9.925, 5.841, 4.604)),
}
"""Level -> quantile of the normal distribution, and of Student's t with 1 to 4 degrees."""
