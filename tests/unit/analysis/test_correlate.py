"""Correlations of diagnostics with success, on curves made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moored.analysis.correlate import RunCurves, correlate, pearson, ranks, read_curves, spearman
from moored.errors import MooredError
from moored.runlog.log import RunLog


def test_equal_values_share_their_mean_rank():
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_correlations_worked_out_by_hand():
    x, y = np.array([1.0, 2.0, 3.0, 10.0]), np.array([1.0, 3.0, 2.0, 4.0])
    # Ranks differ by 0, 1, 1, 0: 1 - 6·2 / (4·15).
    assert spearman(x, y) == pytest.approx(0.8)
    # Deviations -3, -2, -1, 6 and -1.5, 0.5, -0.5, 1.5: 13 / √(50·5).
    assert pearson(x, y) == pytest.approx(13 / 250**0.5)
    assert np.isnan(pearson(x, np.ones(4)))


def made(level: float, *, leads_by: int = 0, rng: np.random.Generator) -> RunCurves:
    """A run whose MI is its success `leads_by` steps later."""
    walk = np.cumsum(rng.normal(size=140)) + level
    success = {step: float(walk[step]) for step in range(1, 101)}
    mi = {step: float(walk[step + leads_by]) for step in range(5, 101, 5)}
    return RunCurves(path=Path("x"), success=success, diagnostics={"mi_estimate": mi})


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
    assert found.best_lag == 10
    assert found.by_lag[10].value > 0.9 > found.by_lag[-10].value


def test_noise_has_an_interval_that_holds_zero():
    rng = np.random.default_rng(2)
    runs = []
    for _ in range(40):
        run = made(0.0, rng=rng)
        noise = dict.fromkeys(run.diagnostics["mi_estimate"], float(rng.normal()))
        runs.append(RunCurves(path=run.path, success=run.success, diagnostics={"noise": noise}))
    (found,) = correlate(runs, draws=500)
    assert found.spearman.low < 0 < found.spearman.high


def test_a_few_runs_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(MooredError, match="needs at least 4 of them, got 3; run more"):
        correlate([made(k, rng=rng) for k in range(3)])


def test_diagnostics_are_read_in_the_view_that_the_verdict_rests_on(tmp_path):
    log = RunLog(tmp_path / "run")
    log.append("metrics", 1, {"rollout/success_rate": 0.5, "learner/entropy": 0.7})
    reports = {"swap": {"mi_estimate": 0.2}, "first": {"mi_estimate": 0.9}}
    look = {"environments": {"sokoban": {"view": "swap"}}, "reports": reports}
    log.append("collapse", 1, look)
    run = read_curves(tmp_path / "run")
    assert run.final("mi_estimate") == 0.2
    assert (run.final("token_entropy"), run.final("validity")) == (0.7, None)
    RunLog(tmp_path / "empty").write_config("seed: 0\n")
    with pytest.raises(MooredError, match="has no finished step"):
        read_curves(tmp_path / "empty")
