"""The alarm on simulated series: false alarms, detection, lead time.

One point is one measurement (every 5 steps in a default run); 80 points are 400 steps.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics

import numpy as np
import pytest

from moored.diagnostics import CollapseAlarm, Regime, find_alarm
from moored.errors import MooredError

POINTS = np.arange(80)
RISE = 0.4 + 0.8 * (1 - np.exp(-POINTS / 10))
FALL_AT, SUCCESS_FALLS_AT = 40, 55


def noisy(base: np.ndarray, noise: float, seed: int) -> np.ndarray:
    return base * (1 + noise * np.random.default_rng(seed).normal(size=len(base)))


def alarm_at(mi: np.ndarray, entropy: np.ndarray | float = 1.0) -> int | None:
    entropies = np.broadcast_to(entropy, mi.shape)
    alarm = find_alarm(zip(POINTS.tolist(), mi.tolist(), entropies.tolist(), strict=True))
    return None if alarm is None else alarm.step


@pytest.mark.parametrize("base", [np.ones(80), RISE], ids=["flat", "rising"])
@pytest.mark.parametrize(("noise", "limit"), [(0.05, 0.0), (0.1, 0.01), (0.2, 0.05)])
def test_healthy_runs_raise_few_false_alarms(base, noise, limit):
    alarms = [alarm_at(noisy(base, noise, seed)) is not None for seed in range(200)]
    assert np.mean(alarms) <= limit


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_collapse_is_seen_before_success_falls(noise):
    # MI goes from its full height to zero between points 40 and 60; success follows at 55.
    falling = RISE * np.clip(1 - (POINTS - FALL_AT) / 20, 0, 1)
    steps = [alarm_at(noisy(falling, noise, seed)) for seed in range(200)]
    seen = np.array([s for s in steps if s is not None and s >= FALL_AT])
    assert len(seen) >= 0.98 * len(steps)
    lead = SUCCESS_FALLS_AT - seen
    assert np.median(lead) >= 4
    assert np.mean(lead > 0) >= 0.95


def test_kind_says_whether_entropy_stands():
    falling = np.clip(1 - (POINTS - FALL_AT) / 20, 0, 1)
    series = list(zip(POINTS.tolist(), falling.tolist(), [1.0] * 80, strict=True))
    alarm = find_alarm(series)
    assert alarm is not None and alarm.kind is Regime.TEMPLATE_COLLAPSE
    both = list(zip(POINTS.tolist(), falling.tolist(), falling.tolist(), strict=True))
    late = find_alarm(both, CollapseAlarm(min_drop=0.7))
    assert late is not None and late.kind is Regime.LOW_ENTROPY_COLLAPSE


def test_a_small_lasting_drop_is_no_collapse():
    assert alarm_at(np.where(POINTS < 40, 1.0, 0.8)) is None


def test_a_collapse_right_after_the_first_look_is_seen():
    # The first look is of the untrained policy; by the second everything is lost.
    series = [0.3, 0.02, 0.01, 0.02, 0.01]
    alarm = find_alarm((step, mi, 1.0) for step, mi in enumerate(series))
    assert alarm is not None
    # At the third point differences of 0.28 and 0.01 make a noise of 1.4826 * 0.145 / sqrt(2) =
    # 0.152, and the first look less twice that is nothing. At the fourth the noise is 0.0105.
    assert alarm.step == 3
    assert alarm.mi_reference == pytest.approx(0.3 - 2 * 1.4826 * 0.01 / math.sqrt(2))


def test_a_first_look_that_is_high_by_chance_raises_no_alarm():
    for seed in range(50):
        flat = noisy(np.ones(80), 0.1, seed)
        flat[0] = 1.5  # five times the noise above the others
        assert alarm_at(flat) is None


def test_alarm_goes_off_once():
    watch = CollapseAlarm()
    falling = np.clip(1 - (POINTS - FALL_AT) / 20, 0, 1).tolist()
    fired = [watch.update(step, mi, 1.0) for step, mi in enumerate(falling)]
    assert sum(alarm is not None for alarm in fired) == 1
    assert watch.alarm in fired


def test_alarm_continues_from_its_saved_state():
    mi = noisy(RISE * np.clip(1 - (POINTS - FALL_AT) / 20, 0, 1), 0.1, 0).tolist()
    whole = CollapseAlarm()
    expected = [whole.update(step, x, 1.0) for step, x in enumerate(mi)]
    for cut in (3, 45, 70):
        begun, resumed = CollapseAlarm(), CollapseAlarm()
        first = [begun.update(step, x, 1.0) for step, x in enumerate(mi[:cut])]
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        rest = [resumed.update(step, x, 1.0) for step, x in enumerate(mi[cut:], start=cut)]
        assert first + rest == expected
        assert resumed.alarm == whole.alarm


def test_alarm_refuses_what_it_cannot_use():
    with pytest.raises(MooredError, match="step 7"):
        CollapseAlarm().update(7, math.nan, 1.0)
    with pytest.raises(MooredError, match="warmup"):
        CollapseAlarm(warmup=2)
    with pytest.raises(MooredError, match="min_drop"):
        CollapseAlarm(min_drop=1.5)


def slow_alarm(series: list[float]) -> int | None:
    """First point at which the CUSUM of the docstring passes both of its bars."""
    highest, cusum = -math.inf, 0.0
    for end in range(3, len(series) + 1):
        seen = series[:end]
        level = statistics.median(seen[-3:])
        highest = max(highest, level)
        steps = [abs(b - a) for a, b in itertools.pairwise(seen)]
        noise = max(1.4826 * statistics.median(steps) / math.sqrt(2), 0.03 * abs(highest))
        reference = max(highest, seen[0] - 2 * noise)
        cusum = max(0.0, cusum + (reference - seen[-1]) / noise - 2.0)
        if cusum > 5.0 and reference > 0.0 and level <= 0.5 * reference:
            return end - 1
    return None


def test_the_alarm_goes_off_where_a_plain_cusum_does():
    rng = np.random.default_rng(23)
    found = []
    for _ in range(150):
        fall = np.clip(1 - (np.arange(40) - rng.integers(5, 30)) / rng.integers(1, 20), 0.3, 1)
        noise = rng.choice([0.0, 0.02, 0.1, 0.4])
        mi = np.abs(fall * (1 + noise * rng.normal(size=40))).tolist()
        alarm = find_alarm((step, x, 1.0) for step, x in enumerate(mi))
        found.append(None if alarm is None else alarm.step)
        assert found[-1] == slow_alarm(mi)
    assert len(set(found)) > 10


@pytest.mark.parametrize("level", [-0.1, -1e-6, 0.0])
@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.3])
def test_information_that_never_was_above_zero_raises_no_alarm(level, noise):
    for seed in range(30):
        assert alarm_at(noisy(np.full(80, level), noise, seed)) is None
    falling = level - 0.01 * POINTS
    assert alarm_at(falling) is None


def test_the_reference_is_the_first_level_and_not_zero():
    watch = CollapseAlarm()
    for step in range(8):
        watch.update(step, -0.1, 1.0)
    state = watch.state_dict()
    assert (state["reference"], state["cusum"]) == (-0.1, 0.0)


def test_a_run_that_starts_below_zero_is_watched_once_it_has_risen():
    rising = np.concatenate([np.full(20, -0.1), np.linspace(-0.1, 1.0, 20), np.ones(20)])
    assert alarm_at(np.concatenate([rising, np.ones(20)])) is None
    step = alarm_at(np.concatenate([rising, np.linspace(1.0, 0.0, 20)]))
    assert step is not None and step > 60


def test_state_is_plain_json_whatever_numbers_came_in():
    watch = CollapseAlarm()
    for step, mi in enumerate(np.linspace(1, 0, 20, dtype=np.float32)):
        watch.update(np.int64(step), mi, np.float32(1.0))  # pyright: ignore[reportArgumentType]
    assert watch.alarm is not None
    assert type(watch.alarm.step) is int
    resumed = CollapseAlarm()
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.alarm == watch.alarm
    fresh = CollapseAlarm()
    fresh.load_state_dict(json.loads(json.dumps(CollapseAlarm().state_dict())))
    assert fresh.state_dict() == CollapseAlarm().state_dict()
