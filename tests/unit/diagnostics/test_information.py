"""The MI family: closed forms, invariances, refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.diagnostics import CollapseReport, Regime, Verdict, ZScoreEMA, information
from moored.errors import MooredError, TooFewPromptsError


def toy_channel(rng, num_prompts=16, per_prompt=4, noise=0.3):
    """Prompts are points, reasonings are noisy copies of them; exact log-densities."""
    points = rng.normal(size=num_prompts)
    columns = np.repeat(np.arange(num_prompts), per_prompt)
    copies = points[columns] + noise * rng.normal(size=len(columns))
    logp = -0.5 * ((copies[:, None] - points) / noise) ** 2
    return logp, columns, np.full(len(columns), 5)


def test_identical_columns_have_no_information_and_retrieve_at_chance():
    logp = np.repeat(np.random.default_rng(0).normal(-30, 5, (12, 1)), 4, axis=1)
    report = information(logp, [0] * 12, np.full(12, 10))  # all rows of one prompt: still chance
    assert report.mi_estimate == pytest.approx(0, abs=1e-12)
    assert report.mi_seq_estimate == pytest.approx(0, abs=1e-12)
    assert report.retrieval_accuracy == 0.25
    assert report.retrieval_at == {2: 0.5, 4: 1.0, 8: 1.0}
    assert report.dependence == 0


def test_one_hot_columns_have_log_n_nats():
    logp = np.full((6, 3), -1e4)
    columns = np.array([0, 1, 2, 0, 1, 2])
    logp[np.arange(6), columns] = -5.0
    report = information(logp, columns, np.ones(6))
    assert report.mi_seq_estimate == pytest.approx(math.log(3))
    assert report.mi_estimate == pytest.approx(math.log(3))
    assert report.mi_upper_bound == pytest.approx(math.log(3))
    assert report.retrieval_accuracy == 1
    assert report.conditional_entropy_seq_est == pytest.approx(5)
    assert report.reasoning_entropy_seq_est == pytest.approx(5 + math.log(3))


def test_binary_symmetric_channel_has_its_closed_form():
    # Two prompts, one token, flipped with probability 1/4: four rows carry exact frequencies.
    flip = 0.25
    table = np.log([[1 - flip, flip], [flip, 1 - flip]])  # token by prompt
    tokens = np.array([0, 0, 0, 1, 1, 1, 1, 0])
    columns = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    report = information(table[tokens], columns, np.ones(8))
    entropy = -(flip * math.log(flip) + (1 - flip) * math.log(1 - flip))
    assert report.mi_seq_estimate == pytest.approx(math.log(2) - entropy)
    assert report.conditional_entropy_seq_est == pytest.approx(entropy)
    assert report.reasoning_entropy_seq_est == pytest.approx(math.log(2))
    assert report.retrieval_accuracy == 0.75


def test_per_token_view_divides_scores_before_mixing():
    # Sums -2 and -6 over 2 tokens: -1 and -3 per token.
    report = information([[-2.0, -6.0]], [0], [2])
    marginal = math.log((math.exp(-1) + math.exp(-3)) / 2)
    assert report.mi_estimate == pytest.approx(-1 - marginal)
    marginal_seq = math.log((math.exp(-2) + math.exp(-6)) / 2)
    assert report.mi_seq_estimate == pytest.approx(-2 - marginal_seq)
    assert report.matched_log_prob_mean == pytest.approx(-1)
    assert report.marginal_log_prob_mean == pytest.approx(marginal)


def test_zscore_divides_by_the_population_std_of_the_marginal():
    logp = np.array([[-1.0, -2.0], [-5.0, -4.0]])
    report = information(logp, [0, 1], [1, 1])
    marginal = np.log(np.exp(logp).mean(axis=1))
    gain = np.array([-1.0, -4.0]) - marginal
    assert report.marginal_std == pytest.approx(marginal.std())
    assert report.mi_zscore == pytest.approx(gain.mean() / (marginal.std() + 1e-3))


def test_recall_at_k_counts_better_prompts():
    # Own prompt 0 is third best of four.
    report = information([[-3.0, -1.0, -2.0, -4.0]], [0], [1], ks=(2, 3, 8))
    assert report.retrieval_accuracy == 0
    assert report.retrieval_at == {2: 0, 3: 1, 8: 1}


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_the_order_of_prompts_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    logp, columns, lengths = toy_channel(rng, 6, 2)
    order = rng.permutation(6)
    place = np.argsort(order)
    before = information(logp, columns, lengths).metrics()
    after = information(logp[:, order], place[columns], lengths).metrics()
    assert after == pytest.approx(before)


def test_merging_a_duplicated_prompt_gives_the_information_of_the_undoubled_set():
    logp, columns, lengths = toy_channel(np.random.default_rng(1), 5, 3)
    single = information(logp, columns, lengths)
    doubled = np.hstack([logp, logp])  # every prompt twice, rows spread over the twins
    spread = columns + 5 * (np.arange(len(columns)) % 2)
    apart = information(doubled, spread, lengths)
    merged = information(doubled, spread, lengths, prompt_keys=list("abcde" * 2))
    assert merged.num_merged_prompts == 5
    assert merged.metrics() == pytest.approx(single.metrics())
    assert apart.mi_seq_estimate == pytest.approx(single.mi_seq_estimate)
    assert apart.retrieval_accuracy == pytest.approx(single.retrieval_accuracy / 2)  # ties


def test_keys_that_contradict_the_scores_are_named():
    logp = np.array([[-5.0, -50.0], [-50.0, -5.0]])
    with pytest.raises(MooredError, match="columns 0 and 1 are the same"):
        information(logp, [0, 1], [1, 1], prompt_keys=["x", "x"])


def test_empty_reasonings_are_skipped_and_counted():
    logp, columns, lengths = toy_channel(np.random.default_rng(2), 4, 2)
    plain = information(logp, columns, lengths)
    junk = np.vstack([logp, [[math.nan] * 4]])
    report = information(junk, np.append(columns, 0), np.append(lengths, 0))
    assert report.num_empty_reasonings == 1
    assert report.num_reasonings == 8
    assert report.metrics() == plain.metrics()


@pytest.mark.parametrize(
    ("logp", "columns", "lengths", "message"),
    [
        ([[-1.0]], [0], [1], "at least 2 distinct prompts"),
        ([[-1.0, -2.0]], [0], [0], "1 non-empty reasoning"),
        ([[-1.0, math.nan]], [0], [1], r"logp\[0, 1\] = nan"),
        ([[-1.0, -math.inf]], [0], [1], "not"),
        ([[-1.0, -2.0]], [2], [1], "2 prompts"),
        ([[-1.0, -2.0]], [-1], [1], "2 prompts"),
        ([[-1.0, -2.0]], [0, 1], [1], r"\(M, N\)"),
        ([[-1.0, -2.0]], [0], [-3], "lengths"),
        ([[-1.0, -2.0]], [0], [math.nan], r"lengths\[0\] = nan"),
        ([[-1.0, -2.0]] * 2, [0, 1], [3, math.inf], r"lengths\[1\] = inf"),
        ([[-1.0, -2.0]], [0.5], [1], "whole numbers"),
        ([[-1.0, -2.0]], [math.nan], [1], "whole numbers"),
        ([-1.0, -2.0], [0], [1], r"\(M, N\)"),
    ],
)
def test_input_that_cannot_be_measured_is_refused(logp, columns, lengths, message):
    with pytest.raises(MooredError, match=message):
        information(logp, columns, lengths)


def test_one_prompt_after_merging_is_too_few():
    with pytest.raises(TooFewPromptsError):
        information([[-1.0, -1.0]], [0], [1], prompt_keys=["x", "x"])
    with pytest.raises(MooredError, match="one key per column"):
        information([[-1.0, -1.0]], [0], [1], prompt_keys=["x"])


def test_metrics_have_exactly_the_known_names():
    report = information(-2.0 + np.eye(3), [0, 1, 2], [1, 1, 1])
    names = [
        "conditional_entropy_est",
        "conditional_entropy_seq_est",
        "marginal_log_prob_mean",
        "marginal_std",
        "marginal_std_ema",
        "marginal_std_ema_seq",
        "marginal_std_seq",
        "matched_log_prob_mean",
        "mi_estimate",
        "mi_seq_estimate",
        "mi_upper_bound",
        "mi_zscore",
        "mi_estimate_se",
        "mi_zscore_ema",
        "mi_zscore_ema_seq",
        "mi_zscore_seq",
        "reasoning_entropy_est",
        "reasoning_entropy_seq_est",
    ]
    for suffix in ("", "@2", "@4", "@8"):
        names += [f"retrieval_{x}{suffix}" for x in ("accuracy", "chance_level", "above_chance")]
    assert set(report.metrics("view")) == {f"view/{name}" for name in names}


def test_chance_levels_are_k_over_n():
    logp, columns, lengths = toy_channel(np.random.default_rng(3), 16, 1)
    metrics = information(logp, columns, lengths).metrics("v")
    assert metrics["v/retrieval_chance_level"] == 1 / 16
    assert metrics["v/retrieval_chance_level@8"] == 0.5
    assert metrics["v/retrieval_above_chance@8"] == metrics["v/retrieval_accuracy@8"] - 0.5


def test_a_report_goes_through_json():
    logp, columns, lengths = toy_channel(np.random.default_rng(4))
    report = information(logp, columns, lengths, bootstrap=20)
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["intervals"]["mi_estimate"]["low"] < stored["mi_estimate"]
    assert stored["regime"] == "diverse"


def test_zscore_ema_smooths_sigma_from_its_first_value():
    first = information([[-1.0, -2.0], [-5.0, -4.0]], [0, 1], [1, 1])
    second = information([[-1.0, -2.0], [-9.0, -4.0]], [0, 1], [1, 1])
    ema = ZScoreEMA()
    assert ema.update(first).marginal_std_ema == first.marginal_std
    smoothed = ema.update(second)
    sigma = 0.9 * first.marginal_std + 0.1 * second.marginal_std
    assert smoothed.marginal_std_ema == pytest.approx(sigma)
    assert smoothed.mi_zscore_ema == pytest.approx(second.mi_estimate / (sigma + 1e-3))
    sigma_seq = 0.9 * first.marginal_std_seq + 0.1 * second.marginal_std_seq
    assert smoothed.marginal_std_ema_seq == pytest.approx(sigma_seq)


def test_zscore_ema_continues_from_its_saved_state():
    reports = [information([[-1.0, -2.0], [-5.0 - i, -4.0]], [0, 1], [1, 1]) for i in range(4)]
    whole = ZScoreEMA()
    expected = [whole.update(r) for r in reports][-1]
    begun, resumed = ZScoreEMA(), ZScoreEMA()
    for report in reports[:2]:
        begun.update(report)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert [resumed.update(r) for r in reports[2:]][-1] == expected


def test_resampling_is_seeded_and_leaves_the_estimates_alone():
    logp, columns, lengths = toy_channel(np.random.default_rng(5))
    plain = information(logp, columns, lengths)
    a, b, c = (
        information(logp, columns, lengths, bootstrap=50, permutations=50, seed=s)
        for s in (1, 1, 2)
    )
    assert a == b
    assert a.intervals != c.intervals
    assert a.metrics() == plain.metrics()


def test_numbers_of_draws_are_not_negative():
    with pytest.raises(MooredError, match=r"bootstrap must be .* >= 0, got -1"):
        information([[-1.0, -2.0]], [0], [1], bootstrap=-1)
    with pytest.raises(MooredError, match=r"permutations must be .* >= 0, got -1"):
        information([[-1.0, -2.0]], [0], [1], permutations=-1)


def test_intervals_need_reasonings_of_two_prompts_and_estimates_do_not():
    logp, _, lengths = toy_channel(np.random.default_rng(9), 8, 2)
    one = information(logp[:12], [0] * 12, lengths[:12], permutations=20)
    assert one.intervals == {}
    with pytest.raises(TooFewPromptsError, match="reasonings of 1; set bootstrap=0"):
        information(logp[:12], [0] * 12, lengths[:12], bootstrap=20)
    # An empty reasoning does not count as one.
    with pytest.raises(TooFewPromptsError, match="set bootstrap=0"):
        information(logp[:2], [0, 1], [5, 0], bootstrap=20)


@pytest.mark.parametrize("num_used", [2, 5, 7])
def test_intervals_stand_around_their_estimates_when_some_prompts_have_no_reasoning(num_used):
    rng = np.random.default_rng(10)
    for _ in range(10):
        logp, columns, lengths = toy_channel(rng, 8, 6)
        rows = columns < num_used
        report = information(logp[rows], columns[rows], lengths[rows], bootstrap=200)
        for metric, interval in report.intervals.items():
            assert interval.low <= getattr(report, metric) <= interval.high, metric


def test_prompts_that_change_nothing_do_not_move_the_interval():
    # Far-off prompts without reasonings shift every gain by log(12 / 6) and nothing else.
    logp, columns, lengths = toy_channel(np.random.default_rng(11), 6, 4)
    far = np.hstack([logp, np.full((24, 6), -1e6)])
    near, wide = (information(x, columns, lengths, bootstrap=300) for x in (logp, far))
    for metric in ("mi_seq_estimate", "mi_estimate"):
        a, b = near.intervals[metric], wide.intervals[metric]
        assert b.high - b.low == pytest.approx(a.high - a.low, rel=0.15)
    assert wide.mi_seq_estimate == pytest.approx(near.mi_seq_estimate + np.log(2))


def test_intervals_never_reach_beyond_what_is_possible():
    logp = np.full((16, 8), -100.0)
    columns = np.repeat(np.arange(8), 2)
    logp[np.arange(16), columns] = -1.0
    report = information(logp, columns, np.ones(16), bootstrap=200)
    assert report.intervals["mi_seq_estimate"].high <= math.log(8)
    assert report.intervals["retrieval_accuracy"].high <= 1


def test_p_values_are_small_for_dependent_reasoning_and_uniform_for_shuffled_pairs():
    logp, columns, lengths = toy_channel(np.random.default_rng(6))
    dependent = information(logp, columns, lengths, permutations=199)
    assert dependent.p_values == dict.fromkeys(
        ("mi_estimate", "mi_seq_estimate", "retrieval_accuracy"), 1 / 200
    )
    rng = np.random.default_rng(7)
    p = []
    for _ in range(200):
        logp, columns, lengths = toy_channel(rng, 8, 2)
        shuffled = rng.permutation(columns)
        p.append(information(logp, shuffled, lengths, permutations=99).p_values["mi_seq_estimate"])
    for level in (0.1, 0.25, 0.5, 0.75):
        assert np.mean(np.array(p) <= level) == pytest.approx(level, abs=0.1)


def test_verdict_and_regime_of_one_report_are_read_against_what_is_possible():
    rng = np.random.default_rng(8)
    logp, columns, lengths = toy_channel(rng)
    healthy = information(logp, columns, lengths)
    assert (healthy.verdict, healthy.regime) == (Verdict.HEALTHY, Regime.DIVERSE)
    template = np.repeat(logp[:, :1], 16, axis=1)
    assert information(template, columns, lengths).regime is Regime.TEMPLATE_COLLAPSE
    sure = information(logp * 0 - 1e-3, columns, lengths)
    assert sure.regime is Regime.LOW_ENTROPY_COLLAPSE
    exact = np.full((16, 16), -100.0)
    np.fill_diagonal(exact, -1e-3)
    assert information(exact, np.arange(16), np.ones(16)).regime is Regime.COMPRESSED


def test_report_is_plain_data():
    report = information([[-1.0, -2.0], [-2.0, -1.0]], [0, 1], [1, 1])
    assert isinstance(report, CollapseReport)
    assert all(isinstance(value, float) for value in report.metrics().values())
