"""RV statistics, triage and advice on batches small enough to check by eye."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.algo import advise, triage
from moored.algo.snr import Recommendation
from moored.errors import MooredError

NAN = math.nan


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


def test_groups_without_two_rewards_do_not_make_variance_look_bimodal():
    # Four groups of RV 1/4 each, and four of which nothing is known: not a spread of 0 and 1/4.
    nan = float("nan")
    advice = advise([[1, 0]] * 4 + [[nan, nan]] * 3 + [[1, nan]])
    assert advice.rv.variances.tolist() == [0.25] * 4 + [0.0] * 4
    assert (advice.rv.mean, advice.rv.std_over_mean, advice.rv.zero_fraction) == (0.25, 0.0, 0.0)
    assert advice.std_over_mean_interval == (0.0, 0.0)
    assert advice.recommendation is Recommendation.NO_FILTER
    # They do not count as groups from which the spread is read, either.
    few = advise([[1, 0], [1, 1], [0, 1]] + [[nan, nan]] * 3)
    assert few.recommendation is Recommendation.MORE_GROUPS
    assert advise([[nan, nan], [1, nan]]).recommendation is Recommendation.NO_SIGNAL


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


def test_update_share_must_be_a_share():
    with pytest.raises(MooredError, match="update_share"):
        advise([[1, 0]], update_share=2)


def test_triage_equals_reading_each_group_by_eye():
    rng = np.random.default_rng(8)
    for _ in range(60):
        rewards = rng.choice([0.0, 0.5, 1.0], (10, 1)) + np.zeros((10, 3))
        rewards[rng.random(10) < 0.3, 0] += 0.04  # variance 3.6e-4: low beside 2/9, not zero
        rewards[:2] = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
        behaviours = rng.choice(["u", "v"], (10, 3), p=[0.8, 0.2]).tolist()
        expected = {"too_easy": [], "too_hard": [], "reward_blind": [], "unexplained": []}
        high, low = float(rewards.max()), 0.0
        for i in range(2, 10):
            if all(r >= high - 0.1 * (high - low) for r in rewards[i]):
                expected["too_easy"].append(i)
            elif all(r <= low + 0.1 * (high - low) for r in rewards[i]):
                expected["too_hard"].append(i)
            else:
                cause = "reward_blind" if len(set(behaviours[i])) > 1 else "unexplained"
                expected[cause].append(i)
        causes = triage(rewards, behaviours=behaviours)
        assert {name: getattr(causes, name).tolist() for name in expected} == expected


@pytest.mark.parametrize(
    ("num_varied", "num_flat", "recommendation"),
    [
        # RV is 1/4 or 0: Std/Mean = sqrt(flat / varied).
        (4, 4, Recommendation.FILTER),  # 1.00
        (11, 10, Recommendation.TRY_FILTER),  # 0.95
        (11, 3, Recommendation.TRY_FILTER),  # 0.52
        (12, 3, Recommendation.NO_FILTER),  # 0.50
    ],
)
def test_advice_turns_at_its_stated_ratios(num_varied, num_flat, recommendation):
    rewards = [[1, 0]] * num_varied + [[0, 0]] * num_flat
    advice = advise(rewards)
    assert advice.rv.std_over_mean == pytest.approx(math.sqrt(num_flat / num_varied))
    assert advice.recommendation is recommendation


def test_more_than_a_quarter_of_blind_groups_asks_for_another_reward():
    for num_blind, is_blind in ((2, False), (3, True)):
        rewards = [[0.5, 0.5]] * num_blind + [[1, 0]] * (8 - num_blind)
        advice = advise(rewards, behaviours=[["a", "b"]] * 8)
        assert (advice.recommendation is Recommendation.FIX_REWARD) == is_blind


CAUSES = ("too_easy", "too_hard", "reward_blind", "unexplained", "errored")


def causes_of(*args, **options) -> dict[str, list[int]]:
    found = triage(*args, **options)
    return {name: rows for name in CAUSES if (rows := getattr(found, name).tolist())}


def test_a_group_without_any_reward_is_neither_easy_nor_hard():
    rewards = [[NAN, NAN], [1, 1], [0, 0], [1, 0]]
    assert causes_of(rewards) == {"errored": [0], "too_easy": [1], "too_hard": [2]}
    assert triage(rewards).num_low == 3
    assert causes_of([[NAN, NAN], []]) == {"errored": [0, 1]}
    assert "1 of 4 groups have no reward" in " ".join(advise(rewards).reasons)


def test_what_errored_trajectories_did_does_not_count_as_behaviour():
    rewards = [[0.5, 0.5, NAN], [0.5, 0.5, NAN], [1, 0, 0]]
    behaviours = [["a", "a", "crash"], ["a", "b", "crash"], ["a", "b", "c"]]
    assert causes_of(rewards, behaviours=behaviours) == {"unexplained": [0], "reward_blind": [1]}
    flat, ids = [0.5, NAN, 0.5, 1, 0], [0, 0, 0, 1, 1]
    assert causes_of(flat, ids, behaviours=["a", "crash", "a", "u", "v"]) == {"unexplained": [0]}


def test_behaviours_of_ragged_groups_come_as_rows_too():
    rewards = [[0.5, 0.5, 0.5], [], [0.5, 0.5], [1, 0]]
    behaviours = [["a", "a", "b"], [], ["a", "a"], ["a", "b"]]
    found = {"reward_blind": [0], "unexplained": [2], "errored": [1]}
    assert causes_of(rewards, behaviours=behaviours) == found
    assert causes_of(rewards, behaviours=[np.array(row) for row in behaviours]) == found


@pytest.mark.parametrize(
    ("rewards", "behaviours", "message"),
    [
        ([[1, 1], [0, 0]], ["ab", "ab"], r"behaviours\[0\] must be a row"),
        ([[1, 1], [0, 0]], [["a", "b"], 7], r"behaviours\[1\] must be a row"),
        ([[1, 1], [0, 0]], [["a", "b"], ["a"]], r"behaviours\[1\] has 1 entries for 2"),
        ([[1, 1], [0]], [["a", "b"], ["a", "b"]], r"behaviours\[1\] has 2 entries for 1"),
        ([[1, 1], [0, 0]], [["a", "b"]], "1 rows for 2 groups"),
    ],
)
def test_behaviours_laid_out_otherwise_than_rewards_are_refused(rewards, behaviours, message):
    with pytest.raises(MooredError, match=message):
        triage(rewards, behaviours=behaviours)


def test_success_of_ragged_groups_must_fit_row_by_row():
    assert causes_of([[3, 3], [3]], success=[[1, 1], [0]]) == {"too_easy": [0], "too_hard": [1]}
    with pytest.raises(MooredError, match="success"):
        triage([[3, 3], [3]], success=[[1], [1, 1]])


def test_the_top_and_bottom_tenth_of_the_reward_range_are_success_and_failure():
    # Range -2 to 8: success from 7 up, failure up to -1.
    constant = [7.01, 6.99, -0.99, -1.01, 3.0]
    rewards = [[8, -2], *([r, r] for r in constant)]
    assert causes_of(rewards) == {"too_easy": [1], "too_hard": [4], "unexplained": [2, 3, 5]}


def test_low_variance_is_relative_to_the_largest_of_the_batch():
    # RV 1/4, then (d/2)^2 for a difference d: 0.0025 is 1 % of 1/4 at d = 0.1.
    rewards = [[1, 0], [0.5, 0.599], [0.5, 0.601]]
    assert causes_of(rewards) == {"unexplained": [1]}
    assert causes_of(rewards, low=0.02) == {"unexplained": [1, 2]}


def test_a_blind_batch_without_any_variance_asks_for_another_reward():
    rewards = [[0, 0], [1, 1], *[[0.5, 0.5]] * 4]
    blind = advise(rewards, behaviours=[["a", "b"]] * 6)
    assert blind.rv.mean == 0
    assert blind.recommendation is Recommendation.FIX_REWARD
    assert advise(rewards, behaviours=[["a", "a"]] * 6).recommendation is Recommendation.NO_SIGNAL
    mixed = advise([[3, 3]] * 4, success=[[1, 0]] * 4, behaviours=[["a", "b"]] * 4)
    assert mixed.recommendation is Recommendation.FIX_REWARD


def test_advice_wants_as_many_groups_as_it_is_told():
    rewards = [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert advise(rewards).recommendation is Recommendation.FILTER
    assert advise(rewards[:3]).recommendation is Recommendation.MORE_GROUPS
    assert advise(rewards, min_groups=5).recommendation is Recommendation.MORE_GROUPS
