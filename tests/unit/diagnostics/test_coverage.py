"""How often a 95 % interval holds the true value, on toy channels of 64 reasonings.

The true value is the estimator's mean at that number of prompts, over fresh prompts and
reasonings. Run with `-s` to see the figures.
"""

from __future__ import annotations

import numpy as np
import pytest

from moored.diagnostics import information
from moored.diagnostics.resampling import t_quantile

METRICS = ("mi_estimate", "mi_seq_estimate", "retrieval_accuracy")


def toy_channel(rng, num_prompts: int, num_rows: int = 64, noise: float = 0.3):
    """Prompts are points, reasonings are noisy copies of them; log-densities."""
    points = rng.normal(size=num_prompts)
    columns = np.sort(np.arange(num_rows) % num_prompts)
    copies = points[columns] + noise * rng.normal(size=num_rows)
    logp = -0.5 * ((copies[:, None] - points) / noise) ** 2
    return logp, columns, np.full(num_rows, 5)


@pytest.mark.parametrize(("num_prompts", "least"), [(8, 0.80), (16, 0.86)])
def test_intervals_cover_the_mean_estimate_near_their_nominal_95_percent(num_prompts, least):
    rng = np.random.default_rng(0)
    fresh = [information(*toy_channel(rng, num_prompts), permutations=0) for _ in range(1000)]
    runs = [
        information(*toy_channel(rng, num_prompts), bootstrap=200, permutations=0)
        for _ in range(400)
    ]
    for metric in METRICS:
        truth = np.mean([getattr(report, metric) for report in fresh])
        intervals = [report.intervals[metric] for report in runs]
        coverage = np.mean([x.low <= truth <= x.high for x in intervals])
        width = np.mean([x.high - x.low for x in intervals])
        print(f"N={num_prompts} {metric}: {coverage:.3f} of intervals, mean width {width:.3f}")
        # An interval that spans all draws covers in every run, and fails too.
        assert least <= coverage <= 0.995, metric


@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("num_prompts", [2, 3, 4, 8])
def test_few_prompts_have_standard_errors_of_the_right_size_or_none(num_prompts, noise):
    """Those of two were 0.13 to 0.66 of the spread, and 0.41 to 0.80 of intervals held the mean."""
    rng = np.random.default_rng(1)
    looks = [
        information(*toy_channel(rng, num_prompts, 16, noise), permutations=0) for _ in range(400)
    ]
    known = [name for name in METRICS if name in looks[0].standard_errors]
    assert known == ([] if num_prompts == 2 else list(METRICS))
    for metric in known:
        values = np.array([getattr(look, metric) for look in looks])
        errors = np.array([look.standard_errors[metric] for look in looks])
        ratio = np.sqrt((errors**2).mean()) / values.std()
        inside = np.abs(values - values.mean()) <= t_quantile(num_prompts - 1) * errors
        print(f"N={num_prompts} noise={noise} {metric}: {ratio:.2f}, {inside.mean():.2f}")
        assert 0.9 <= ratio <= 1.35, metric
        assert inside.mean() >= 0.78, metric


def swapped_boards(rng, num_tasks: int, num_blocks: int, noise: float):
    """Boards of a task resemble each other; reasonings copy the board that they answer.

    Each block has as many boards as there are tasks, of any of them; 64 have a reasoning.
    """
    tasks_BN = rng.integers(num_tasks, size=(num_blocks, num_tasks))
    boards_BN = rng.normal(size=num_tasks)[tasks_BN] + rng.normal(size=tasks_BN.shape)
    blocks, columns = np.divmod(rng.permutation(tasks_BN.size)[:64], num_tasks)
    copies = boards_BN[blocks, columns] + noise * rng.normal(size=64)
    logp = -0.5 * ((copies[:, None] - boards_BN[blocks]) / noise) ** 2
    return {
        **{"logp": logp, "columns": columns, "lengths": np.full(64, 5), "blocks": blocks},
        **{"tasks": tasks_BN[blocks, columns], "column_tasks": tasks_BN},
    }


@pytest.mark.parametrize(
    ("num_tasks", "num_blocks", "noise"), [(8, 9, 0.3), (16, 5, 0.5), (8, 9, 1.5)]
)
def test_standard_errors_of_observation_swap_cover_at_95_percent(num_tasks, num_blocks, noise):
    """Those of retrieval were 1.2 to 1.4 times the spread of fresh looks."""
    rng = np.random.default_rng(5)
    looks = [
        information(**swapped_boards(rng, num_tasks, num_blocks, noise), permutations=0)
        for _ in range(300)
    ]
    for metric in METRICS:
        values = np.array([getattr(look, metric) for look in looks])
        errors = np.array([look.standard_errors[metric] for look in looks])
        t_95 = np.array([t_quantile(look.num_used_prompts - 1) for look in looks])
        ratio = np.sqrt((errors**2).mean()) / values.std()
        coverage = np.mean(np.abs(values - values.mean()) <= t_95 * errors)
        print(f"C={num_tasks} noise={noise} {metric}: {ratio:.2f} of the spread, {coverage:.3f}")
        assert 0.9 <= ratio <= 1.2, metric
        assert 0.91 <= coverage <= 0.985, metric
