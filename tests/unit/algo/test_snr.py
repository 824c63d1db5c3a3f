"""RV statistics, triage and advice on batches small enough to check by eye."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.algo import advise, reward_variance, triage
from moored.algo.snr import Recommendation
from moored.errors import MooredError

NAN = math.nan


def test_statistics_of_reward_variance_by_hand():
    rv = reward_variance([[1, 0], [1, 1], [0, 0], [1, 0]])  # RV: 1/4, 0, 0, 1/4
    assert rv.variances.tolist() == [0.25, 0, 0, 0.25]
    assert (rv.mean, rv.std, rv.std_over_mean, rv.zero_fraction) == (0.125, 0.125, 1.0, 0.5)
    assert rv.kept_fraction(0.9) == 0.5
    assert rv.kept_fraction(0.5) == 0.25


def test_ratio_is_zero_without_any_variance_and_when_all_groups_are_alike():
    assert reward_variance([[1, 1], [0, 0]]).std_over_mean == 0
    assert reward_variance([[1, 0], [0, 1]]).std_over_mean == 0


def test_triage_sorts_low_variance_groups_by_cause():
    rewards = [[1, 1], [0, 0], [0.5, 0.5], [0.5, 0.5], [1, 0]]
    behaviours = [["a", "b"], ["a", "b"], ["a", "b"], ["a", "a"], ["a", "b"]]
    causes = triage(rewards, behaviours=behaviours)
    assert causes.too_easy.tolist() == [0]
    assert causes.too_hard.tolist() == [1]
    assert causes.reward_blind.tolist() == [2]
    assert causes.unexplained.tolist() == [3]
    assert causes.num_low == 4
    assert causes.share("too_easy") == 0.2


def test_without_behaviours_nothing_is_called_reward_blind():
    causes = triage([[1, 1], [0.5, 0.5], [0, 0]])
    assert causes.reward_blind.tolist() == []
    assert causes.unexplained.tolist() == [1]


def test_given_success_decides_and_mixed_success_for_one_reward_is_blind():
    causes = triage(
        [[3, 3], [3, 3], [3, 3]],
        success=[[1, 1], [0, 0], [1, 0]],
        behaviours=[["a", "b"]] * 3,
    )
    assert [c.tolist() for c in (causes.too_easy, causes.too_hard, causes.reward_blind)] == [
        [0],
        [1],
        [2],
    ]


def test_success_reward_is_a_threshold():
    causes = triage([[0.1, 0.1], [1, 1], [1, 0]], success_reward=1.0)
    assert (causes.too_easy.tolist(), causes.too_hard.tolist()) == ([1], [0])


def test_a_batch_of_one_reward_is_easy_when_positive_and_hard_otherwise():
    assert triage([[2, 2], [2, 2]]).too_easy.tolist() == [0, 1]
    assert triage([[0, 0], [0, 0]]).too_hard.tolist() == [0, 1]


def test_triage_ignores_errored_trajectories():
    causes = triage([[1, 1, NAN], [0, NAN, 0], [1, 0, 0]])
    assert (causes.too_easy.tolist(), causes.too_hard.tolist()) == ([0], [1])


def test_triage_of_flat_rewards_with_ids():
    causes = triage(
        [1, 0.5, 1, 0.5, 1, 0],
        ["a", "b", "a", "b", "c", "c"],
        behaviours=["u", "u", "v", "v", "w", "w"],
    )
    assert (causes.too_easy.tolist(), causes.reward_blind.tolist()) == ([0], [1])


def test_layouts_that_do_not_match_are_named():
    with pytest.raises(MooredError, match="success"):
        triage([[1, 1]], success=[[1]])
    with pytest.raises(MooredError, match="behaviours"):
        triage([1, 1], [0, 0], behaviours=["a"])


def test_bimodal_variance_earns_the_advice_to_filter():
    advice = advise([[1, 0]] * 3 + [[0, 0]] * 9, update_share=0.5)
    # RV: 3 of 12 groups at 1/4: std/mean = sqrt(1/4 * 3/4) / (1/4) = sqrt(3)
    assert advice.rv.std_over_mean == pytest.approx(math.sqrt(3))
    assert advice.recommendation is Recommendation.FILTER
    assert advice.rho == 0.9
    assert advice.kept_fraction[0.9] == 0.25
    assert advice.step_time_saved is not None
    assert advice.step_time_saved[0.9] == pytest.approx(0.375)
    assert "1.73" in advice.reasons[0]
    assert "9 of 12 groups all fail" in advice.reasons[1]


def test_even_variance_earns_the_advice_not_to_filter():
    advice = advise([[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]])
    assert advice.recommendation is Recommendation.NO_FILTER
    assert advice.rho is None
    assert advice.step_time_saved is None


def test_in_between_the_advice_is_to_try():
    # RV 1/4, 1/4, 1/4, 0 : std/mean = sqrt(3)/4 / (3/4) = 0.577
    advice = advise([[1, 0], [0, 1], [1, 0], [0, 0]])
    assert advice.rv.std_over_mean == pytest.approx(1 / math.sqrt(3))
    assert advice.recommendation is Recommendation.TRY_FILTER


def test_no_variance_at_all_is_no_signal():
    assert advise([[1, 1]] * 6).recommendation is Recommendation.NO_SIGNAL


def test_few_groups_ask_for_more():
    assert advise([[1, 0], [0, 0]]).recommendation is Recommendation.MORE_GROUPS


def test_a_blind_reward_comes_before_any_filter():
    rewards = [[1, 0], [0, 0], *[[0.5, 0.5]] * 4]
    advice = advise(rewards, behaviours=[["a", "b"]] * 6)
    assert advice.recommendation is Recommendation.FIX_REWARD


def test_ratio_interval_holds_the_ratio_and_is_seeded():
    rng = np.random.default_rng(0)
    rv = reward_variance(rng.random((64, 8)) * rng.integers(0, 2, (64, 1)))
    low, high = rv.std_over_mean_interval()
    assert low < rv.std_over_mean < high
    assert (low, high) == rv.std_over_mean_interval()


def test_update_share_must_be_a_share():
    with pytest.raises(MooredError, match="update_share"):
        advise([[1, 0]], update_share=2)
