"""Advice on batches small enough to work out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from moored.algo import select
from moored.algo.snr import Recommendation
from moored.analysis.advice import BatchAdvice, FilterSettings, advise_batch, rv_histogram
from moored.errors import MooredError

# Pairs of rewards with RV 1, 1/4, 1/16, 1e-4 and 0.
BIG, MIDDLE, SMALL, FAINT, FAIL = [2, 0], [1, 0], [0.5, 0], [0.02, 0], [0, 0]


def advise_rows(rows: Sequence[Sequence[float]], **options) -> BatchAdvice:
    ids = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return advise_batch(np.concatenate(rows), ids, **options)


def advise_steps(rows: Sequence[Sequence[float]], times: int = 8, **options) -> BatchAdvice:
    """The same groups in every step: enough of them to tell."""
    return advise_rows([*rows] * times, steps=np.repeat(np.arange(times), len(rows)), **options)


def test_histogram_sets_zeros_apart():
    histogram = rv_histogram(np.array([0, 0, 0.1, 0.4, 0.8]), bins=4)
    assert histogram.num_zero == 2
    assert histogram.edges == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert histogram.counts.tolist() == [1, 0, 1, 1]


def test_effect_of_rho_is_counted_within_steps():
    # Step 1: RV 1, 1/4; step 2: RV 1/4, 0. Mass 0.5 keeps the first of each: 1.25 of 1.5.
    advice = advise_rows(
        [BIG, MIDDLE, MIDDLE, FAIL], steps=[1, 1, 2, 2], rhos=[0.5, 0.9], update_share=0.4
    )
    half, most = advice.effects
    assert half.kept_fraction == 0.5
    assert half.kept_mass == pytest.approx(1.25 / 1.5)
    assert half.update_saved == 0.5
    assert half.step_saved == pytest.approx(0.2)
    assert (most.kept_fraction, most.kept_mass) == (0.75, 1.0)
    assert advice.num_steps == 2


def test_groups_with_the_same_signal_are_told_from_those_without_by_nonzero():
    advice = advise_steps([MIDDLE] * 3 + [FAIL] * 9)
    assert advice.plain.recommendation is Recommendation.FILTER
    assert advice.settings == FilterSettings(rule="nonzero", value=0.0, eps=0.0)
    assert "Std/Mean 0.00 among the 24 of them" in advice.reasons[1]
    # 3 of 12 groups a step are few, and 4 times the rollouts would fill the batch.
    assert "3 of 12 groups per step remain" in advice.reasons[2]
    assert "filter.action=refill, for about 4.0 times the rollouts" in advice.reasons[3]


def test_a_threshold_lies_between_noise_and_signal():
    advice = advise_steps([MIDDLE] * 4 + [FAINT] * 4 + [FAIL] * 4)
    assert advice.settings is not None
    assert advice.settings.eps == 0.005  # sqrt(1e-4 * 1/4)
    assert "saves 67% of the update" in advice.reasons[3]
    assert "refill" not in " ".join(advice.reasons)  # 4 groups remain


def test_groups_with_unequal_signal_are_cut_by_mass():
    advice = advise_steps([BIG, MIDDLE, SMALL] + [FAIL] * 5)
    # 1 + 1/4 reach 0.9 of 1.3125.
    assert advice.settings == FilterSettings(rule="top_p", value=0.9, eps=0.0)
    assert "2 of 8 groups per step remain" in advice.reasons[2]


def test_eps_skips_a_step_of_mere_noise():
    advice = advise_steps([BIG, MIDDLE, SMALL] + [FAINT] * 4 + [FAIL])
    assert advice.settings is not None
    eps = advice.settings.eps
    assert eps == 0.00076  # 1.05 * 0.9 * 8 * 1e-4
    assert len(select(np.full(8, 1e-4), value=0.9, eps=eps)) == 0
    assert len(select([1, 0.25, 0.0625], value=0.9, eps=eps)) == 2


def test_no_eps_where_it_would_cost_a_group_with_signal():
    # Faint is 1 % of the largest, and 1.05 * 0.9 * 4 of it is more than the smallest signal.
    advice = advise_steps([[2, 0], [0.21, 0], [0.2, 0], [0, 0]])
    assert advice.settings is not None
    assert (advice.settings.rule, advice.settings.eps) == ("top_p", 0.0)


SOLVED, LOST = [10.0, 0.0], [-0.1, -0.2]
"""A group with both outcomes, and one that differs by the price of a move."""
OUTCOMES = {"success": [1, 0] + [0, 0] * 7}
"""Of a step with one group that is solved and seven that are lost."""


def test_rare_successes_are_a_case_for_the_filter_however_few_groups_hold_one():
    # One of eight groups a step: 7/8 of the push is about the price of moves.
    advice = advise_steps([SOLVED] + [LOST] * 7, success=OUTCOMES["success"] * 8)
    assert advice.plain.recommendation is Recommendation.FILTER
    assert advice.headline.startswith(
        "Filter, or do not divide advantages by the group's std: nonzero keeps 12% of the groups"
    )
    text = " ".join(advice.reasons)
    assert "outcome-free share 0.87" in text and "0.07 where they are not" in text  # 0.7 / 10.7
    assert "8 groups hold both a success and a failure: filter.reward=success" in text
    assert "algorithm.advantage=dr_grpo leaves out the division" in text
    # Eight times the rollouts would fill the batch: too many to advise.
    assert "refill" not in text and "sample more of them a step" in text


def test_a_run_that_does_not_divide_is_not_told_to_leave_out_the_division():
    options = {"success": OUTCOMES["success"] * 8, "divides": False}
    advice = advise_steps([SOLVED] + [LOST] * 7, **options)
    assert advice.plain.recommendation is Recommendation.FILTER  # by the spread: Std/Mean 2.65
    assert advice.headline.startswith("Filter: nonzero keeps 12%")
    assert "dr_grpo" not in " ".join(advice.reasons)


def test_a_batch_without_any_success_asks_for_other_tasks_and_names_no_filter():
    advice = advise_rows([LOST] * 10, success=[0, 0] * 10)
    assert advice.plain.recommendation is Recommendation.CHANGE_TASKS
    assert advice.headline == (
        "Change the tasks first: none of 10 groups holds both a success and a failure"
    )
    assert advice.settings is None


@pytest.mark.parametrize(
    ("rows", "headline"),
    [
        (
            ([MIDDLE] * 3 + [FAIL] * 9) * 4,
            "Filter: nonzero keeps 25% of the groups and 100% of the signal; take easier",
        ),
        (
            ([BIG, MIDDLE, SMALL] + [FAIL] * 5) * 4,
            "Filter: top_p 0.9 keeps 22% of the groups and 90%",  # 4.75 of 5.25
        ),
        ([MIDDLE] * 6 + [FAIL] * 4, "Cannot tell: 10 groups are too few, about "),
        ([MIDDLE, FAIL] * 8, "Cannot tell: 16 groups lie too near to where filters begin to pay"),
        ([MIDDLE] * 9 + [FAIL], "No filter: all groups carry about the same signal"),
        ([FAIL] * 5, "Nothing to learn from: no reward varies inside any of 5 groups"),
        ([MIDDLE] * 2, "Cannot tell: 2 groups are too few, about 8 would do"),
    ],
)
def test_the_headline_is_the_recommendation_in_one_sentence(rows, headline):
    assert advise_rows(rows).headline.startswith(headline)


def test_even_variance_gets_no_filter_but_zeros_may_go():
    advice = advise_rows([MIDDLE] * 9 + [FAIL])  # Std/Mean = sqrt(0.1 / 0.9) = 1/3
    assert advice.plain.recommendation is Recommendation.NO_FILTER
    assert advice.settings is None
    assert "drops the 1 of 10 groups" in advice.reasons[1]


def test_most_groups_failing_asks_for_other_tasks_and_says_what_failures_prove():
    advice = advise_rows([[1] + [0] * 7] * 2 + [[0] * 8] * 6)
    assert "6 of 8 groups all fail" in advice.reasons[-2]
    assert "8 failures still allow a success rate of 31%" in advice.reasons[-1]  # 1 - 0.05^(1/8)


def test_reward_blind_groups_come_before_any_filter():
    rows = [[0.5, 0.5]] * 4 + [[1, 0]] * 2
    advice = advise_rows(rows, behaviours=["a", "b"] * 6)
    assert advice.plain.recommendation is Recommendation.FIX_REWARD
    assert advice.plain.triage.share("reward_blind") == pytest.approx(4 / 6)


def test_missing_rewards_do_not_count_in_group_sizes():
    assert advise_rows([[1, 0, math.nan], [1, 0]]).group_sizes == (2, 2)


def test_batches_that_cannot_be_advised_on_are_named():
    with pytest.raises(MooredError, match="none of the 3 groups has two rewards"):
        advise_rows([[1], [0], [1]])
    with pytest.raises(MooredError, match="got none"):
        advise_batch([], [])
    with pytest.raises(MooredError, match="one entry per group"):
        advise_rows([MIDDLE, FAIL], steps=[1])


def test_a_falling_reward_variance_is_told_as_a_trend_over_the_steps():
    # Twelve steps of two groups; the first has RV 1 in steps 1 to 6 and 1/16 after, the other 0.
    rows = [row for step in range(12) for row in ((BIG if step < 6 else SMALL), FAIL)]
    trend = advise_rows(rows, steps=np.repeat(np.arange(1, 13), 2)).trend
    assert trend is not None and trend.direction == "falling"
    assert (trend.early_rv, trend.late_rv) == (0.5, 1 / 32)
    assert (trend.early_steps, trend.late_steps) == ((1, 4), (9, 12))
    assert (trend.early_kept, trend.late_kept) == (0.5, 0.5)
    assert str(trend).startswith("RV is falling: 0.5 in steps 1–4, 0.0312 in steps 9–12 (p 0.0")


def test_groups_that_ended_in_errors_are_no_fall_of_reward_variance():
    lost = [math.nan, math.nan]
    rows = [row for step in range(12) for row in (MIDDLE, MIDDLE if step < 6 else lost)]
    trend = advise_rows(rows, steps=np.repeat(np.arange(12), 2)).trend
    assert trend is not None and trend.direction == "steady"
    assert (trend.early_rv, trend.late_rv) == (0.25, 0.25)
    assert (trend.early_kept, trend.late_kept) == (1.0, 1.0)
    # A step without any reward to compare says nothing, and is not counted.
    rows = [lost if step in (2, 3) else MIDDLE for step in range(6)]
    assert advise_rows(rows, steps=np.arange(6)).trend is None


def test_four_steps_have_no_trend_because_no_order_of_them_is_significant():
    rows = [BIG, MIDDLE, SMALL, FAINT, FAIL]
    assert advise_rows(rows[:4], steps=np.arange(4)).trend is None
    trend = advise_rows(rows, steps=np.arange(5)).trend
    # 2 of 120 orders are as clear.
    assert trend is not None and trend.direction == "falling"
    assert trend.p_value == pytest.approx(2 / 120, abs=0.01)


def test_headlines_count_the_groups_that_have_rewards_to_compare():
    lone = [1, math.nan]
    found = advise_rows([MIDDLE] * 3 + [lone] * 9)
    assert found.headline.startswith(
        "Cannot tell: 3 of 12 groups with two rewards to compare are too few, "
    )
    found = advise_rows([FAIL] * 5 + [lone] * 9)
    assert found.headline == "Nothing to learn from: no reward varies inside any of 5 groups"
    assert advise_rows([MIDDLE]).headline == "Cannot tell: 1 group is too few, about 8 would do"
    # Of 40 groups to compare, 10 are kept.
    found = advise_rows([BIG] * 10 + [FAIL] * 30 + [lone] * 20)
    assert "keeps 25% of the groups and 100% of the signal" in found.headline


def test_equal_steps_have_no_trend_and_few_steps_are_not_asked():
    even = advise_rows([MIDDLE, FAIL] * 6, steps=np.repeat(np.arange(6), 2)).trend
    assert even is not None and (even.direction, even.p_value) == ("steady", 1.0)
    assert advise_rows([MIDDLE, FAIL] * 3, steps=[1, 1, 2, 2, 3, 3]).trend is None
