"""Which diagnostics go with success, over many runs, and which of them come first.

Over runs: each diagnostic at the end of a run against the run's final success, over all runs, in
each arm, and between seeds of one setting. Over time: within each run, a diagnostic at one look
against success some steps later or earlier. Runs of one setting resemble each other, so the 95 %
percentile intervals come from a bootstrap that draws whole settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moored.analysis.curves import RunCurves
from moored.errors import MooredError

LAGS = (-20, -15, -10, -5, 0, 5, 10, 15, 20)
"""Steps from the look to success; positive: success is later, the diagnostic leads."""
MIN_RUNS = 4
"""Fewer give no interval worth the name."""
MIN_SETTINGS = 5
"""With fewer settings, single runs are drawn instead, each in its setting."""
MIN_SEEDS = 3
"""Runs that a setting needs to count between seeds."""
MIN_LOOKS = 4
"""Pairs of look and success that a run needs to count at a lag."""

Floats = np.ndarray
Measure = Callable[[Floats, Floats, Floats], Floats]
"""Of x_R and y_R over R runs, for each of D draws by the weights w_DR of the runs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A correlation and its 95 % interval."""

    value: float
    low: float
    high: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLag:
    """The lag at which the correlation within runs is strongest, and its 95 % interval.

    Of several lags one is strongest in noise too: then the interval holds most of them.
    """

    lag: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """One diagnostic against success."""

    name: str
    num_runs: int
    num_settings: int
    spearman: Estimate
    pearson: Estimate
    by_arm: Mapping[str, Estimate]
    """Spearman over the runs of each arm."""
    between_seeds: Estimate | None
    """Of ranks inside each setting: which seed of a setting is better."""
    by_lag: Mapping[int, Estimate]
    """Mean over runs of Spearman within the run."""
    best_lag: BestLag | None
    """None where too few runs have any."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Final values of a diagnostic and of success, and the settings of their runs."""

    values: Floats
    success: Floats
    settings: Floats
    """A number for each run, equal in runs of one setting."""

    def __len__(self) -> int:
        return len(self.values)

    def of(self, chosen: Floats) -> Ends:
        return Ends(self.values[chosen], self.success[chosen], self.settings[chosen])

    @property
    def vary(self) -> bool:
        return len(self) >= MIN_RUNS and np.ptp(self.values) > 0 and np.ptp(self.success) > 0


def correlate(runs: Sequence[RunCurves], *, draws: int = 2000, seed: int = 0) -> list[Correlation]:
    """Every diagnostic that enough runs have, the strongest first."""
    if len(runs) < MIN_RUNS:
        raise MooredError(
            f"a correlation over runs needs at least {MIN_RUNS} of them, got {len(runs)}; run more "
            f"studies or seeds first"
        )
    names = dict.fromkeys(name for run in runs for name in run.diagnostics)
    rng, lag_rng = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    found = [_correlation(name, runs, draws, rng, lag_rng) for name in names]
    kept = [each for each in found if each is not None]
    return sorted(kept, key=lambda each: -abs(each.spearman.value))


def _correlation(
    name: str,
    runs: Sequence[RunCurves],
    draws: int,
    rng: np.random.Generator,
    lag_rng: np.random.Generator,
) -> Correlation | None:
    having = [(run, value) for run in runs if (value := run.final(name)) is not None]
    members = [run for run, _ in having]
    ends = Ends(
        np.array([value for _, value in having]),
        np.array([run.final_success for run in members]),
        np.unique([run.setting for run in members], return_inverse=True)[1],
    )
    if not ends.vary:
        return None
    arms = dict.fromkeys(run.arm for run in members)
    of_arm = {arm: ends.of(np.array([run.arm == arm for run in members])) for arm in arms}
    within = {lag: np.array([_within(run, name, lag) for run in members]) for lag in LAGS}
    within = {lag: r for lag, r in within.items() if np.isfinite(r).sum() >= MIN_RUNS}
    by_lag = {lag: _at_lag(r, ends.settings, draws, rng) for lag, r in within.items()}
    return Correlation(
        name=name,
        num_runs=len(having),
        num_settings=len(set(ends.settings)),
        spearman=_bootstrap(weighted_spearman, ends, draws, rng),
        pearson=_bootstrap(weighted_pearson, ends, draws, rng),
        by_arm={
            arm: _bootstrap(weighted_spearman, part, draws, rng)
            for arm, part in of_arm.items()
            if part.vary
        },
        between_seeds=_between_seeds(ends, draws, rng),
        by_lag=by_lag,
        best_lag=_best_lag(within, ends.settings, draws, lag_rng),
    )


def spearman(x: Floats, y: Floats) -> float:
    """Correlation of ranks; nan when one of them does not vary."""
    return float(weighted_spearman(x, y, np.ones((1, len(x))))[0])


def weighted_pearson(x: Floats, y: Floats, w_DR: Floats) -> Floats:
    """(D,) correlations when run r is there w times; x and y are (R,) or (D, R)."""
    total = w_DR.sum(axis=1, keepdims=True)
    x = x - (w_DR * x).sum(axis=1, keepdims=True) / total
    y = y - (w_DR * y).sum(axis=1, keepdims=True) / total
    scale = np.sqrt((w_DR * x * x).sum(axis=1) * (w_DR * y * y).sum(axis=1))
    products = (w_DR * x * y).sum(axis=1)
    is_varied = scale > 1e-12
    return np.where(is_varied, products / np.where(is_varied, scale, 1.0), np.nan)


def weighted_spearman(x: Floats, y: Floats, w_DR: Floats) -> Floats:
    return weighted_pearson(weighted_ranks(x, w_DR), weighted_ranks(y, w_DR), w_DR)


def weighted_ranks(values: Floats, w_DR: Floats) -> Floats:
    """(D, R) ranks from 1 when run r is there w times; equal values share their mean rank."""
    # below[s, r]: how far run s pushes the rank of run r up.
    below = (values[:, None] < values) + 0.5 * (values[:, None] == values)
    return w_DR @ below + 0.5


def _between_seeds(ends: Ends, draws: int, rng: np.random.Generator) -> Estimate | None:
    """Pearson of ranks inside each setting, over settings with enough seeds that differ."""
    values, success, is_told = np.zeros(len(ends)), np.zeros(len(ends)), np.zeros(len(ends), bool)
    for setting in set(ends.settings):
        here = ends.settings == setting
        inside = ends.of(here)
        # Seeds that all end alike do not say which is better.
        if here.sum() >= MIN_SEEDS and np.ptp(inside.values) > 0 and np.ptp(inside.success) > 0:
            values[here], success[here] = _shares(inside.values), _shares(inside.success)
            is_told |= here
    inside = Ends(values, success, ends.settings).of(is_told)
    return _bootstrap(weighted_pearson, inside, draws, rng) if inside.vary else None


def _shares(values: Floats) -> Floats:
    """Ranks as shares of their number, around 0."""
    ranks = weighted_ranks(values, np.ones((1, len(values))))[0]
    return ranks / (len(values) + 1) - 0.5


def _bootstrap(measure: Measure, ends: Ends, draws: int, rng: np.random.Generator) -> Estimate:
    (value,) = measure(ends.values, ends.success, np.ones((1, len(ends))))
    drawn = measure(ends.values, ends.success, _draw(ends.settings, draws, rng))
    return _estimate(float(value), drawn, len(ends))


def _draw(settings: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """(D, R) how often each run is drawn: by whole settings, or, where those are few, by runs
    inside each setting."""
    _, numbers, sizes = np.unique(settings, return_inverse=True, return_counts=True)
    if len(sizes) >= MIN_SETTINGS:
        return rng.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), draws)[:, numbers]
    weights = np.zeros((draws, len(settings)))
    for number, size in enumerate(sizes):
        weights[:, numbers == number] = rng.multinomial(size, np.full(size, 1 / size), draws)
    return weights


def _estimate(value: float, drawn: Floats, num_runs: int) -> Estimate:
    # A draw in which nothing varies shows no correlation. Without such draws a few runs, of which
    # one succeeds, would have an interval far from 0.
    low, high = np.percentile(np.nan_to_num(drawn), [2.5, 97.5])
    return Estimate(value=value, low=float(low), high=float(high), num_runs=num_runs)


def _at_lag(within_R: Floats, settings: Floats, draws: int, rng: np.random.Generator) -> Estimate:
    """Mean over runs of the correlation between a look and success some steps later."""
    is_known = np.isfinite(within_R)
    within_R = within_R[is_known]
    weights = _draw(settings[is_known], draws, rng)
    drawn = weights @ within_R / weights.sum(axis=1)
    return _estimate(float(within_R.mean()), drawn, len(within_R))


def _best_lag(
    within: Mapping[int, Floats], settings: Floats, draws: int, rng: np.random.Generator
) -> BestLag | None:
    """The strongest lag over all runs, and in each draw of them; the nearest to 0 of equals."""
    if not within:
        return None
    lags = np.array(sorted(within, key=abs))
    within_LR = np.array([within[lag] for lag in lags])
    is_known_LR = np.isfinite(within_LR)
    values_LR = np.where(is_known_LR, within_LR, 0.0)
    weights_DR = np.vstack([np.ones(len(settings)), _draw(settings, draws, rng)])
    # A draw without any run that has a lag leaves that lag at 0.
    counts_DL = np.maximum(weights_DR @ is_known_LR.T, 1.0)
    best, *drawn = lags[np.abs(weights_DR @ values_LR.T / counts_DL).argmax(axis=1)]
    low, high = np.percentile(drawn, [2.5, 97.5], method="nearest")
    return BestLag(lag=int(best), low=int(low), high=int(high))


def _within(run: RunCurves, name: str, lag: int) -> float:
    """Spearman of a diagnostic at its looks with success around each look's step plus `lag`."""
    success = run.smooth_success
    looks = run.diagnostics[name].items()
    pairs = [(value, success[step + lag]) for step, value in looks if step + lag in success]
    if len(pairs) < MIN_LOOKS:
        return float("nan")
    x, y = np.array(pairs).T
    return spearman(x, y)


def runs_lines(found: Sequence[Correlation]) -> list[list[str]]:
    """The end of a run against its final success: header, then a line for each diagnostic."""
    arms = list(dict.fromkeys(arm for each in found for arm in each.by_arm))
    shown = arms if len(arms) > 1 else []
    header = ["diagnostic", "Spearman", "Pearson", *(f"arm {arm}" for arm in shown)]
    lines = [[*header, "between seeds", "runs"]]
    for each in found:
        of_arms = [_cell(each.by_arm.get(arm)) for arm in shown]
        cells = [each.name, _cell(each.spearman), _cell(each.pearson), *of_arms]
        lines.append([*cells, _cell(each.between_seeds), str(each.num_runs)])
    return lines


def time_lines(found: Sequence[Correlation]) -> list[list[str]]:
    """Within runs, by the steps from a look to success."""
    lags = sorted({lag for each in found for lag in each.by_lag if lag % 10 == 0})
    lines = [["within runs", *(f"{lag:+d} steps" for lag in lags), "strongest lag"]]
    for each in found:
        cells = [_cell(each.by_lag.get(lag)) for lag in lags]
        best = each.best_lag
        shown = "–" if best is None else f"{best.lag:+d} [{best.low:+d}, {best.high:+d}]"
        lines.append([each.name, *cells, shown])
    return lines


def explanation(found: Sequence[Correlation]) -> str:
    num_settings = max((each.num_settings for each in found), default=0)
    drawn = "settings" if num_settings >= MIN_SETTINGS else "runs inside their settings"
    return (
        f"Against final success; {num_settings} settings (runs of one setting differ in their seed "
        f"only). Brackets are 95 % bootstrap intervals that draw {drawn}. Arms and between seeds: "
        f"Spearman. Within runs: positive steps mean that the diagnostic comes first."
    )


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}]"
