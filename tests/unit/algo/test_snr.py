"""RV statistics, triage and advice on batches small enough to check by eye."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.algo import advise, grpo, outcome_free_share, reward_variance, triage
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
    advice = advise([[1, 0]] * 12 + [[0, 0]] * 36, update_share=0.5)
    # RV: 12 of 48 groups at 1/4: std/mean = sqrt(1/4 * 3/4) / (1/4) = sqrt(3)
    assert advice.rv.std_over_mean == pytest.approx(math.sqrt(3))
    assert advice.std_over_mean_interval[0] > 1.0
    assert advice.recommendation is Recommendation.FILTER
    assert advice.rho == 0.9
    assert advice.kept_fraction[0.9] == pytest.approx(11 / 48)
    assert advice.step_time_saved is not None
    assert advice.step_time_saved[0.9] == pytest.approx(0.5 * 37 / 48)
    assert "1.73" in advice.reasons[0]
    assert "36 of 48 groups all fail" in advice.reasons[1]


def test_even_variance_earns_the_advice_not_to_filter():
    advice = advise([[1, 0], [0, 1]] * 4)
    assert advice.recommendation is Recommendation.NO_FILTER
    assert advice.rho is None
    assert advice.step_time_saved is None


def test_groups_without_two_rewards_do_not_make_variance_look_bimodal():
    # Eight groups of RV 1/4 each, and four of which nothing is known: not a spread of 0 and 1/4.
    nan = float("nan")
    advice = advise([[1, 0]] * 8 + [[nan, nan]] * 3 + [[1, nan]])
    assert advice.rv.variances.tolist() == [0.25] * 8 + [0.0] * 4
    assert (advice.rv.mean, advice.rv.std_over_mean, advice.rv.zero_fraction) == (0.25, 0.0, 0.0)
    assert advice.std_over_mean_interval == (0.0, 0.0)
    assert advice.recommendation is Recommendation.NO_FILTER
    # They do not count as groups from which the spread is read, either.
    few = advise([[1, 0], [1, 1], [0, 1]] + [[nan, nan]] * 9)
    assert few.recommendation is Recommendation.CANNOT_TELL
    assert advise([[nan, nan], [1, nan]]).recommendation is Recommendation.NO_SIGNAL


def test_a_wide_interval_from_four_groups_does_not_lead_to_a_filter():
    # RV 1/4, 0, 0, 3/16: the ratio alone, 1.02, lies above 1.
    advice = advise([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
    assert advice.rv.std_over_mean > 1.0
    assert advice.recommendation is Recommendation.CANNOT_TELL
    assert advice.groups_needed == 8
    assert advice.reasons[0].startswith("Std/Mean of RV is 1.02 (95% interval ")
    assert "give at least 8" in advice.reasons[0]


def test_an_interval_that_holds_the_bar_cannot_tell_and_says_how_many_groups_would():
    # RV 1/4 in 3 of 12 groups: 1.73, but with so few of them it may be 1.
    pattern = [[1, 0]] * 3 + [[0, 0]] * 9
    advice = advise(pattern)
    assert advice.recommendation is Recommendation.CANNOT_TELL
    low, high = advice.std_over_mean_interval
    assert low <= 1.0 < high
    assert advice.groups_needed is not None
    # Three times the groups of the same kind: the interval narrows, and the bar lies below it.
    assert 12 < advice.groups_needed <= 36
    assert advise(pattern * 3).recommendation is Recommendation.FILTER


def test_a_ratio_at_its_bar_is_not_settled_by_more_groups():
    # RV 1/4 in half of the groups: Std/Mean is 1.
    advice = advise([[1, 0], [0, 0]] * 8)
    assert advice.rv.std_over_mean == pytest.approx(1.0)
    assert advice.recommendation is Recommendation.CANNOT_TELL
    assert advice.groups_needed is None
    assert "too near" in advice.reasons[0]


def test_draws_without_any_variance_do_not_widen_the_interval_of_the_ratio():
    # Two groups, one of which varies: a draw holds it once (ratio 1), twice (0), or not at all.
    low, high = reward_variance([[1, 0], [0, 0]]).std_over_mean_interval()
    assert (low, high) == (0.0, 1.0)
    # One of 24 groups varies: 36 % of the draws miss it. k times gives sqrt(24 / k - 1) >= 2.3.
    low, _ = reward_variance([[1, 0]] + [[0, 0]] * 23).std_over_mean_interval()
    assert low > 2.0


SOLVED, LOST = [10.0, 0.0], [-0.1, -0.2]
"""A group with a success and a failure, and one that differs by the price of a move."""


def test_outcome_free_share_is_the_push_of_groups_that_ended_alike_over_all_of_it():
    advantages = [[1, -1], [2, -2], [3, -3]]
    success = [[1, 0], [0, 0], [1, 1]]
    # |1| + |1| in the group that holds both outcomes, 4 and 6 in the others.
    assert outcome_free_share(advantages, success) == pytest.approx(10 / 12)
    # 1 * 1 + 1 * 1 against 2 * 1 + 2 * 3 and 3 * 2 + 3 * 2.
    tokens = [[1, 1], [1, 3], [2, 2]]
    assert outcome_free_share(advantages, success, tokens=tokens) == pytest.approx(20 / 22)
    flat = outcome_free_share([1, 2, -1, -2], [1, 0, 0, 0], ["a", "b", "a", "b"])
    assert flat == pytest.approx(4 / 6)
    ragged = outcome_free_share([[1, -1], [2, -1, -1]], [[1, 0], [0, 0, 0]])
    assert ragged == pytest.approx(4 / 6)


def test_outcome_free_share_leaves_out_trajectories_whose_outcome_is_not_known():
    # The failure of the first group is lost: what is left of it has one outcome, and a push of 1.
    assert outcome_free_share([[1, -1], [2, -2]], [[1, NAN], [1, 0]]) == pytest.approx(1 / 5)


def test_outcome_free_share_is_missing_where_nothing_pushes():
    assert math.isnan(outcome_free_share([[0, 0]], [[1, 0]]))
    assert math.isnan(outcome_free_share([[1, -1]], [[NAN, NAN]]))


def test_the_division_makes_groups_without_an_outcome_push_as_hard_as_a_solved_room():
    rewards = [SOLVED, LOST, LOST, LOST]
    advice = advise(rewards, success=[[1, 0]] + [[0, 0]] * 3)
    assert advice.outcome_free is not None
    # Divided, all advantages are 1 or -1; undivided, 5 and -5 against 0.05 and -0.05.
    assert advice.outcome_free.divided == pytest.approx(3 / 4, abs=1e-4)
    assert advice.outcome_free.plain == pytest.approx(0.3 / 10.3)
    assert advice.outcome_free.num_mixed == 1
    assert advice.outcome_free.divided == pytest.approx(
        outcome_free_share(grpo(rewards), [[1, 0]] + [[0, 0]] * 3)
    )


def test_a_share_above_a_half_earns_the_advice_to_filter_or_not_to_divide():
    rewards, success = [SOLVED, LOST, LOST, LOST] * 8, [[1, 0], [0, 0], [0, 0], [0, 0]] * 8
    advice = advise(rewards, success=success)
    assert advice.recommendation is Recommendation.FILTER
    assert advice.reasons[0].startswith("outcome-free share 0.75 (95% interval 0.")
    assert "0.03 where they are not" in advice.reasons[0]
    # Four groups of it: 0.75 as well, but it may be 1/2.
    assert advise(rewards[:8], success=success[:8]).recommendation is Recommendation.CANNOT_TELL


def test_where_nothing_is_divided_the_share_is_that_without_the_division():
    # Every group holds a success, so only their spread counts, and it is even.
    rewards, success = [[9.0, 0.0], [10.0, 0.0]] * 8, [[1, 0]] * 16
    for divides in (True, False):
        found = advise(rewards, success=success, divides=divides)
        assert found.recommendation is Recommendation.NO_FILTER
    # 0.03 of the push in 3 of 4 groups: the share speaks for nothing, and the spread does.
    rewards, success = [SOLVED, LOST, LOST, LOST] * 16, [[1, 0], [0, 0], [0, 0], [0, 0]] * 16
    found = advise(rewards, success=success, divides=False)
    assert found.outcome_free is not None and found.outcome_free.share < 0.1
    assert found.recommendation is Recommendation.FILTER
    assert found.reasons[0].startswith("Std/Mean of RV is 1.7")


def test_an_open_share_keeps_an_even_spread_from_meaning_no_filter():
    # Every group varies as much as the others, and half of them hold no success.
    rewards, success = [[1.0, 0.0], [0.0, -1.0]] * 8, [[1, 0], [0, 0]] * 8
    advice = advise(rewards, success=success)
    assert advice.std_over_mean_interval[1] < 1.0
    assert advice.outcome_free is not None and advice.outcome_free.share == pytest.approx(0.5)
    assert advice.recommendation is Recommendation.CANNOT_TELL
    assert advise(rewards).recommendation is Recommendation.NO_FILTER


def test_a_batch_without_both_outcomes_in_any_group_asks_for_other_tasks():
    advice = advise([LOST] * 10, success=[[0, 0]] * 10)
    assert advice.outcome_free is not None and advice.outcome_free.share == 1.0
    assert advice.recommendation is Recommendation.CHANGE_TASKS
    assert "at most 26% of such groups" in advice.reasons[0]  # 1 - 0.05^(1/10)


def test_outcomes_are_known_from_a_reward_of_success_too():
    rewards = [SOLVED, LOST, LOST, LOST] * 8
    advice = advise(rewards, success_reward=9.0)
    assert advice.outcome_free is not None
    assert advice.outcome_free.divided == pytest.approx(3 / 4, abs=1e-4)
    ragged = [[10, 0, NAN], [-0.1, -0.2]]
    assert advise(ragged, success_reward=9.0).outcome_free is not None
    assert advise(rewards).outcome_free is None


def test_the_share_is_of_what_was_earned_where_the_filter_scores_other_rewards():
    # The malformed reply of the second group costs 2 in training and nothing to the filter.
    task, earned = [[10, 0], [-1, -1]], [[10, 0], [-1, -3]]
    success = [[1, 0], [0, 0]]
    found = [advise(task, success=success, earned=e).outcome_free for e in (None, earned)]
    # 5 + 5 against 0, and against 1 + 1.
    assert [each.plain for each in found if each] == pytest.approx([0.0, 2 / 12])


def test_tokens_count_in_the_share():
    found = advise([SOLVED, LOST], success=[[1, 0], [0, 0]], tokens=[[1, 1], [3, 3]]).outcome_free
    assert found is not None
    assert found.divided == pytest.approx(6 / 8, abs=1e-4)


def test_success_that_is_laid_out_otherwise_is_refused():
    with pytest.raises(MooredError, match="laid out like"):
        outcome_free_share([[1, -1]], [[1]])


def test_no_variance_at_all_is_no_signal():
    assert advise([[1, 1]] * 6).recommendation is Recommendation.NO_SIGNAL


def test_few_groups_ask_for_more():
    assert advise([[1, 0], [0, 0]]).recommendation is Recommendation.CANNOT_TELL


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
    rewards = [[1, 0]] * 8
    assert advise(rewards).recommendation is Recommendation.NO_FILTER
    assert advise(rewards[:7]).recommendation is Recommendation.CANNOT_TELL
    assert advise(rewards[:7], min_groups=7).recommendation is Recommendation.NO_FILTER
