"""Four regimes, relative to chance and to the start, with hysteresis."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from moored.diagnostics import Regime, RegimeThresholds, RegimeTracker, classify
from moored.errors import MooredError


@dataclass
class Point:
    mi_estimate: float
    conditional_entropy_est: float
    dependence: float = 0.8


@pytest.mark.parametrize(
    ("dependence", "entropy", "regime"),
    [
        (0.8, 1.0, Regime.DIVERSE),
        (0.05, 1.0, Regime.TEMPLATE_COLLAPSE),
        (0.8, 0.01, Regime.COMPRESSED),
        (0.05, 0.01, Regime.LOW_ENTROPY_COLLAPSE),
    ],
)
def test_one_measurement_without_a_start(dependence, entropy, regime):
    assert classify(Point(1.0, entropy, dependence)) is regime


def test_mi_far_below_the_start_is_collapse_even_above_chance():
    assert classify(Point(0.1, 1.0, 0.5), start_mi=1.0) is Regime.TEMPLATE_COLLAPSE
    assert classify(Point(0.3, 1.0, 0.5), start_mi=1.0) is Regime.DIVERSE


def test_entropy_is_low_relative_to_the_start():
    assert classify(Point(1.0, 0.4, 0.8), start_entropy=1.0) is Regime.COMPRESSED
    assert classify(Point(1.0, 0.6, 0.8), start_entropy=1.0) is Regime.DIVERSE


def test_a_low_state_is_left_only_beyond_the_hysteresis():
    tracker = RegimeTracker()
    dependences = [0.5, 0.09, 0.12, 0.14, 0.16, 0.12]
    regimes = [tracker.update(Point(1.0, 1.0, d)) for d in dependences]
    low, high = Regime.TEMPLATE_COLLAPSE, Regime.DIVERSE
    assert regimes == [high, low, low, low, high, high]


def test_tracker_continues_from_its_saved_state():
    points = [Point(1.0, 1.0, 0.5), Point(1.0, 0.2, 0.05), Point(1.0, 0.6, 0.12)]
    whole = RegimeTracker()
    expected = [whole.update(p) for p in points]
    begun, resumed = RegimeTracker(), RegimeTracker()
    first = [begun.update(p) for p in points[:2]]
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert [*first, resumed.update(points[2])] == expected


def test_hysteresis_below_one_is_refused():
    with pytest.raises(MooredError, match="hysteresis"):
        RegimeThresholds(hysteresis=0.5)


def test_hysteresis_holds_on_every_axis():
    low, high = Regime.COMPRESSED, Regime.DIVERSE
    for entropy, before, after in ((0.6, high, high), (0.6, low, low), (0.8, low, high)):
        assert classify(Point(1.0, entropy), start_entropy=1.0, previous=before) is after
    low = Regime.TEMPLATE_COLLAPSE
    for mi, before, after in ((0.25, high, high), (0.25, low, low), (0.35, low, high)):
        assert classify(Point(mi, 1.0), start_mi=1.0, previous=before) is after


def test_entropy_below_the_absolute_floor_is_low_whatever_the_start():
    assert classify(Point(1.0, 0.04), start_entropy=0.04) is Regime.COMPRESSED
    assert classify(Point(1.0, 0.06), start_entropy=0.06) is Regime.DIVERSE


def test_state_is_plain_json_whatever_numbers_came_in():
    tracker = RegimeTracker()
    tracker.update(Point(np.float32(1.0), np.float32(0.5)))  # pyright: ignore[reportArgumentType]
    stored = json.loads(json.dumps(tracker.state_dict()))
    assert stored == {"start_mi": 1.0, "start_entropy": 0.5, "regime": "diverse"}
