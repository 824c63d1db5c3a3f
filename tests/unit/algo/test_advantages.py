"""Advantages worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.algo import bilevel_gae, dr_grpo, gae, grpo, reinforce_pp, rloo, whiten
from moored.errors import MooredError

NAN = math.nan


def test_grpo_divides_by_the_group_std_plus_eps():
    # mean 1/4, std sqrt(3)/4
    std = math.sqrt(3) / 4
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (std + 1e-6)
    np.testing.assert_allclose(grpo([[1, 0, 0, 0]]), [expected], rtol=1e-12)


def test_grpo_with_ddof_1_uses_the_sample_std():
    np.testing.assert_allclose(grpo([[1, 0]], ddof=1), [np.array([0.5, -0.5]) / (0.5**0.5 + 1e-6)])


def test_groups_do_not_mix():
    flat = grpo([1, 0, 7, 5], ["a", "b", "b", "a"])
    np.testing.assert_allclose(flat, np.array([-1, -1, 1, 1]), rtol=1e-5)


def test_constant_groups_get_advantage_zero():
    for estimator in (grpo, dr_grpo, rloo):
        np.testing.assert_allclose(estimator([[0.1, 0.1, 0.1]]), 0, atol=1e-9)


def test_dr_grpo_only_subtracts_the_mean():
    assert dr_grpo([[1, 0, 0, 0]]).tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_rloo_subtracts_the_mean_of_the_others():
    # 4 - (1 + 2) / 2, 1 - (4 + 2) / 2, 2 - (4 + 1) / 2
    np.testing.assert_allclose(rloo([[4, 1, 2]]), [[2.5, -2, -0.5]])
    assert rloo([5], ["alone"]).tolist() == [0]


def test_reinforce_pp_whitens_rewards_to_go_over_all_sampled_tokens():
    # Three tokens that end in 1 and one that ends in 5: mean 2, variance 3.
    rewards, mask = [[0, 0, 1], [5, 7, 0]], [[1, 1, 1], [1, 0, 0]]
    expected = np.array([[-1, -1, -1], [3, 0, 0]]) / math.sqrt(3)
    np.testing.assert_allclose(reinforce_pp(rewards, mask), expected, rtol=1e-7)


def test_reinforce_pp_discounts_rewards_to_go():
    # Returns 1 + 0.5 * 2 = 2 and 2, then 0 and 4 of the other row: mean 2, variance 2.
    found = reinforce_pp([[1, 2], [-2, 4]], [[1, 1], [1, 1]], 0.5)
    np.testing.assert_allclose(found, np.array([[0, 0], [-2, 2]]) / math.sqrt(2), atol=1e-7)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_nan_rewards_take_no_part_and_get_zero(estimator):
    whole = estimator([1, 0, 0], [0, 0, 0])
    np.testing.assert_allclose(estimator([1, NAN, 0, 0], [0, 0, 0, 0]), np.insert(whole, 1, 0))


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_group_advantages_sum_to_zero(rewards):
    for estimator in (grpo, dr_grpo, rloo):
        assert abs(estimator([rewards]).sum()) < 1e-6


def test_gae_by_hand():
    # gamma 0.9, lam 0.8. A_2 = 1 - 0.4 = 0.6; A_1 = 0.9*0.4 - 0.3 + 0.72*0.6 = 0.492;
    # A_0 = 0.9*0.3 - 0.2 + 0.72*0.492 = 0.42424
    advantages, returns = gae([[0, 0, 1]], [[0.2, 0.3, 0.4]], [[1, 1, 1]], 0.9, 0.8)
    np.testing.assert_allclose(advantages, [[0.42424, 0.492, 0.6]])
    np.testing.assert_allclose(returns, [[0.62424, 0.792, 1.0]])


def test_gae_skips_observation_tokens_whatever_they_hold():
    dense = gae([[0, 0, 1]], [[0.2, 0.3, 0.4]], [[1, 1, 1]], 0.9, 0.8)
    gaps = gae(
        [[9, 0, NAN, 0, 1, 9]],
        [[NAN, 0.2, 7, 0.3, 0.4, NAN]],
        [[0, 1, 0, 1, 1, 0]],
        0.9,
        0.8,
    )
    for with_gaps, without in zip(gaps, dense, strict=True):
        np.testing.assert_allclose(with_gaps[:, [1, 3, 4]], without)
        assert with_gaps[:, [0, 2, 5]].tolist() == [[0, 0, 0]]


def test_gae_with_unit_discounts_is_return_minus_value():
    rewards, values = [[1.0, 2, 3]], [[0.5, 0.5, 0.5]]
    advantages, returns = gae(rewards, values, [[1, 1, 1]], 1, 1)
    np.testing.assert_allclose(returns, [[6, 5, 3]])
    np.testing.assert_allclose(advantages, [[5.5, 4.5, 2.5]])


def test_gae_rows_are_independent():
    values = np.random.default_rng(0).random((2, 5))
    rewards = np.random.default_rng(1).random((2, 5))
    mask = np.array([[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]])
    both = gae(rewards, values, mask, 0.9, 0.7).advantages
    for row in range(2):
        alone = gae(rewards[[row]], values[[row]], mask[[row]], 0.9, 0.7).advantages
        np.testing.assert_allclose(both[[row]], alone)


def test_gae_names_unequal_shapes():
    with pytest.raises(MooredError, match=r"\(1, 2\)"):
        gae([[1, 2]], [[1, 2, 3]], [[1, 1, 1]])


def test_bilevel_gae_by_hand_with_a_zero_reward_turn():
    # Two turns of two tokens; the first earns nothing. gamma_turn 0.5, other discounts 1.
    # Turn level: A_end2 = 1 - 0.4 = 0.6 -> return 1;
    #             A_end1 = 0 + 0.5*0.4 - 0.2 + 0.5*0.6 = 0.3 -> return 0.5.
    # Token level inside each turn: ends 0.5 - 0.2 = 0.3 and 1 - 0.4 = 0.6;
    #             starts 0.2 - 0.1 + 0.3 = 0.4 and 0.4 - 0.3 + 0.6 = 0.7.
    advantages, returns = bilevel_gae(
        [[0, 0, 0, 0, 1]],
        [[0.1, 0.2, 9, 0.3, 0.4]],
        [[1, 1, 0, 1, 1]],
        [[0, 1, 0, 0, 1]],
        gamma_turn=0.5,
    )
    np.testing.assert_allclose(advantages, [[0.4, 0.3, 0, 0.7, 0.6]])
    np.testing.assert_allclose(returns, [[0.5, 0.5, 0, 1, 1]])


def test_bilevel_gae_of_one_turn_is_gae():
    rng = np.random.default_rng(0)
    rewards = np.zeros((1, 4))
    rewards[0, -1] = 2
    values, mask = rng.random((1, 4)), np.ones((1, 4))
    ends = np.array([[0, 0, 0, 1]])
    plain = gae(rewards, values, mask, 0.9, 0.8)
    two = bilevel_gae(rewards, values, mask, ends, 0.9, 0.8)
    np.testing.assert_allclose(two.advantages, plain.advantages)


def test_bilevel_gae_rejects_turn_ends_that_make_no_sense():
    values = [[0.0, 0.0, 0.0]]
    with pytest.raises(MooredError, match="token 1 of row 0"):
        bilevel_gae(values, values, [[1, 0, 1]], [[0, 1, 1]])
    with pytest.raises(MooredError, match="after its last turn end"):
        bilevel_gae(values, values, [[1, 1, 1]], [[1, 0, 0]])


def test_whiten_uses_masked_entries_only():
    # 3 and 1: mean 2, variance 1
    np.testing.assert_allclose(whiten([[3.0, NAN, 1]], [[1, 0, 1]]), [[1, 0, -1]], rtol=1e-7)
    assert whiten([[1.0, 2.0]], [[0, 0]]).tolist() == [[0, 0]]
    assert np.allclose(whiten([5.0, 5.0]), 0)


def test_with_unit_discounts_a_bootstrap_is_added_to_every_return_of_its_row():
    rewards, values = [[1.0, 2, 3]] * 2, [[0.5, 0.5, 0.5]] * 2
    advantages, returns = gae(rewards, values, np.ones((2, 3)), bootstrap=[0.0, 10.0])
    np.testing.assert_allclose(returns, [[6, 5, 3], [16, 15, 13]])
    np.testing.assert_allclose(advantages, [[5.5, 4.5, 2.5], [15.5, 14.5, 12.5]])


def test_a_bootstrap_is_the_value_after_the_last_sampled_token():
    # lam 0: A_t = r_t + V_next / 2 - V_t. The tokens behind the mask change nothing.
    advantages, _ = gae([[1, 7, 2, 7]], [[3, 9, 4, 9]], [[1, 0, 1, 0]], 0.5, 0.0, bootstrap=[6])
    np.testing.assert_allclose(advantages, [[1 + 2 - 3, 0, 2 + 3 - 4, 0]])


def test_bilevel_gae_bootstraps_the_last_turn_by_hand():
    # As above, but cut off at a value of 2: A_end2 = 1 + 0.5*2 - 0.4 = 1.6 -> return 2;
    # A_end1 = 0 + 0.5*0.4 - 0.2 + 0.5*1.6 = 0.8 -> return 1.
    advantages, returns = bilevel_gae(
        [[0, 0, 0, 0, 1]],
        [[0.1, 0.2, 9, 0.3, 0.4]],
        [[1, 1, 0, 1, 1]],
        [[0, 1, 0, 0, 1]],
        gamma_turn=0.5,
        bootstrap=[2.0],
    )
    np.testing.assert_allclose(advantages, [[0.9, 0.8, 0, 1.7, 1.6]])
    np.testing.assert_allclose(returns, [[1, 1, 0, 2, 2]])


def test_a_bootstrap_has_one_value_per_row():
    with pytest.raises(MooredError, match=r"one value per row, 1, got \(2,\)"):
        gae([[1.0]], [[1.0]], [[1]], bootstrap=[1.0, 2.0])
