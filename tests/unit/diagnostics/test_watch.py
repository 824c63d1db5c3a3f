"""One series of reports: its smoothing, verdict and alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moored.diagnostics import CollapseReport, CollapseWatch, Regime, Verdict, information
from moored.errors import MooredError


def report(gap: float) -> CollapseReport:
    """Eight reasonings of one token, `gap` nats less likely after a prompt not their own."""
    return information(-1.0 - gap * (1.0 - np.eye(8)), range(8), np.ones(8))


def test_the_spread_is_smoothed_with_the_decay_that_was_asked_for():
    watch = CollapseWatch(ema_decay=0.5)
    uneven = information(np.log([[0.7, 0.1], [0.2, 0.4]]), range(2), np.ones(2))
    first = watch.update(1, uneven).report
    assert first.marginal_std_ema == uneven.marginal_std > 0.0
    second = watch.update(2, report(4.0)).report  # all its marginals are equal
    assert second.marginal_std == pytest.approx(0.0)
    assert second.marginal_std_ema == pytest.approx(0.5 * uneven.marginal_std)


def test_a_fall_of_mi_changes_the_verdict_and_sets_off_the_alarm_once():
    watch = CollapseWatch()
    found = [watch.update(step, report(4.0 if step < 10 else 0.0)) for step in range(1, 21)]
    collapsed = [Regime.TEMPLATE_COLLAPSE] * 10
    assert [look.regime for look in found] == [*[Regime.DIVERSE] * 9, None, *collapsed]
    assert found[9].verdict is Verdict.CANNOT_TELL and "the next look decides" in found[9].why
    assert found[10].verdict is Verdict.COLLAPSED
    # At the eleventh look two of the last three are zero, and so is their median.
    assert [look.alarm.step for look in found if look.alarm is not None] == [11]
    assert watch.alarm == found[10].alarm


def test_a_look_without_a_step_has_a_regime_and_no_alarm():
    watch = CollapseWatch()
    found = [watch.update(None, report(4.0 if look < 10 else 0.0)) for look in range(20)]
    assert found[-1].regime is Regime.TEMPLATE_COLLAPSE
    assert watch.alarm is None


def test_a_resumed_series_goes_on_as_if_it_had_not_stopped():
    whole, begun, resumed = CollapseWatch(), CollapseWatch(), CollapseWatch()
    gaps = [4.0] * 9 + [0.0] * 6
    expected = [whole.update(step, report(gap)) for step, gap in enumerate(gaps)]
    found = [begun.update(step, report(gap)) for step, gap in enumerate(gaps[:10])]
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    later = enumerate(gaps[10:], start=10)
    assert found + [resumed.update(step, report(gap)) for step, gap in later] == expected
    assert resumed.alarm == whole.alarm is not None


def test_the_scatter_of_two_prompts_is_not_taken_for_a_fall():
    """Their standard errors near 0 made any fall look certain, in most of such series."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(20):
        watch = CollapseWatch()
        for step in range(30):
            points, columns = rng.normal(size=2), np.arange(16) % 2
            copies = points[columns] + 0.3 * rng.normal(size=16)
            logp = -0.5 * ((copies[:, None] - points) / 0.3) ** 2
            watch.update(step, information(logp, columns, np.full(16, 5), permutations=0))
        alarms += watch.alarm is not None
    assert alarms <= 7


def test_a_decay_of_one_is_refused():
    with pytest.raises(MooredError, match="decay"):
        CollapseWatch(ema_decay=1.0)
