"""How often a 95 % interval holds the true value, on a toy channel of 64 reasonings.

The true value is the estimator's mean at that number of prompts, over fresh prompts and
reasonings. Run with `-s` to see the figures.
"""

from __future__ import annotations

import numpy as np
import pytest

from moored.diagnostics import information

METRICS = ("mi_estimate", "mi_seq_estimate", "retrieval_accuracy")


def toy_channel(rng, num_prompts: int):
    """Prompts are points, reasonings are noisy copies of them; log-densities."""
    points = rng.normal(size=num_prompts)
    columns = np.repeat(np.arange(num_prompts), 64 // num_prompts)
    copies = points[columns] + 0.3 * rng.normal(size=64)
    logp = -0.5 * ((copies[:, None] - points) / 0.3) ** 2
    return logp, columns, np.full(64, 5)


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
