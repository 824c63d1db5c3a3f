"""Buckets, norms, noise, cosines and jackknife intervals, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.algo.gradients import Bucket, decompose, rank_buckets
from moored.errors import MooredError


def products(gradients_TPD) -> np.ndarray:
    return np.einsum("apd,bqd->apbq", gradients_TPD, gradients_TPD)


def whole(gradients_TPD, terms=("task",), *, tokens=None, samples=None) -> Bucket:
    gradients = np.asarray(gradients_TPD, dtype=float)
    num_groups = gradients.shape[1]
    return decompose(
        products(gradients),
        terms,
        rv=np.zeros(num_groups),
        num_tokens=tokens or [1] * num_groups,
        num_samples=samples or [1] * num_groups,
        num_buckets=1,
    ).whole


def test_buckets_hold_equal_numbers_of_groups_from_the_lowest_rv_to_the_highest():
    found = rank_buckets([0.3, 0.0, 0.9, 0.1, 0.5, 0.0, 0.2], 3)
    assert [members.tolist() for members in found] == [[1, 5, 3], [6, 0], [4, 2]]


def test_fewer_groups_than_buckets_are_refused():
    with pytest.raises(MooredError, match="2 groups cannot be cut into 3 buckets"):
        rank_buckets([0.0, 1.0], 3)


def test_norm_noise_and_snr_of_four_groups_in_two_dimensions():
    # They add up to (4, 2); each is (1, 1/2) away from their mean (1, 1/2).
    found = whole([[[0, 0], [0, 1], [2, 0], [2, 1]]]).terms["task"]
    assert found.norm == pytest.approx(math.sqrt(20))
    # tr Cov = 4 * (1 + 1/4) / 3 = 5/3; standard error of the sum of four: sqrt(4 * 5/3).
    assert found.noise == pytest.approx(math.sqrt(20 / 3))
    assert found.snr == pytest.approx(math.sqrt(3))
    assert found.signal == pytest.approx(math.sqrt(20 - 20 / 3))


def test_the_jackknife_interval_is_that_of_the_norms_without_one_group():
    # In one dimension the norm per token is the mean of 1, 2, 3 and 6 times 4; the jackknife's
    # standard error of a mean is s / sqrt(n): s^2 = 14/3, so 4 * sqrt(14 / 12); t(3) = 3.182.
    found = whole([[[1], [2], [3], [6]]]).terms["task"]
    half = 3.182 * 4 * math.sqrt(14 / 12)
    assert found.norm_interval == pytest.approx((max(0.0, 12 - half), 12 + half))


def test_a_bucket_is_scaled_to_all_tokens_or_to_all_trajectories():
    # The bucket of the second group has 3 of 4 tokens, and 1 of 3 trajectories.
    found = decompose(
        products(np.array([[[1.0], [6.0]]])),
        ["task"],
        rv=[0, 1],
        num_tokens=[1, 3],
        num_samples=[2, 1],
        num_buckets=2,
    ).buckets[1]
    assert found.num_tokens == 3
    assert found.terms["task"].norm == pytest.approx(6 * 4 / 3)
    assert found.terms["task"].norm_per_sample == pytest.approx(6 * 3)


def test_cosines_of_task_and_regulariser_and_of_a_bucket_with_the_others():
    task, kl = [[1, 0], [0, 1]], [[-1, 0], [1, 1]]
    found = decompose(
        products(np.array([task, kl], dtype=float)),
        ["task", "kl"],
        rv=[0, 1],
        num_tokens=[1, 1],
        num_samples=[1, 1],
        num_buckets=2,
    )
    low, high = found.buckets
    assert low.cosines == pytest.approx(
        {"task_kl": -1, "task_with_whole": math.sqrt(0.5), "task_with_rest": 0}
    )
    assert high.cosines["task_kl"] == pytest.approx(math.sqrt(0.5))
    assert found.whole.cosines["task_with_whole"] == pytest.approx(1)


def test_the_papers_snr_is_task_norm_over_the_norm_of_all_regularisers_together():
    # Two groups: task (3, 0) + (0, 4), norm 5; kl (1, 0) + (0, 0) and entropy (0, 1) + (0, 1)
    # together (1, 2), norm sqrt 5. The noise that `snr` divides by is 5: (3, -4) apart.
    task, kl, entropy = [[3, 0], [0, 4]], [[1, 0], [0, 0]], [[0, 1], [0, 1]]
    found = whole([task, kl, entropy], ("task", "kl", "entropy"))
    assert found.task_over_regulariser == pytest.approx(math.sqrt(5))
    assert found.terms["task"].snr == pytest.approx(1)
    # Without the first group 4 / 1, without the second 3 / sqrt 2: half their difference is the
    # standard error, t(1) = 12.706.
    half = 12.706 * (4 - 3 / math.sqrt(2)) / 2
    interval = found.task_over_regulariser_interval
    assert interval == pytest.approx((max(0.0, math.sqrt(5) - half), math.sqrt(5) + half))


def test_without_a_regulariser_there_is_nothing_to_divide_the_task_norm_by():
    alone = whole([[[3.0], [4.0]]])
    assert math.isnan(alone.task_over_regulariser)
    still = whole([[[3.0], [4.0]], [[0.0], [0.0]]], ("task", "kl"))
    assert math.isnan(still.task_over_regulariser)
    assert all(map(math.isnan, still.task_over_regulariser_interval))


def test_what_cannot_be_known_is_nan_and_not_a_number_that_looks_known():
    single = whole([[[3, 4]]]).terms["task"]
    assert single.norm == 5
    assert math.isnan(single.noise) and math.isnan(single.snr)
    assert all(map(math.isnan, single.norm_interval))
    still = whole([[[0.0], [0.0], [0.0]]])
    assert still.terms["task"].norm == still.terms["task"].noise == 0.0
    assert math.isnan(still.terms["task"].snr)
    assert math.isnan(still.cosines["task_with_whole"])
    no_tokens = whole([[[0.0], [0.0]]], tokens=[0, 0]).terms["task"]
    assert math.isnan(no_tokens.norm)


def test_noise_alone_has_an_snr_near_one_and_intervals_hold_the_true_norm():
    rng = np.random.default_rng(0)
    noise = [whole(rng.normal(size=(1, 8, 50))).terms["task"].snr for _ in range(50)]
    assert np.mean(noise) == pytest.approx(1.0, abs=0.05)
    # A mean of (5, 0, …) with noise of a tenth of that: the interval of the norm holds it.
    centre = np.eye(1, 20)[0] * 5.0
    hits = 0
    for _ in range(200):
        found = whole((centre + 0.5 * rng.normal(size=(8, 20)))[None]).terms["task"]
        low, high = found.norm_interval
        hits += low <= 5.0 * 8 <= high
    assert hits >= 180
