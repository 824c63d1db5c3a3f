"""Gain and reward inside prompts, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moored.diagnostics import Worth, gain_reward_correlation
from moored.diagnostics.report import Interval
from moored.errors import MooredError


def test_two_prompts_by_hand():
    # Centred, prompt 0: gains -1, 1 and rewards -1/2, 1/2; prompt 1: -1, 1, 0 and 1/3, 1/3, -2/3.
    found = gain_reward_correlation([0, 2, 5, 7, 6], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1])
    assert found is not None
    # Σ gg = 2 + 2, Σ rr = 1/2 + 2/3, Σ gr = 1 + 0.
    assert found.correlation == pytest.approx(1 / math.sqrt(4 * (1 / 2 + 2 / 3)))
    # Without prompt 0: 0; without prompt 1: 1 / sqrt(2 · 1/2) = 1. √(1/2 · 2 · 1/4) = 1/2.
    assert found.standard_error == pytest.approx(0.5)
    assert (found.num_prompts, found.num_reasonings) == (2, 5)
    assert found.metrics("x") == {
        "x/gain_reward_correlation": found.correlation,
        "x/num_rewarded_prompts": 2.0,
        "x/gain_reward_correlation_se": found.standard_error,
    }
    assert Worth.from_log(found.metrics("x"), "x") == replace(found, num_reasonings=None)
    assert Worth.from_log(found.metrics("x"), "y") is None


def test_intervals_are_by_student_s_t_and_stay_within_what_correlations_can_be():
    worth = Worth(correlation=0.5, standard_error=0.1, num_prompts=3)
    # t of 2 degrees of freedom is 4.303.
    assert worth.interval.low == pytest.approx(0.5 - 0.4303, abs=1e-4)
    assert worth.interval.high == pytest.approx(0.9303, abs=1e-4)
    assert replace(worth, standard_error=0.2).interval.high == 1.0
    alone = Worth(correlation=0.5, standard_error=None, num_prompts=1)
    assert alone.interval == Interval(-1.0, 1.0)


def test_differences_between_prompts_do_not_count():
    gains, rewards = [0.0, 0.0, 9.0, 9.0], [0, 1, 10, 11]
    assert gain_reward_correlation(gains, rewards, [0, 0, 1, 1]) is None
    gains = [0.0, 1.0, 9.0, 8.0]
    found = gain_reward_correlation(gains, rewards, [0, 0, 1, 1])
    assert found is not None and found.correlation == pytest.approx(0.0)


def test_prompts_without_varying_rewards_and_lost_episodes_are_left_out():
    gains = [0, 1, 0, 1, 3, 0, 1]
    rewards = [0, 1, 5, 5, math.nan, 0, math.nan]
    found = gain_reward_correlation(gains, rewards, [0, 0, 1, 1, 0, 2, 2])
    assert found is not None and found.correlation == pytest.approx(1.0)
    assert (found.num_prompts, found.num_reasonings, found.standard_error) == (1, 2, None)
    assert gain_reward_correlation([0, 1], [1, 1], [0, 0]) is None
    assert gain_reward_correlation([], [], []) is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rewards_that_differ_by_rounding_do_not_vary(dtype):
    # Ten moves for -0.1 each; another order of the sum misses -1 by a bit.
    other = float(np.cumsum(np.full(10, -0.1, dtype))[-1])
    assert other != -1.0
    gains, rewards = [0, 1, 5, 9], [0, 1, -1.0, other]
    found = gain_reward_correlation(gains, rewards, [0, 0, 1, 1])
    assert found is not None and (found.correlation, found.num_prompts) == (1.0, 1)
    assert gain_reward_correlation(gains[2:], rewards[2:], [1, 1]) is None


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(MooredError, match=r"one length, got \(2,\), \(1,\) and \(2,\)"):
        gain_reward_correlation([0, 1], [1], [0, 0])


def test_the_standard_error_is_the_spread_of_fresh_samples():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        gains = rng.normal(size=(16, 8)) + rng.normal(size=(16, 1))
        rewards = (0.5 * gains + rng.normal(size=gains.shape) > 1.0).astype(float)
        prompts = np.repeat(np.arange(16), 8)
        worth = gain_reward_correlation(gains.ravel(), rewards.ravel(), prompts)
        assert worth is not None and worth.standard_error is not None
        found.append((worth.correlation, worth.standard_error))
    correlations, errors = np.array(found).T
    assert errors.mean() == pytest.approx(correlations.std(), rel=0.15)
