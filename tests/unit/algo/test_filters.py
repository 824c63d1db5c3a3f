"""The filter, worked out by hand: scores, rules, ties, zeros, NaN."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.algo import loss_scale, preset, reward_variance, select, select_groups
from moored.algo.filters import RewardVariance
from moored.errors import MooredError

NAN = math.nan
REWARDS = [
    [1, 0, 1, 0],  # variance 1/4
    [1, 1, 1, 1],  # 0
    [1, 0, 0, 0],  # 3/16
    [0.2, 0.2, 0, 0],  # 1/100
]


def kept(scores, **options) -> list[int]:
    return select(scores, **options).tolist()


def test_scores_that_differ_by_rounding_tie_and_the_earlier_group_is_kept():
    # The same rewards in another order: a variance whose last bit may differ.
    twice = [1.0, float(np.nextafter(1.0, 2.0))]
    for rule, value in (("top_k_count", 1), ("top_p", 0.5)):
        for largest in (True, False):
            for scores in (twice, twice[::-1]):
                kept = select(scores, rule=rule, value=value, largest=largest)
                assert kept.tolist() == [0]
    # Beside one that is really larger, and one that is really smaller.
    scores = [0.25, *twice, 9.0]
    assert select(scores, rule="top_k_count", value=2).tolist() == [1, 3]
    assert select(scores, rule="top_k_count", value=2, largest=False).tolist() == [0, 1]


def test_variance_scores_are_population_variances():
    np.testing.assert_allclose(select_groups(REWARDS).scores, [0.25, 0, 0.1875, 0.01])


def test_ddof_1_gives_sample_variance():
    np.testing.assert_allclose(
        select_groups(REWARDS, ddof=1).scores, [1 / 3, 0, 0.25, 4 / 300], rtol=1e-12
    )


def test_std_is_the_root_of_variance():
    np.testing.assert_allclose(
        select_groups(REWARDS, score="std").scores, [0.5, 0, math.sqrt(0.1875), 0.1]
    )


@pytest.mark.parametrize("score", ["reward_mean", "length", "entropy"])
def test_mean_scores_are_means_of_the_given_quantity(score):
    assert select_groups([[1, 3], [2, 4]], score=score, rule="none").scores.tolist() == [2, 3]


def test_entropy_std_is_a_std():
    assert select_groups([[1, 3]], score="entropy_std").scores.tolist() == [1]


def test_top_p_keeps_the_smallest_prefix_that_reaches_the_mass():
    # total 0.4475; 0.9 of it is 0.40275; 0.25 + 0.1875 = 0.4375 reaches it.
    assert select_groups(REWARDS).kept.tolist() == [0, 2]
    # 0.5 of it is 0.22375; the first group alone reaches it.
    assert select_groups(REWARDS, value=0.5).kept.tolist() == [0]
    # 0.98 of it is 0.43855; the last group is needed.
    assert select_groups(REWARDS, value=0.98).kept.tolist() == [0, 2, 3]


def test_equal_rewards_score_exactly_zero_despite_rounding():
    assert np.var([0.1, 0.1, 0.1]) > 0  # what plain numpy leaves behind
    third = 0.1 + 0.2  # 0.30000000000000004
    assert select_groups([[0.1, 0.1, 0.1], [third, 0.3, 0.3]]).scores.tolist() == [0, 0]


def test_nan_rewards_are_left_out_of_their_group():
    assert select_groups([[1, 0, NAN, NAN], [1, NAN, NAN, NAN]]).scores.tolist() == [0.25, 0]


def test_a_group_with_fewer_than_two_finite_rewards_scores_zero_under_every_score():
    for score in ("variance", "std", "reward_mean", "length", "entropy", "entropy_std"):
        assert select_groups([[5, NAN], [NAN, NAN]], score=score).scores.tolist() == [0, 0]


def test_flat_rewards_with_ids_equal_the_matrix():
    flat = np.ravel(REWARDS)
    ids = np.repeat(["b", "a", "d", "c"], 4)
    selection = select_groups(flat, ids)
    assert selection.labels.tolist() == ["b", "a", "d", "c"]
    assert selection.kept.tolist() == select_groups(REWARDS).kept.tolist()


def test_groups_are_numbered_by_first_appearance_when_interleaved():
    rewards = [1, 5, 0, 5, 1, 0]
    ids = ["x", "y", "x", "y", "z", "z"]
    selection = select_groups(rewards, ids, value=1.0)
    assert selection.labels.tolist() == ["x", "y", "z"]
    assert selection.scores.tolist() == [0.25, 0, 0.25]
    assert selection.row_mask(ids).tolist() == [True, False, True, False, True, True]


def test_ragged_groups_come_as_ids_or_as_rows_of_unequal_length():
    rows = [[1, 0], [1, 0, 0, 0], [2]]
    by_ids = select_groups([1, 0, 1, 0, 0, 0, 2], [0, 0, 1, 1, 1, 1, 2])
    np.testing.assert_allclose(by_ids.scores, [0.25, 0.1875, 0])
    np.testing.assert_allclose(select_groups(rows).scores, by_ids.scores)


def test_an_all_zero_batch_keeps_nothing():
    assert kept([0, 0, 0]) == []
    assert kept([0, 0, 0], keep_zero=True) == []


def test_keep_zero_with_full_mass_keeps_every_group():
    assert kept([0, 0, 0], keep_zero=True, value=1.0) == [0, 1, 2]
    assert kept([0, 2, 1], keep_zero=True, value=1.0) == [0, 1, 2]
    assert kept([0, 2, 1], keep_zero=False, value=1.0) == [1, 2]


def test_full_mass_keeps_scores_that_vanish_in_the_sum():
    assert kept([1.0, 1e-30], value=1.0) == [0, 1]


def test_ties_at_the_cut_keep_the_earlier_group():
    assert kept([1, 1, 1, 1], value=0.5) == [0, 1]
    assert kept([1, 2, 1, 1], rule="top_k_count", value=2) == [0, 1]
    assert kept([2, 1, 1, 1], rule="top_k_count", value=2, largest=False) == [1, 2]


def test_eps_lowers_the_target():
    assert kept([0.5, 0.4, 0.1], value=0.95) == [0, 1, 2]
    assert kept([0.5, 0.4, 0.1], value=0.95, eps=0.06) == [0, 1]


def test_absolute_eps_drops_a_batch_of_tiny_scores_whole():
    # Trap 8 of the reference: the target 0.9 * 0.01 - 0.01 is negative.
    assert kept([0.005, 0.005], eps=0.01) == []
    assert kept([0.005, 0.005]) == [0, 1]


def test_softmax_mass_keeps_most_groups_when_scores_lie_in_the_unit_interval():
    # Trap 7 of the reference. Shares 0.2352 twice and 0.0883 six times: 0.4704 + 5 * 0.0883 = 0.912
    # needs seven of eight groups; by mass two of them hold 2 of 2.12.
    scores = [1, 1, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]
    assert len(kept(scores, rule="top_p_softmax")) == 7
    assert kept(scores) == [0, 1]


def test_softmax_mass_by_hand():
    # odds 3 : 1 -> shares 0.75, 0.25
    scores = [math.log(1), math.log(3)]
    assert kept(scores, rule="top_p_softmax", value=0.75, keep_zero=True) == [1]
    assert kept(scores, rule="top_p_softmax", value=0.76, keep_zero=True) == [0, 1]
    assert kept(scores, rule="top_p_softmax", value=0.7, keep_zero=True, largest=False) == [0]


def test_top_k_is_a_floored_fraction_of_all_groups_and_at_least_one():
    scores = [5, 4, 3, 2, 1, 0, 0, 0]
    assert kept(scores, rule="top_k", value=0.25) == [0, 1]
    assert kept(scores, rule="top_k", value=0.3) == [0, 1]
    assert kept(scores, rule="top_k", value=0.01) == [0]
    assert kept(scores, rule="top_k", value=1.0) == [0, 1, 2, 3, 4]
    assert kept(scores, rule="top_k", value=0.25, largest=False) == [3, 4]
    assert kept(np.arange(1, 101), rule="top_k", value=0.29) == list(range(71, 100))


def test_top_k_count_is_a_count():
    assert kept([1, 3, 2], rule="top_k_count", value=2) == [1, 2]
    assert kept([1, 3, 2], rule="top_k_count", value=9) == [0, 1, 2]


def test_min_p_compares_with_the_best():
    assert kept([1.0, 0.5, 0.49, 0], rule="min_p", value=0.5) == [0, 1]
    assert kept([0.1, 0.2, 0.21], rule="min_p", value=0.5, largest=False) == [0, 1]
    assert kept([0.0, 0.2], rule="min_p", value=0.5, largest=False, keep_zero=True) == [0]


def test_nonzero_drops_scores_up_to_eps_in_either_order():
    assert kept([0.2, 0, 1e-9, 0.1], rule="nonzero") == [0, 2, 3]
    assert kept([0.2, 0, 1e-9, 0.1], rule="nonzero", eps=1e-6) == [0, 3]
    assert kept([0.2, 0, 1e-9, 0.1], rule="nonzero", eps=1e-6, largest=False) == [0, 3]


def test_quantile_keeps_one_quarter_highest_first():
    scores = [8, 7, 6, 5, 4, 3, 2, 1]
    quarters = [kept(scores, rule="quantile", value=q) for q in (1, 2, 3, 4)]
    assert quarters == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert kept(scores, rule="quantile", value=1, largest=False) == [6, 7]


def test_quarters_share_out_all_groups_when_four_does_not_divide():
    scores = np.arange(10.0)
    quarters = [kept(scores, rule="quantile", value=q, keep_zero=True) for q in (1, 2, 3, 4)]
    assert sorted(itertools.chain(*quarters)) == list(range(10))


def test_none_keeps_everything_zeros_included():
    assert kept([0, 1, 0], rule="none") == [0, 1, 2]


def test_empty_input_keeps_nothing():
    assert kept([]) == []
    assert select_groups([], []).kept_fraction == 0


def test_ragen_preset_follows_the_reference_code():
    # Sample std (ddof 1) of [1, 0] is 0.7071, of [0.3, 0.1] 0.1414, of [0.02, 0] 0.01414.
    rewards = [[1, 0], [0.3, 0.1], [0.02, 0], [0, 0]]
    selection = select_groups(rewards, **preset("ragen"))
    np.testing.assert_allclose(selection.scores, [0.70711, 0.14142, 0.01414, 0], atol=1e-5)
    # 0.9 * 0.86267 - 0.01 = 0.7664; the first two reach 0.8485.
    assert selection.kept.tolist() == [0, 1]
    # RAGEN's runs remove constant groups before the softmax, which would need the fourth, too.
    softmax = select_groups(rewards, **preset("ragen_softmax"))
    shares = np.exp(selection.scores) / np.exp(selection.scores).sum()
    assert shares[:3].sum() < 0.9
    assert softmax.kept.tolist() == [0, 1, 2]
    with_zero = {**preset("ragen_softmax"), "keep_zero": True}
    assert select_groups(rewards, **with_zero).kept.tolist() == [0, 1, 2, 3]


def test_dapo_preset_drops_constant_groups_only():
    assert select_groups(REWARDS, **preset("dapo")).kept.tolist() == [0, 2, 3]


def test_selection_reports_what_it_did():
    selection = select_groups(REWARDS)
    assert selection.kept_fraction == 0.5
    np.testing.assert_allclose(selection.weights, [1, 0, 0.75, 0.04])
    assert selection.group_mask.tolist() == [True, False, True, False]
    metrics = selection.metrics()
    assert metrics["filter/kept_fraction"] == 0.5
    assert metrics["filter/num_zero"] == 1
    assert metrics["filter/kept_score_mean"] == pytest.approx(0.21875)
    # sample stds: sqrt(1/3), 0, 1/2, sqrt(4/300)
    mean_std = (math.sqrt(1 / 3) + 0.5 + math.sqrt(4 / 300)) / 4
    assert metrics["filter/reward_std_mean"] == pytest.approx(mean_std)


def test_the_largest_of_negative_scores_is_reported_as_it_is():
    selection = select_groups([[-3, -1], [-5, -5]], score="reward_mean", rule="none")
    assert selection.metrics()["filter/score_max"] == -2
    assert select_groups([], []).metrics()["filter/score_max"] == 0


def test_row_mask_names_an_unknown_group():
    with pytest.raises(MooredError, match="'q'"):
        select_groups([1, 0], ["a", "a"]).row_mask(["a", "q"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "topp"}, "did you mean 'top_p'"),
        ({"rule": "top_k", "value": 4}, "top_k_count"),
        ({"rule": "top_k_count", "value": 1.5}, "whole number"),
        ({"rule": "quantile"}, "1, 2, 3 or 4"),
        ({"value": -0.1}, "share"),
        ({"value": NAN}, "share"),
        ({"eps": -1}, "eps"),
    ],
)
def test_wrong_options_get_a_sentence_that_helps(options, message):
    with pytest.raises(MooredError, match=message):
        select([1.0, 2.0], **options)


def test_wrong_scores_and_rewards_get_a_sentence_that_helps():
    with pytest.raises(MooredError, match="did you mean 'variance'"):
        select_groups(REWARDS, score="varience")
    with pytest.raises(MooredError, match="ddof"):
        select_groups(REWARDS, ddof=2)
    with pytest.raises(MooredError, match="group_ids"):
        select_groups([1.0, 0.0])
    with pytest.raises(MooredError, match="one id per value"):
        select_groups([1.0, 0.0], [1])
    with pytest.raises(MooredError, match="top_k"):
        select([1.0, -1.0])
    with pytest.raises(MooredError, match="group 1 scores nan"):
        select([1.0, NAN])


scores_strategy = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=30)
# A subnormal share of the total underflows to 0, which keeps nothing.
mass = st.one_of(st.just(0.0), st.floats(1e-300, 1.0))


@settings(deadline=None)
@given(scores_strategy, mass)
def test_top_p_reaches_its_mass_and_needs_every_group_it_keeps(scores, value):
    values = np.array(scores)
    chosen = values[select(values, value=value)]
    target = min(value, 1.0) * values.sum()
    assert chosen.sum() >= target * (1 - 1e-9)
    if len(chosen) > 0 and value < 1:
        assert chosen.sum() - chosen.min() < target
    rest = np.delete(values, select(values, value=value))
    if len(chosen) and len(rest):
        assert rest.max() <= chosen.min()


@settings(deadline=None)
@given(scores_strategy, mass, st.floats(1e-6, 1e6))
def test_top_p_does_not_depend_on_the_scale_of_scores(scores, value, scale):
    assert kept(scores, value=value) == kept(np.array(scores) * scale, value=value)


@settings(deadline=None)
@given(scores_strategy, mass, mass)
def test_top_p_keeps_more_with_more_mass(scores, a, b):
    small, large = sorted((a, b))
    assert set(kept(scores, value=small)) <= set(kept(scores, value=large))


@settings(deadline=None)
@given(st.integers(1, 20), st.floats(0.01, 1.0))
def test_equal_scores_are_kept_from_the_front(num, value):
    chosen = kept(np.ones(num), value=value)
    assert chosen == list(range(len(chosen)))


@settings(deadline=None)
@given(scores_strategy, st.randoms(use_true_random=False))
def test_selected_scores_do_not_depend_on_group_order(scores, shuffler):
    order = list(range(len(scores)))
    shuffler.shuffle(order)
    values = np.array(scores)
    first = np.sort(values[select(values)])
    second = np.sort(values[order][select(values[order])])
    np.testing.assert_array_equal(first, second)


def test_loss_scale_factors():
    assert [loss_scale(0.25, mode) for mode in ("none", "linear", "sqrt")] == [1, 0.25, 0.5]
    with pytest.raises(MooredError, match="sqrt"):
        loss_scale(0.25, "sqr")
    with pytest.raises(MooredError, match="kept_fraction"):
        loss_scale(1.5)


def test_statistics_of_reward_variance_by_hand():
    rv = reward_variance([[1, 0], [1, 1], [0, 0], [1, 0]])  # RV: 1/4, 0, 0, 1/4
    assert rv.variances.tolist() == [0.25, 0, 0, 0.25]
    assert (rv.mean, rv.std, rv.std_over_mean, rv.zero_fraction) == (0.125, 0.125, 1.0, 0.5)
    assert rv.kept_fraction(0.9) == 0.5
    assert rv.kept_fraction(0.5) == 0.25


def test_ratio_is_zero_without_any_variance_and_when_all_groups_are_alike():
    assert reward_variance([[1, 1], [0, 0]]).std_over_mean == 0
    assert reward_variance([[1, 0], [0, 1]]).std_over_mean == 0


def test_ratio_interval_holds_the_ratio_and_is_seeded():
    rng = np.random.default_rng(0)
    rv = reward_variance(rng.random((64, 8)) * rng.integers(0, 2, (64, 1)))
    low, high = rv.std_over_mean_interval()
    assert low < rv.std_over_mean < high
    assert (low, high) == rv.std_over_mean_interval()


def test_ratio_interval_spans_95_percent_of_all_resamples():
    variances = np.array([0.25, 0.2, 0.0, 0.1, 0.0])
    ratios = []
    for draw in itertools.product(variances, repeat=5):
        ratios.append(np.std(draw) / np.mean(draw) if any(draw) else 0.0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    found = RewardVariance(variances).std_over_mean_interval(draws=5000)
    assert found == pytest.approx((low, high), abs=0.05)
