"""The streaming filter on streams short enough to decide by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from moored.algo import StreamingFilter
from moored.errors import MooredError

NAN = math.nan


def test_groups_above_the_cut_of_the_window_are_kept():
    stream = StreamingFilter(0.9, window=4, warmup=0)
    # [4]: keep. [4, 1]: 4.5 of 5 needed, 1 is the cut and 4 are kept: keep. [4, 1, 0]: zero.
    # [4, 1, 0, 0.2]: 4.68 of 5.2, the cut is 1: drop. [1, 0, 0.2, 0.2]: 1.26 of 1.4, the cut is
    # 0.2 and 1 is kept: keep.
    scores = (4, 1, 0, 0.2, 0.2)
    assert [stream.offer_score(s) for s in scores] == [True, True, False, False, True]


def test_of_groups_that_tie_as_many_are_kept_as_the_mass_needs():
    stream = StreamingFilter(0.5, window=10, warmup=0)
    # Before each offer the kept mass is 0 1 1 2 2 3, half of the mass with it 0.5 1 1.5 2 2.5 3.
    assert [stream.offer_score(1.0) for _ in range(6)] == [True, False] * 3


def test_a_decision_that_left_the_window_no_longer_counts():
    stream = StreamingFilter(0.5, window=2, warmup=0)
    # Windows of two: kept before are 0, 1, 0, 1 of 0.5, 1, 1, 1 needed.
    assert [stream.offer_score(1.0) for _ in range(4)] == [True, False, True, False]


def test_rewards_are_scored_by_their_variance_and_missing_ones_left_out():
    stream = StreamingFilter(0.9, warmup=0)
    assert stream.offer([1, 0, 1, 0])
    assert not stream.offer([1, 1, 1, 1])
    assert not stream.offer([1, NAN])
    assert not stream.offer([])
    assert stream.state_dict()["scores"] == [0.25, 0, 0, 0]


def test_rewards_that_differ_by_float32_rounding_are_equal():
    rewards = np.array([-1.0, np.sum(np.full(10, -0.1, dtype=np.float32))], dtype=np.float32)
    assert not StreamingFilter(0.9).offer(rewards)


def test_the_score_can_be_another():
    stream = StreamingFilter(0.9, score="std", ddof=1)
    stream.offer([3, 0, 0])  # sample variance 3
    assert stream.state_dict()["scores"] == pytest.approx([math.sqrt(3)])


def test_warm_up_keeps_all_but_zero_scores():
    stream = StreamingFilter(0.5, warmup=3)
    assert [stream.offer_score(s) for s in (9, 0, 1, 1)] == [True, False, True, False]


def test_kept_mass_stays_near_its_target_where_most_scores_tie():
    rng = np.random.default_rng(0)
    rewards = (rng.random((2000, 4)) < 0.3).astype(float)  # RV is 0, 3/16 or 4/16
    stream = StreamingFilter(0.8, window=64)
    kept = np.array([stream.offer(row) for row in rewards])
    variances = rewards.var(axis=1)
    assert variances[kept].sum() / variances.sum() == pytest.approx(0.8, abs=0.015)


def test_all_that_varies_is_kept_at_one_and_nothing_at_zero():
    everything, nothing = StreamingFilter(1.0, warmup=0), StreamingFilter(0.0, warmup=0)
    scores = [3.0, 0.5, 0.0, 0.5, 1e-9]
    assert [everything.offer_score(s) for s in scores] == [True, True, False, True, True]
    assert not any(nothing.offer_score(s) for s in scores)


def test_a_stream_continues_from_its_saved_state():
    scores = (np.random.default_rng(0).integers(0, 4, 60) / 4).tolist()
    whole, first, second = (StreamingFilter(0.8, window=16) for _ in range(3))
    expected = [whole.offer_score(s) for s in scores]
    begun = [first.offer_score(s) for s in scores[:25]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + [second.offer_score(s) for s in scores[25:]] == expected


def test_what_cannot_be_scored_is_refused_and_leaves_the_stream_as_it_was():
    stream = StreamingFilter(0.9)
    stream.offer([1, 0])
    before = stream.state_dict()
    for score in (NAN, math.inf, -1.0):
        with pytest.raises(MooredError, match="finite and >= 0"):
            stream.offer_score(score)
    with pytest.raises(MooredError, match=r"one group, a flat list, got shape \(1, 2\)"):
        stream.offer([[1, 0]])
    assert stream.state_dict() == before


def test_settings_that_make_no_sense_are_named():
    with pytest.raises(MooredError, match="share"):
        StreamingFilter(-0.5)
    with pytest.raises(MooredError, match="window must be >= 1"):
        StreamingFilter(window=0)
    with pytest.raises(MooredError, match="did you mean 'variance'"):
        StreamingFilter(score="varianc")
