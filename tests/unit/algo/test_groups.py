"""Groups as callers lay them out, and what counts as equal rewards."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from moored.algo import dr_grpo, grpo, reward_variance, rloo, select_groups, whiten
from moored.errors import MooredError

NAN = math.nan


def test_an_empty_row_keeps_its_place_and_scores_zero():
    for rows in ([[1, 0], [], [1, 0, 0, 0]], [[], [1, 0], [], [5]], [[1, 0], [], []]):
        expected = [statistics.pvariance(row) if row else 0.0 for row in rows]
        np.testing.assert_allclose(select_groups(rows).scores, expected)
        np.testing.assert_allclose(reward_variance(rows).variances, expected)
    selection = select_groups([[1, 0], [], [1, 0, 0, 0]])
    assert selection.kept.tolist() == [0, 2]
    assert selection.row_mask([0, 1, 2, 2]).tolist() == [True, False, True, True]


def test_rows_that_are_all_empty_are_groups_too():
    assert select_groups([[], []]).scores.tolist() == [0, 0]


def test_advantages_of_ragged_rows_come_back_flat_in_order():
    np.testing.assert_allclose(dr_grpo([[3, 1], [], [5, 5, 2]]), [1, -1, 1, 1, -2])


@pytest.mark.parametrize("values", [["a", "b"], [["a"], ["b", "c"]], [[1, 2], [[3], [4], [5]]]])
def test_values_that_are_no_numbers_are_refused(values):
    with pytest.raises(MooredError, match="values must be numbers"):
        select_groups(values)


@pytest.mark.parametrize(
    "ids",
    [
        [("env", 1), ("env", 1), ("env", 2), ("env", 2)],
        [("env", 1), ("env", 1), ("env", 2, "retry"), ("env", 2, "retry")],
        [("env", (1, 2)), ("env", (1, 2)), ("env", (1,)), ("env", (1,))],
        [1, 1, "1", "1"],
        [None, None, 3, 3],
        np.array([7, 7, 8, 8]),
    ],
)
def test_every_hashable_label_serves_as_group_id_in_selection_and_row_mask(ids):
    selection = select_groups([1, 0, 1, 1], ids)
    assert selection.labels.tolist() == [ids[0], ids[2]]
    assert selection.kept.tolist() == [0]
    assert selection.row_mask(ids).tolist() == [True, True, False, False]
    assert selection.row_mask(list(ids)[::-1]).tolist() == [False, False, True, True]


def test_an_unknown_tuple_is_named():
    with pytest.raises(MooredError, match=r"\('env', 9\)"):
        select_groups([1, 0], [("env", 1)] * 2).row_mask([("env", 9)])


def float32_sum(reward: float, count: int) -> np.float32:
    return np.float32(
        list(itertools.accumulate([np.float32(reward)] * count, lambda a, b: np.float32(a + b)))[-1]
    )


def test_float32_sums_of_the_same_rewards_are_equal():
    total = float32_sum(-0.1, 10)
    assert float(total) != -1.0  # what summing in float32 leaves behind
    rewards = np.array([[total, -1.0, -1.0]], dtype=np.float32)
    for given in (rewards, list(rewards), [rewards[0], np.zeros(2, np.float32)]):
        selection = select_groups(given)
        assert selection.scores[0] == 0
    for estimator in (grpo, dr_grpo, rloo):
        assert estimator(rewards).tolist() == [[0, 0, 0]]
    many = np.array([[float32_sum(0.1, 64), 6.4]], dtype=np.float32)
    assert select_groups(many).scores.tolist() == [0]


def test_small_true_differences_are_kept_in_either_precision():
    rewards = np.array([[1.0, 1.0001]], dtype=np.float32)
    assert select_groups(rewards).scores[0] == pytest.approx(0.25e-8, rel=0.01)
    np.testing.assert_allclose(dr_grpo(rewards), [[-5e-5, 5e-5]], rtol=1e-2)
    # 8 eps of float32 is 9.5e-7: in float64 the same difference is more than rounding.
    close = [1.0, 1.0 + 5e-7]
    assert select_groups([close]).scores[0] == pytest.approx(6.25e-14, rel=1e-6)
    assert select_groups(np.array([close], dtype=np.float32)).scores[0] == 0


@pytest.mark.parametrize("value", [123456789.1, 1e15 / 3, -0.1, 0.0])
@pytest.mark.parametrize("count", [3, 7, 16, 1000])
def test_equal_rewards_of_any_size_have_advantage_exactly_zero(value, count):
    rewards = np.full((2, count), value)
    for estimator in (grpo, dr_grpo, rloo):
        assert not estimator(rewards).any()
    assert not whiten(rewards).any()
    assert not whiten(rewards.astype(np.float32)).any()


def test_one_group_of_equal_rewards_leaves_the_others_alone():
    advantages = grpo([[7e8 / 3] * 3, [1, 0, 0]])
    assert advantages[0].tolist() == [0, 0, 0]
    np.testing.assert_allclose(advantages[1], np.array([2, -1, -1]) / math.sqrt(2), rtol=1e-5)


def test_whole_numbers_are_compared_exactly_enough():
    assert select_groups(np.array([[10**9, 10**9 + 1]])).scores.tolist() == [0.25]
