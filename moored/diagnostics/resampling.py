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
MIN_COMPARED_TASKS = 3
"""MI and retrieval compare tasks with each other. Two make one comparison, which moves both alike:
their deviations cancel, and how much another two would differ is nowhere to be seen."""


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


def column_effects(
    value_M: np.ndarray,
    without_MN: np.ndarray,
    columns_M: np.ndarray,
    blocks_M: np.ndarray,
    tasks_M: np.ndarray,
    owners_BN: np.ndarray,
) -> np.ndarray:
    """(C, C) what the columns of task c do to the values of the rows of task a, summed, in [a, c].

    `without_MN[m, j]` is the value of row m when column j of its block is left out. The difference
    to its value, less the mean difference, is what this column does rather than another one.
    `owners_BN` is the task of each column; -1: a fixed background. What columns of its own task do
    to a row counts with the row.
    """
    num_rows, num_columns = without_MN.shape
    num_tasks = int(tasks_M.max()) + 1
    effects_CC = np.zeros((num_tasks, num_tasks))
    if owners_BN.size == 2:
        return effects_CC  # Without one of two prompts there is no mixture to compare with.
    is_other_MN = columns_M[:, None] != np.arange(num_columns)
    effect_MN = np.where(is_other_MN, value_M[:, None] - without_MN, 0.0)
    effect_MN -= effect_MN.sum() / (num_rows * (num_columns - 1))
    owners_MN = owners_BN[blocks_M]
    counts_MN = is_other_MN & (owners_MN >= 0) & (owners_MN != tasks_M[:, None])
    rows, columns = np.nonzero(counts_MN)
    pairs = (tasks_M[rows], owners_MN[rows, columns])
    np.add.at(effects_CC, pairs, effect_MN[rows, columns])
    return effects_CC


def column_influence(effects_CC: np.ndarray, num_rows: int) -> np.ndarray:
    """(C,) how much each task moves the mean through the rows of others, centred.

    In units of the mean: the part that resampling rows alone would miss.
    """
    influence_C = effects_CC.sum(axis=0) * len(effects_CC) / num_rows
    return influence_C - influence_C.mean()


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


def two_way_error(value_M: np.ndarray, effects_CC: np.ndarray, tasks_M: np.ndarray) -> float:
    """Standard error of a mean, with what two tasks do to each other counted once.

    `standard_errors` counts it in both tasks, and is up to sqrt(2) too large where little else
    varies (Efron and Stein 1981). What is no sum of two tasks' own parts in effects[a, c] +
    effects[c, a] is taken out once: the residual of the additive fit, which makes the variance
    unbiased where effects add up. What rows give with columns held fixed is the least.
    """
    num_rows, num_tasks = len(value_M), len(effects_CC)
    influence_1C = column_influence(effects_CC, num_rows)[None]
    both = np.array([influence_1C, np.zeros_like(influence_1C)])
    whole, rows_only = (
        float(standard_errors(value_M[None], part, tasks_M)[0]) ** 2 for part in both
    )
    if num_tasks < 4:
        return math.sqrt(whole)
    shared_CC = effects_CC + effects_CC.T
    mean = shared_CC.sum() / (num_tasks * (num_tasks - 1))
    own_C = (shared_CC.sum(axis=1) - (num_tasks - 1) * mean) / (num_tasks - 2)
    residual_CC = np.triu(shared_CC - mean - own_C[:, None] - own_C, k=1)
    once = whole - float((residual_CC**2).sum()) / num_rows**2
    return math.sqrt(max(once, min(rows_only, whole)))


def bootstrap_means(
    values_DM: np.ndarray,
    influence_DC: np.ndarray,
    tasks_M: np.ndarray,
    *,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """(D, B) resampled means: tasks drawn with replacement, then reasonings inside each.

    D quantities share their draws. `influence_DC` (see `column_influence`) carries what the
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


def wilson_interval(successes: float, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval: accurate also for rates near 0 and 1."""
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    half = z * spread / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
