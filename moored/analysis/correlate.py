"""Which diagnostics go with success, over many runs, and which of them come first.

Over runs: each diagnostic at the end of a run against the run's final success. Over time: within
each run, a diagnostic at one look against success some steps later or earlier. Intervals are 95 %
percentile intervals of a bootstrap that draws whole runs. Reads run directories only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from moored.analysis.compare import LAST
from moored.errors import MooredError
from moored.runlog.log import read_records

SUCCESS = "rollout/success_rate"
LOOK_DIAGNOSTICS = (
    *("mi_estimate", "mi_seq_estimate", "mi_zscore", "mi_zscore_seq", "mi_zscore_ema"),
    *("conditional_entropy_est", "conditional_entropy_seq_est", "reasoning_entropy_est"),
    *("reasoning_entropy_seq_est", "retrieval_accuracy"),
)
"""Of the view that regime and alarm follow."""
STEP_DIAGNOSTICS = {
    "reward_variance": "rollout/reward_variance_mean",
    "std_over_mean_of_rv": "rollout/reward_variance_std_over_mean",
    "validity": "rollout/validity_rate",
    "reply_tokens": "rollout/reply_tokens_mean",
    "kept_fraction": "filter/kept_fraction",
    "token_entropy": "learner/entropy",
}
LAGS = (-20, -15, -10, -5, 0, 5, 10, 15, 20)
"""Steps from the look to success; positive: success is later, the diagnostic leads."""
MIN_RUNS = 4
"""Fewer give no interval worth the name."""
MIN_LOOKS = 4
"""Pairs of look and success that a run needs to count at a lag."""

Floats = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """One run: success by step, and each diagnostic by the step of its look."""

    path: Path
    success: Mapping[int, float]
    diagnostics: Mapping[str, Mapping[int, float]]

    def final(self, name: str) -> float | None:
        """Mean of a diagnostic over the last steps; None when it was not measured there."""
        last = max(self.success)
        values = [v for step, v in self.diagnostics.get(name, {}).items() if step > last - LAST]
        return fmean(values) if values else None

    @property
    def final_success(self) -> float:
        last = max(self.success)
        return fmean(v for step, v in self.success.items() if step > last - LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A correlation and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """One diagnostic against success."""

    name: str
    num_runs: int
    spearman: Estimate
    pearson: Estimate
    by_lag: Mapping[int, Estimate]
    """Mean over runs of Spearman within the run."""

    @property
    def best_lag(self) -> int | None:
        """The lag at which the correlation within runs is strongest; the nearest to 0 of equals."""
        found = sorted(self.by_lag, key=lambda lag: (-abs(self.by_lag[lag].value), abs(lag)))
        return found[0] if found else None


def read_curves(path: Path) -> RunCurves:
    """Curves of one run; raises where it has no finished step."""
    steps: Sequence[Any] = read_records(path)
    looks: Sequence[Any] = read_records(path, "collapse")
    success = _curve(steps, SUCCESS)
    if not success:
        raise MooredError(f"{str(path)!r} has no finished step")
    found = {name: _curve(steps, key) for name, key in STEP_DIAGNOSTICS.items()}
    followed = [{"step": look["step"], **_followed(look)} for look in looks]
    found |= {name: _curve(followed, name) for name in LOOK_DIAGNOSTICS}
    return RunCurves(path=path, success=success, diagnostics={n: c for n, c in found.items() if c})


def _followed(look: Mapping[str, Any]) -> Mapping[str, Any]:
    """The report that the verdict rests on; of several environments, the first one's."""
    for environment in look.get("environments", {}).values():
        return look["reports"].get(environment["view"], {})
    return {}


def _curve(records: Sequence[Any], key: str) -> dict[int, float]:
    return {
        int(record["step"]): float(record[key])
        for record in records
        if isinstance(record.get(key), int | float)
    }


def correlate(runs: Sequence[RunCurves], *, draws: int = 2000, seed: int = 0) -> list[Correlation]:
    """Every diagnostic that enough runs have, the strongest first."""
    if len(runs) < MIN_RUNS:
        raise MooredError(
            f"a correlation over runs needs at least {MIN_RUNS} of them, got {len(runs)}; run more "
            f"studies or seeds first"
        )
    names = dict.fromkeys(name for run in runs for name in run.diagnostics)
    rng = np.random.default_rng(seed)
    found = [_correlation(name, runs, draws, rng) for name in names]
    kept = [each for each in found if each is not None]
    return sorted(kept, key=lambda each: -abs(each.spearman.value))


def _correlation(
    name: str, runs: Sequence[RunCurves], draws: int, rng: np.random.Generator
) -> Correlation | None:
    having = [(run, value) for run in runs if (value := run.final(name)) is not None]
    values = np.array([value for _, value in having])
    success = np.array([run.final_success for run, _ in having])
    if len(having) < MIN_RUNS or np.ptp(values) == 0 or np.ptp(success) == 0:
        return None
    by_lag = {lag: _at_lag(name, [run for run, _ in having], lag, draws, rng) for lag in LAGS}
    return Correlation(
        name=name,
        num_runs=len(having),
        spearman=_bootstrap(spearman, values, success, draws, rng),
        pearson=_bootstrap(pearson, values, success, draws, rng),
        by_lag={lag: estimate for lag, estimate in by_lag.items() if estimate is not None},
    )


def pearson(x: Floats, y: Floats) -> float:
    """Linear correlation; nan when one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else float("nan")


def spearman(x: Floats, y: Floats) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    return pearson(ranks(x), ranks(y))


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _bootstrap(
    measure: Callable[[Floats, Floats], float],
    x: Floats,
    y: Floats,
    draws: int,
    rng: np.random.Generator,
) -> Estimate:
    picks = rng.integers(len(x), size=(draws, len(x)))
    return _estimate(measure(x, y), np.array([measure(x[pick], y[pick]) for pick in picks]))


def _estimate(value: float, drawn: Floats) -> Estimate:
    # A draw of one run only has no correlation.
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.percentile(drawn, [2.5, 97.5]) if len(drawn) else (value, value)
    return Estimate(value=value, low=float(low), high=float(high))


def _at_lag(
    name: str, runs: Sequence[RunCurves], lag: int, draws: int, rng: np.random.Generator
) -> Estimate | None:
    """Mean over runs of the correlation between a look and success `lag` steps later."""
    within = np.array([value for run in runs if np.isfinite(value := _within(run, name, lag))])
    if len(within) < MIN_RUNS:
        return None
    picks = rng.integers(len(within), size=(draws, len(within)))
    return _estimate(float(within.mean()), within[picks].mean(axis=1))


def _within(run: RunCurves, name: str, lag: int) -> float:
    """Spearman of a diagnostic at its looks with success around each look's step plus `lag`."""
    pairs = []
    for step, value in run.diagnostics[name].items():
        # The success of one step is noisy: mean over the step and two on either side.
        near = [run.success[s] for s in range(step + lag - 2, step + lag + 3) if s in run.success]
        if len(near) == 5:
            pairs.append((value, fmean(near)))
    if len(pairs) < MIN_LOOKS:
        return float("nan")
    x, y = np.array(pairs).T
    return spearman(x, y)
