"""Losses and KL estimators worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.algo import (
    aggregate,
    clip_loss,
    kl_estimate,
    lr_factor,
    sequence_logp,
    token_shares,
    value_loss,
)
from moored.errors import MooredError


def ratio_loss(ratio: float, advantage: float, **options) -> float:
    return float(clip_loss([math.log(ratio)], [0.0], [advantage], **options)[0])


def test_clip_loss_inside_the_clip_range_is_minus_ratio_times_advantage():
    assert ratio_loss(1.1, 2.0) == pytest.approx(-2.2)
    assert ratio_loss(0.9, -2.0) == pytest.approx(1.8)


def test_clip_loss_stops_gains_beyond_the_clip_range():
    assert ratio_loss(1.5, 1.0) == pytest.approx(-1.28)
    assert ratio_loss(0.5, -1.0) == pytest.approx(0.8)


def test_clip_loss_keeps_losses_beyond_the_clip_range():
    assert ratio_loss(0.5, 1.0) == pytest.approx(-0.5)
    assert ratio_loss(1.5, -1.0) == pytest.approx(1.5)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    assert ratio_loss(10.0, -1.0) == pytest.approx(3.0)
    assert ratio_loss(10.0, -1.0, dual_clip=None) == pytest.approx(10.0)
    assert ratio_loss(10.0, 1.0) == pytest.approx(-1.28)


def test_kl_estimators_by_hand():
    # p = 1/2, q = 1/4 at the sampled token: d = log 2
    d = math.log(2)
    args = ([math.log(0.5)], [math.log(0.25)])
    assert kl_estimate(*args, "k1") == pytest.approx(d)
    assert kl_estimate(*args, "k2") == pytest.approx(d * d / 2)
    assert kl_estimate(*args, "k3") == pytest.approx(0.5 - 1 + d)


def test_k1_and_k3_have_the_exact_kl_as_expectation():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])
    exact = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_estimate(np.log(p), np.log(q), kind)).sum()) == pytest.approx(exact)


def test_unknown_names_get_a_hint():
    with pytest.raises(MooredError, match="k3"):
        kl_estimate([0.0], [0.0], "k4")
    with pytest.raises(MooredError, match="token_mean"):
        aggregate([[1.0]], [[1]], "tokenmean")


def test_aggregations_by_hand():
    loss, mask = [[1, 2, 99], [6, 99, 99], [99, 99, 99]], [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert aggregate(loss, mask, "token_mean") == pytest.approx(3)  # 9 / 3
    assert aggregate(loss, mask, "seq_mean_token_mean") == pytest.approx(3.75)  # (1.5 + 6) / 2
    assert aggregate(loss, mask, "seq_mean_token_sum") == pytest.approx(4.5)  # (3 + 6) / 2
    assert aggregate(loss, mask, "constant", max_length=10) == pytest.approx(0.45)  # 9 / 20


def test_constant_aggregation_needs_its_length():
    with pytest.raises(MooredError, match="max_length"):
        aggregate([[1.0]], [[1]], "constant")


def test_an_update_without_tokens_has_loss_zero():
    for how in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        assert aggregate([[5.0]], [[0]], how) == 0


def test_value_loss_is_half_the_larger_squared_error():
    assert value_loss([1.0], [0.0], [2.0], clip=None) == pytest.approx(0.5)
    # Clipped value 0.5: error 1.5^2 is larger than 1^2.
    assert value_loss([1.0], [0.0], [2.0], clip=0.5) == pytest.approx(1.125)


def test_gspo_spreads_the_mean_log_ratio_over_the_sequence():
    # log-ratios 0.2 and 0.4 inside the mask: mean 0.3
    new = sequence_logp([[-1.0, -0.8, 5.0]], [[-1.2, -1.2, 0.0]], [[1, 1, 0]])
    np.testing.assert_allclose(new - [[-1.2, -1.2, 0.0]], 0.3)


def test_losses_equal_a_loop_over_tokens():
    rng = np.random.default_rng(7)
    new, old, advantage, value, before, target = rng.normal(size=(6, 5, 9))
    mask = rng.random((5, 9)) < 0.5
    policy = clip_loss(new, old, advantage, clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    critic = value_loss(value, before, target, clip=0.4)
    sums = [0.0] * 5
    for b, t in np.ndindex(5, 9):
        ratio, a = math.exp(new[b, t] - old[b, t]), advantage[b, t]
        gain = min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
        gain = max(gain, 2.0 * a) if a < 0 else gain
        assert policy[b, t] == pytest.approx(-gain)
        near = before[b, t] + min(max(value[b, t] - before[b, t], -0.4), 0.4)
        errors = ((value[b, t] - target[b, t]) ** 2, (near - target[b, t]) ** 2)
        assert critic[b, t] == pytest.approx(max(errors) / 2)
        sums[b] += -gain if mask[b, t] else 0.0
    rows = [b for b in range(5) if mask[b].any()]
    means = [sums[b] / mask[b].sum() for b in rows]
    assert aggregate(policy, mask) == pytest.approx(sum(sums) / mask.sum())
    assert aggregate(policy, mask, "seq_mean_token_mean") == pytest.approx(sum(means) / len(rows))
    assert aggregate(policy, mask, "seq_mean_token_sum") == pytest.approx(sum(sums) / len(rows))
    constant = aggregate(policy, mask, "constant", max_length=9)
    assert constant == pytest.approx(sum(sums) / (9 * len(rows)))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("seq_mean_token_mean", [1 / 4, 1, 1 / 8]),  # a row without tokens has no token to weigh
        ("seq_mean_token_sum", [1 / 2, 1 / 2, 1 / 2]),
        ("constant", [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_a_token_weighs_by_the_tokens_and_rows_of_the_whole_update(how, expected):
    assert token_shares([2, 0, 4], how, max_length=10).tolist() == expected


def factors(num_steps: int, **options) -> list[float]:
    return [lr_factor(step, num_steps, **options) for step in range(1, num_steps + 1)]


def test_constant_is_one_after_a_straight_warmup():
    assert factors(3) == [1, 1, 1]
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_falls_in_equal_steps_and_the_last_step_still_learns():
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2, min_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    )


def test_cosine_is_slow_at_both_ends_and_half_in_the_middle():
    # (1 + cos(k pi / 4)) / 2 for k = 0, 1, 2, 3
    assert factors(4, schedule="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert lr_factor(3, 4, schedule="cosine", min_ratio=0.1) == pytest.approx(0.55)


def test_steps_after_the_last_stay_at_the_smallest_rate():
    assert lr_factor(9, 4, schedule="linear", min_ratio=0.1) == pytest.approx(0.1)


def test_a_warmup_longer_than_the_run_never_ends():
    assert factors(2, schedule="cosine", warmup_steps=10) == [0.1, 0.2]


def test_unknown_schedules_and_step_zero_are_refused():
    with pytest.raises(MooredError, match="did you mean 'cosine'"):
        lr_factor(1, 4, schedule="cosin")
    with pytest.raises(MooredError, match="counted from 1"):
        lr_factor(0, 4)
