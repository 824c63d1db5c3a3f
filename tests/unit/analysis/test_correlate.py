"""Correlations of diagnostics with success, on curves made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moored.analysis.correlate import (
    BestLag,
    correlate,
    spearman,
    weighted_pearson,
    weighted_spearman,
)
from moored.analysis.curves import RunCurves
from moored.errors import MooredError


def test_correlations_worked_out_by_hand():
    x, y = np.array([1.0, 2.0, 3.0, 10.0]), np.array([1.0, 3.0, 2.0, 4.0])
    # Ranks differ by 0, 1, 1, 0: 1 - 6·2 / (4·15).
    assert spearman(x, y) == pytest.approx(0.8)
    # Deviations -3, -2, -1, 6 and -1.5, 0.5, -0.5, 1.5: 13 / √(50·5).
    once = np.ones((1, 4))
    assert weighted_pearson(x, y, once) == pytest.approx(13 / 250**0.5)
    assert np.isnan(weighted_pearson(x, np.ones(4), once))


def made(level: float, *, leads_by: int = 0, rng: np.random.Generator) -> RunCurves:
    """A run whose MI is its success `leads_by` steps later."""
    walk = np.cumsum(rng.normal(size=140)) + level
    success = {step: float(walk[step]) for step in range(1, 101)}
    mi = {step: float(walk[step + leads_by]) for step in range(5, 101, 5)}
    return RunCurves(
        name="x", setting=str(level), arm="none", success=success, diagnostics={"MI": mi}
    )


def test_a_diagnostic_that_follows_success_over_runs_is_found_with_its_interval():
    rng = np.random.default_rng(0)
    (found,) = correlate([made(100.0 * k, rng=rng) for k in range(12)], draws=200)
    assert found.spearman.value == 1.0
    assert found.pearson.low > 0.99
    assert found.num_runs == 12


def test_a_diagnostic_that_comes_first_has_its_strongest_correlation_at_that_lag():
    rng = np.random.default_rng(1)
    runs = [made(0.0, leads_by=10, rng=rng) for _ in range(12)]
    (found,) = correlate(runs, draws=100)
    assert found.best_lag == BestLag(lag=10, low=10, high=10)
    assert found.by_lag[10].value > 0.9 > found.by_lag[-10].value


def test_the_strongest_lag_of_noise_has_an_interval_that_tells_nothing():
    rng = np.random.default_rng(3)
    runs = []
    for _ in range(40):
        run = made(0.0, rng=rng)
        noise = {step: float(rng.normal()) for step in run.diagnostics["MI"]}
        runs.append(replace(run, diagnostics={"noise": noise}))
    (found,) = correlate(runs, draws=500)
    assert found.best_lag is not None
    assert found.best_lag.low < 0 < found.best_lag.high


def test_a_run_whose_looks_are_rare_counts_with_its_last_look():
    rng = np.random.default_rng(4)
    runs = [made(100.0 * k, rng=rng) for k in range(6)]
    looks = [{1: 0.0, 41: 0.0, 81: 10.0 * k} for k in range(6)]
    rare = [replace(r, diagnostics={"MI": mi}) for r, mi in zip(runs, looks, strict=True)]
    (found,) = correlate(rare, draws=100)
    assert (found.num_runs, found.spearman.value) == (6, 1.0)
    # A figure of every step that the last ones do not have stays unknown.
    assert replace(rare[0], diagnostics={"kept": {81: 1.0}}).final("kept") is None


def test_one_success_in_five_runs_is_no_evidence_of_a_correlation():
    rng = np.random.default_rng(5)
    runs = []
    for k in range(5):
        run = replace(made(0.0, rng=rng), success=dict.fromkeys(range(1, 11), float(k == 4)))
        runs.append(replace(run, diagnostics={"MI": {5: float(k), 10: float(k)}}))
    (found,) = correlate(runs, draws=1000)
    # A third of the draws, (4/5)^5, are without the run that succeeds.
    assert found.spearman.value == pytest.approx(0.5**0.5)
    assert found.spearman.low == 0.0


def test_a_few_runs_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(MooredError, match="needs at least 4 of them, got 3; run more"):
        correlate([made(k, rng=rng) for k in range(3)])


def test_a_run_drawn_twice_counts_as_two():
    x, y = np.array([1.0, 5.0, 2.0, 2.0]), np.array([3.0, 1.0, 2.0, 4.0])
    drawn = np.array([[2, 0, 1, 1], [1, 1, 1, 1]])
    twice = [0, 0, 2, 3]
    found = weighted_spearman(x, y, drawn)
    assert found == pytest.approx([spearman(x[twice], y[twice]), spearman(x, y)])
    once = weighted_pearson(x[twice], y[twice], np.ones((1, 4)))
    assert weighted_pearson(x, y, drawn)[0] == pytest.approx(once[0])


def flat(setting: str, arm: str, mi: float, success: float) -> RunCurves:
    return RunCurves(
        name=setting,
        setting=setting,
        arm=arm,
        success=dict.fromkeys(range(1, 11), success),
        diagnostics={"MI": {10: mi}},
    )


def test_pooled_arms_can_correlate_where_no_arm_does():
    # In each arm success falls with MI; the arms lie far apart, and so the pool rises.
    runs = [flat(f"{arm}{k}", arm, at + k / 10, at - k / 10) for arm, at in ARMS for k in range(6)]
    (found,) = correlate(runs, draws=200)
    assert found.spearman.value > 0.3
    assert [each.value for each in found.by_arm.values()] == pytest.approx([-1.0, -1.0])


ARMS = (("none", 0.0), ("top_p", 5.0))


def test_between_seeds_ignores_what_settings_differ_in():
    # Each setting has its own level; inside it the seed with more MI has less success.
    runs = [
        flat(f"s{level}", "none", level + seed / 10, level - seed / 10)
        for level in range(6)
        for seed in range(3)
    ]
    (found,) = correlate(runs, draws=200)
    assert found.spearman.value > 0.7
    assert found.between_seeds is not None
    assert found.between_seeds.value == pytest.approx(-1.0)
    assert found.between_seeds.num_runs == 18
    assert found.num_settings == 6


def test_equal_runs_of_one_setting_do_not_narrow_the_interval():
    rng = np.random.default_rng(3)
    ends = rng.normal(size=(8, 2))
    alone = [flat(f"s{k}", "none", *end) for k, end in enumerate(ends)]
    (once,), (copied,) = (correlate(runs, draws=2000) for runs in (alone, alone * 5))
    assert copied.spearman.value == pytest.approx(once.spearman.value)
    width, widths = (e.spearman.high - e.spearman.low for e in (once, copied))
    assert widths == pytest.approx(width, rel=0.1)
