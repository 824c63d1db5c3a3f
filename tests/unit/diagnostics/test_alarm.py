"""The alarm: its operating curve on simulated series, and single series by hand.

The whole curve, with more series, is `python benchmarks/alarm.py`.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics

import numpy as np
import pytest

from moored.diagnostics import CollapseAlarm, Regime, find_alarm
from moored.diagnostics.alarm import MIN_LOOKS, AlarmRule
from moored.errors import MooredError

NUM_LOOKS = 100
LOOKS = np.arange(NUM_LOOKS)


def noise(std: float, correlation: float, seed: int, num_series: int = 1000) -> np.ndarray:
    fresh = np.random.default_rng(seed).normal(size=(num_series, NUM_LOOKS))
    found = fresh.copy()
    for look in LOOKS[1:]:
        found[:, look] = correlation * found[:, look - 1]
        found[:, look] += math.sqrt(1 - correlation**2) * fresh[:, look]
    return std * found


def fall(start: int, over: int) -> np.ndarray:
    """From 1 to a fifth."""
    return 1.0 - 0.8 * np.clip((LOOKS - start + 1) / over, 0.0, 1.0)


def first_alarms(mi: np.ndarray, error: float | None = None) -> np.ndarray:
    """Look of the first alarm; NUM_LOOKS where there is none."""
    first = np.full(len(mi), NUM_LOOKS)
    for end in range(MIN_LOOKS, NUM_LOOKS + 1):
        errors = None if error is None else np.full((len(mi), end), error)
        found = AlarmRule().apply(mi[:, :end], errors)
        first[(first == NUM_LOOKS) & (found.level_S <= found.limit_S)] = end - 1
    return first


def alarm_at(mi, entropy: float = 1.0, error: float | None = None) -> int | None:
    watch = CollapseAlarm()
    for step, value in enumerate(mi):
        watch.update(step, value, entropy, error)
    return None if watch.alarm is None else watch.alarm.step


@pytest.mark.parametrize("knows_errors", [True, False])
@pytest.mark.parametrize("first", [None, 2.2], ids=["", "outlying first look"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_false_alarms_are_at_most_5_percent_in_100_looks(correlation, first, knows_errors):
    mi = 1.0 + noise(0.2, correlation, seed=100)
    if first is not None:
        mi[:, 0] = first
    error = 0.2 * math.sqrt(1 - correlation**2) if knows_errors else None
    assert np.mean(first_alarms(mi, error) < NUM_LOOKS) <= 0.05


@pytest.mark.parametrize("correlation", [0.0, 0.8])
@pytest.mark.parametrize("over", [1, 5, 20])
def test_a_fall_to_a_fifth_is_seen_within_4_looks_of_halving(over, correlation):
    true = fall(30, over)
    first = first_alarms(true + noise(0.2, correlation, seed=200))
    seen = (first >= 30) & (first < NUM_LOOKS)
    assert seen.mean() >= 0.95
    assert np.median(first[seen]) - int(np.argmax(true <= 0.5)) <= 4


@pytest.mark.parametrize("error", [0.02, 0.05])
def test_a_collapse_between_the_first_two_looks_is_called_at_the_fourth(error):
    # The first look less two errors of a tenth of it is 0.8; 28 % of that are above a fifth.
    assert alarm_at([1.0, 0.2, 0.2, 0.2], error=error) == 3
    alarm = CollapseAlarm()
    for step, mi in enumerate([0.3, 0.02, 0.01, 0.02]):
        alarm.update(step, mi, 1.0, 0.01)
    assert alarm.alarm is not None
    assert alarm.alarm.mi_reference == pytest.approx(0.3 - 2 * 0.03)
    assert alarm.alarm.mi_level == pytest.approx(0.05 / 3)
    assert alarm.alarm.mi_level_se == pytest.approx(0.01 / math.sqrt(3))


def test_a_very_uncertain_first_look_is_no_reference():
    series = [1.0, 0.2, 0.2, 0.2, 0.2, 0.2]
    watch = CollapseAlarm()
    found = [watch.update(s, mi, 1.0, 0.6 if s == 0 else 0.02) for s, mi in enumerate(series)]
    assert found == [None] * 6


def test_noisier_looks_lower_the_bar():
    # At 0.35 of what was held: 4.5 * 0.2 / sqrt(3) = 0.52 is less than the fall, 4.5 * 0.3 /
    # sqrt(3) = 0.78 is more.
    series = [*[1.0] * 20, *[0.35] * 3]
    assert alarm_at(series, error=0.2) == 22
    assert alarm_at(series, error=0.3) is None


def test_a_small_lasting_drop_is_no_collapse():
    assert alarm_at(np.where(LOOKS < 40, 1.0, 0.5)) is None


def test_kind_says_whether_entropy_stands():
    falling = fall(40, 20)
    alone = find_alarm((s, mi, 1.0) for s, mi in enumerate(falling))
    assert alone is not None and alone.kind is Regime.TEMPLATE_COLLAPSE
    both = find_alarm((s, mi, mi) for s, mi in enumerate(falling))
    assert both is not None and both.kind is Regime.LOW_ENTROPY_COLLAPSE


def test_a_run_that_rose_late_is_held_to_what_it_held_lately():
    rising = [*[0.1] * 60, *[1.0] * 20]
    assert alarm_at(rising) is None
    assert alarm_at([*rising, *[0.3] * 3]) == 82


@pytest.mark.parametrize("error", [0.2, None])
def test_information_that_never_was_above_zero_raises_no_alarm(error):
    assert np.mean(first_alarms(noise(0.2, 0.0, seed=300), error) < NUM_LOOKS) <= 0.05
    assert alarm_at([-0.1] * 50, error=error) is None
    assert alarm_at(-0.01 * LOOKS, error=error) is None


def test_a_chance_rise_from_zero_is_nothing_to_fall_from():
    # MI and standard errors of a GRPO run on `code` whose reasoning was stock phrases. Looks 3 to 5
    # are at 0.010 with an error of sqrt(0.0089^2 + 0.0127^2 + 0.0012^2) / 3 = 0.0052: less than two
    # errors above 0, though 14 times the error of a typical level.
    series = [
        *[(0.0014, 0.0019), (0.0021, 0.0006), (0.0151, 0.0089), (0.0139, 0.0127)],
        *[(0.0009, 0.0012), (0.0010, 0.0011), (0.0000, 0.0005)],
    ]
    watch = CollapseAlarm()
    assert [watch.update(s, mi, 1.0, error) for s, (mi, error) in enumerate(series)] == [None] * 7
    assert watch.has_nothing_to_lose


def test_a_fall_from_a_little_information_that_was_really_there_is_seen():
    series = [*[(0.015, 0.002)] * 4, *[(0.001, 0.001)] * 3]
    watch = CollapseAlarm()
    for step, (mi, error) in enumerate(series):
        watch.update(step, mi, 1.0, error)
    assert watch.alarm is not None and not watch.has_nothing_to_lose


def test_whether_there_is_something_to_lose_is_said_from_the_fourth_look_on():
    watch = CollapseAlarm()
    told = []
    for step in range(8):
        watch.update(step, 0.001 if step < 5 else 0.2, 1.0, 0.01)
        told.append(watch.has_nothing_to_lose)
    # The sixth look alone lifts its level to 0.067, 4.5 errors of 0.0058 above 0.
    assert told == [False] * 3 + [True] * 2 + [False] * 3


def slow_alarm(series: list[float], error: float | None) -> int | None:
    """The rule of the module, look by look in plain Python."""
    for end in range(4, len(series) + 1):
        seen = series[:end]
        levels = [statistics.fmean(seen[i : i + 3]) for i in range(end - 2)]
        parts = [levels, levels[-32:]]
        held = max(sorted(x, reverse=True)[math.ceil(len(x) / 4) - 1] for x in parts)
        steps = [abs(b - a) for a, b in itertools.pairwise(seen)]
        each = 1.4826 * statistics.median(steps) / math.sqrt(2) if error is None else error
        room = 4.5 * each / math.sqrt(3)
        first_error = 0.2 * abs(seen[0]) if error is None else max(error, 0.1 * abs(seen[0]))
        references = [(held, 0.38)] + [(seen[0] - 2 * first_error, 0.28)] * (end <= 8)
        limits = [min(share * ref, ref - room) for ref, share in references if ref > room]
        if limits and levels[-1] <= max(limits):
            return end - 1
    return None


def test_the_alarm_goes_off_where_a_plain_loop_over_its_rule_does():
    rng = np.random.default_rng(23)
    found = set()
    for _ in range(150):
        base = np.clip(1 - (np.arange(60) - rng.integers(1, 50)) / rng.integers(1, 20), 0.2, 1)
        mi = (base + rng.choice([0.0, 0.05, 0.3]) * rng.normal(size=60)).tolist()
        error = (None, 0.05, 0.2)[rng.integers(3)]
        step = alarm_at(mi, error=error)
        assert step == slow_alarm(mi, error)
        found.add(step)
    assert len(found) > 15


def test_alarm_goes_off_once():
    watch = CollapseAlarm()
    fired = [watch.update(step, mi, 1.0) for step, mi in enumerate(fall(40, 20).tolist())]
    assert sum(alarm is not None for alarm in fired) == 1
    assert watch.alarm in fired


def test_a_look_without_an_error_counts_as_typical_and_does_not_undo_those_of_others():
    mi = [1.0] * 8 + [0.2] * 4
    errors = [0.05, None, 0.05, 0.06, 0.04, None, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05]
    holes, full = CollapseAlarm(), CollapseAlarm()
    for step, (x, error) in enumerate(zip(mi, errors, strict=True)):
        holes.update(step, x, 1.0, error)
        full.update(step, x, 1.0, 0.05 if error is None else error)
    assert holes.alarm is not None and holes.alarm == full.alarm
    # The median of 0.05 over the root of three looks.
    assert holes.alarm.mi_level_se == pytest.approx(0.05 / 3**0.5)


def test_alarm_continues_from_its_saved_state():
    mi = (fall(40, 20) + noise(0.1, 0.0, seed=1, num_series=1)[0]).tolist()
    whole = CollapseAlarm()
    expected = [whole.update(step, x, 1.0, 0.1) for step, x in enumerate(mi)]
    for cut in (3, 45, 90):
        begun, resumed = CollapseAlarm(), CollapseAlarm()
        first = [begun.update(step, x, 1.0, 0.1) for step, x in enumerate(mi[:cut])]
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        rest = [resumed.update(step, x, 1.0, 0.1) for step, x in enumerate(mi[cut:], start=cut)]
        assert first + rest == expected
        assert resumed.alarm == whole.alarm


def test_state_is_plain_json_whatever_numbers_came_in():
    watch = CollapseAlarm()
    for step, mi in enumerate(np.linspace(1, 0, 20, dtype=np.float32)):
        given = (np.int64(step), mi, np.float32(1.0), np.float32(0.01))
        watch.update(*given)  # pyright: ignore[reportArgumentType]
    assert watch.alarm is not None
    assert type(watch.alarm.step) is int
    resumed = CollapseAlarm()
    resumed.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert resumed.alarm == watch.alarm


def test_alarm_refuses_what_it_cannot_use():
    with pytest.raises(MooredError, match="step 7"):
        CollapseAlarm().update(7, math.nan, 1.0)
    with pytest.raises(MooredError, match="standard_error=inf at step 8"):
        CollapseAlarm().update(8, 1.0, 1.0, math.inf)
    with pytest.raises(MooredError, match="max_share must lie"):
        AlarmRule(max_share=1.5)


def longer(of_sequence: np.ndarray, length: np.ndarray, *, knows: bool = True) -> CollapseAlarm:
    """Looks at MI that is spread over the tokens of longer reasonings, with AR(1) noise of 0.5."""
    watch = CollapseAlarm()
    for step, (mi, tokens) in enumerate(zip(of_sequence, length, strict=True)):
        error = 0.2 * math.sqrt(1 - 0.5**2)
        watch.update(step, mi / tokens, 1.0, error / tokens, tokens if knows else None)
    return watch


@pytest.mark.parametrize("times", [1.8, 3.0, 8.0])
def test_reasonings_that_say_the_same_in_more_words_raise_no_alarm(times):
    """From look 15 on they grow, in 40 looks; MI per token falls as much."""
    length = 30.0 * np.clip(times ** ((LOOKS - 15) / 40), 1.0, times)
    series = 1.0 + noise(0.2, 0.5, seed=4, num_series=20)
    assert not any(longer(each, length).alarm for each in series)
    without = sum(longer(each, length, knows=False).alarm is not None for each in series)
    assert without == 20 if times > 2.0 else without > 0


def test_a_fall_of_longer_reasonings_is_seen_when_mi_times_length_falls_too():
    length = 30.0 * np.clip(2.0 ** ((LOOKS - 15) / 10), 1.0, 4.0)
    series = 1.0 + noise(0.2, 0.5, seed=5, num_series=20)
    true = np.where(LOOKS < 50, 1.0, 0.1)
    steps = [longer(each * true, length).alarm for each in series]
    found = [alarm.step for alarm in steps if alarm is not None]
    assert len(found) == 20 and min(found) >= 50 and statistics.median(found) <= 54


def test_reasonings_that_become_shorter_are_judged_per_token_as_before():
    length = np.where(LOOKS < 20, 90.0, 20.0)
    assert longer(length, length).alarm is None  # of a sequence it falls to two ninths
    fallen = np.where(LOOKS < 20, 90.0, 1.0)
    seen, plain = longer(fallen, length).alarm, longer(fallen, length, knows=False).alarm
    assert seen == plain is not None


def test_lengths_survive_a_saved_state_and_may_be_missing_from_an_old_one():
    length = 30.0 * np.clip(2.0 ** ((LOOKS - 15) / 10), 1.0, 8.0)
    whole = longer(np.full(30, 30.0), length[:30])
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = CollapseAlarm()
    resumed.load_state_dict(state)
    for step in range(30, 60):
        assert resumed.update(step, 30.0 / length[step], 1.0, 0.01, length[step]) is None
    del state["lengths"]
    resumed.load_state_dict(state)
    assert resumed.update(30, 30.0 / length[30], 1.0, 0.01, length[30]) is not None
