"""The MI family, intervals and p-values against slow oracles written from their definitions."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from moored.diagnostics import ZScoreEMA, information
from moored.diagnostics.resampling import bootstrap_means


def slow_view(rows: list[list[float]], columns: list[int]) -> dict[str, float]:
    marginal, matched = [], []
    for row, column in zip(rows, columns, strict=True):
        peak = max(row)
        mixture = sum(math.exp(x - peak) for x in row) / len(row)
        marginal.append(peak + math.log(mixture))
        matched.append(row[column])
    sigma = statistics.pstdev(marginal)
    gain = statistics.mean(a - b for a, b in zip(matched, marginal, strict=True))
    return {
        "mi": gain,
        "conditional": -statistics.mean(matched),
        "reasoning": -statistics.mean(marginal),
        "sigma": sigma,
        "zscore": gain / (sigma + 1e-3),
    }


def slow_information(logp, columns, lengths, ks=(2, 4, 8)) -> dict[str, float]:
    rows = logp.tolist()
    token = slow_view([[x / n for x in row] for row, n in zip(rows, lengths, strict=True)], columns)
    sequence = slow_view(rows, columns)
    expected = {
        "mi_estimate": token["mi"],
        "mi_seq_estimate": sequence["mi"],
        "mi_upper_bound": math.log(len(rows[0])),
        "conditional_entropy_est": token["conditional"],
        "conditional_entropy_seq_est": sequence["conditional"],
        "reasoning_entropy_est": token["reasoning"],
        "reasoning_entropy_seq_est": sequence["reasoning"],
        "matched_log_prob_mean": -token["conditional"],
        "marginal_log_prob_mean": -token["reasoning"],
        **{f"marginal_std{x}": token["sigma"] for x in ("", "_ema")},
        **{f"marginal_std{x}": sequence["sigma"] for x in ("_seq", "_ema_seq")},
        **{f"mi_zscore{x}": token["zscore"] for x in ("", "_ema")},
        **{f"mi_zscore{x}": sequence["zscore"] for x in ("_seq", "_ema_seq")},
    }
    for k in (1, *ks):
        ranked = [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:k] for row in rows]
        hits = statistics.mean(c in best for c, best in zip(columns, ranked, strict=True))
        chance, suffix = min(k / len(rows[0]), 1.0), "" if k == 1 else f"@{k}"
        expected[f"retrieval_accuracy{suffix}"] = hits
        expected[f"retrieval_chance_level{suffix}"] = chance
        expected[f"retrieval_above_chance{suffix}"] = hits - chance
    return expected


def test_every_logged_number_equals_a_loop_over_its_definition():
    rng = np.random.default_rng(11)
    for _ in range(60):
        num_rows, num_prompts = int(rng.integers(1, 12)), int(rng.integers(2, 10))
        logp = rng.normal(-50, rng.choice([0.1, 5, 400]), (num_rows, num_prompts))
        columns = rng.integers(num_prompts, size=num_rows).tolist()
        lengths = rng.integers(1, 60, num_rows).tolist()
        report = information(logp, columns, lengths)
        expected = slow_information(logp, columns, lengths)
        if "mi_estimate" in report.standard_errors:
            expected["mi_estimate_se"] = report.standard_errors["mi_estimate"]
        assert report.metrics("v") == pytest.approx({f"v/{k}": x for k, x in expected.items()})
        chance = 1 / num_prompts
        corrected = (expected["retrieval_accuracy"] - chance) / (1 - chance)
        assert report.dependence == pytest.approx(corrected)


def test_smoothed_zscores_equal_the_recursion_in_both_views():
    rng = np.random.default_rng(12)
    ema, sigma = ZScoreEMA(), {}
    for _ in range(5):
        report = information(rng.normal(-9, 3, (6, 3)), [0, 1, 2] * 2, rng.integers(1, 9, 6))
        smoothed = ema.update(report)
        for view, mi in (("", report.mi_estimate), ("_seq", report.mi_seq_estimate)):
            now = getattr(report, f"marginal_std{view}")
            sigma[view] = 0.9 * sigma.get(view, now) + 0.1 * now
            assert getattr(smoothed, f"marginal_std_ema{view}") == pytest.approx(sigma[view])
            zscore = mi / (sigma[view] + 1e-3)
            assert getattr(smoothed, f"mi_zscore_ema{view}") == pytest.approx(zscore)


def test_p_values_equal_the_share_of_all_pairings_that_do_as_well():
    rng = np.random.default_rng(13)
    columns, lengths = np.array([0, 0, 1, 1, 2, 2]), np.array([1, 30, 2, 20, 3, 10])
    logp = rng.normal(0, 1, (6, 3)) * lengths[:, None] / 4
    logp[np.arange(6), columns] += 0.5
    observed = information(logp, columns, lengths)
    pairings = [information(logp, list(p), lengths) for p in itertools.permutations(columns)]
    report = information(logp, columns, lengths, permutations=4000)
    exact = {
        name: statistics.mean(getattr(x, name) >= getattr(observed, name) - 1e-9 for x in pairings)
        for name in ("mi_estimate", "mi_seq_estimate", "retrieval_accuracy")
    }
    assert len(set(exact.values())) == 3  # so that no quantity can stand in for another
    assert report.p_values == pytest.approx(exact, abs=0.03)


def noisy_copies(rng, num_prompts=16, per_prompt=4, noise=0.3):
    """Prompts are points, reasonings noisy copies of them; log-densities."""
    points = rng.normal(size=num_prompts)
    columns = np.repeat(np.arange(num_prompts), per_prompt)
    copies = points[columns] + noise * rng.normal(size=len(columns))
    logp = -0.5 * ((copies[:, None] - points) / noise) ** 2
    return logp, columns, np.full(len(columns), 5)


def test_mi_intervals_are_as_wide_as_fresh_draws_scatter():
    # A 95 % interval spans 3.92 standard errors. An interval that resamples rows alone spans 2.3
    # for MI per token and 3.1 per sequence, the full range of the draws about 5.5.
    rng = np.random.default_rng(14)
    fresh = [information(*noisy_copies(rng, 8, 8), permutations=0) for _ in range(400)]
    runs = [information(*noisy_copies(rng, 8, 8), bootstrap=200, permutations=0) for _ in range(80)]
    for metric in ("mi_estimate", "mi_seq_estimate"):
        intervals = [report.intervals[metric] for report in runs]
        width = statistics.mean(interval.high - interval.low for interval in intervals)
        scatter = statistics.stdev(getattr(report, metric) for report in fresh)
        assert 0.87 <= width / (3.92 * scatter) <= 1.25


def test_retrieval_intervals_count_what_a_prompt_does_to_the_others():
    # Near-perfect retrieval: one close neighbour costs both prompts their hits. An interval that
    # resamples rows alone spans 0.73 of what it should.
    rng = np.random.default_rng(19)
    fresh = [
        information(*noisy_copies(rng, 8, 8, 0.05), permutations=0).retrieval_accuracy
        for _ in range(600)
    ]
    runs = [
        information(*noisy_copies(rng, 8, 8, 0.05), bootstrap=200, permutations=0)
        for _ in range(150)
    ]
    intervals = [report.intervals["retrieval_accuracy"] for report in runs]
    width = statistics.mean(interval.high - interval.low for interval in intervals)
    assert 0.87 <= width / (3.92 * statistics.stdev(fresh)) <= 1.25


def test_reasonings_are_drawn_anew_inside_each_drawn_prompt():
    # Both prompts hold -1, 0, 1: every drawn row has variance 2/3, a mean of six has 1/9.
    rows, columns = np.array([[-1.0, 0, 1, -1, 0, 1]]), np.repeat([0, 1], 3)
    rng = np.random.default_rng(22)
    means = bootstrap_means(rows, np.zeros((1, 2)), columns, draws=4000, rng=rng)
    assert means.std() == pytest.approx(1 / 3, rel=0.05)


def test_every_interval_stands_around_its_own_estimate():
    logp, columns, lengths = noisy_copies(np.random.default_rng(15))
    report = information(logp, columns, lengths, bootstrap=200)
    for metric, interval in report.intervals.items():
        assert interval.low < getattr(report, metric) < interval.high


def test_the_token_view_is_the_sequence_view_of_scores_per_token():
    rng = np.random.default_rng(16)
    logp, columns, _ = noisy_copies(rng)
    lengths = rng.integers(1, 30, len(columns))
    token, sequence = (
        information(scores, columns, counts, bootstrap=200, permutations=200)
        for scores, counts in ((logp, lengths), (logp / lengths[:, None], np.ones(len(columns))))
    )
    assert token.mi_estimate == pytest.approx(sequence.mi_seq_estimate)
    assert token.p_values["mi_estimate"] == sequence.p_values["mi_seq_estimate"]
    ours, theirs = token.intervals["mi_estimate"], sequence.intervals["mi_seq_estimate"]
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    # The sequence view in turn does not know the lengths.
    unit = information(logp, columns, np.ones(len(columns)), bootstrap=200)
    assert unit.intervals["mi_seq_estimate"] == token.intervals["mi_seq_estimate"]
