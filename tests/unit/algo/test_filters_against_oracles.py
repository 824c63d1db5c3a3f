"""The filter against slow oracles in exact arithmetic, written from its definitions."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest

from moored.algo import preset, select, select_groups

SLACK = Fraction(1, 10**11)


def slow_prefix(masses: list[Fraction], target: Fraction) -> int:
    """Length of the smallest prefix whose sum reaches the target."""
    if target <= SLACK:
        return 0
    total = Fraction(0)
    for length, mass in enumerate(masses, start=1):
        total += mass
        if total >= target * (1 - SLACK):
            return length
    raise AssertionError("the target is out of reach")


def slow_rule(
    ranked: list[Fraction], rule: str, value: Fraction, eps: Fraction, largest: bool, num: int
) -> list[int]:
    """Positions in ranking order that a rule keeps, read from its row in the table."""
    everything = list(range(len(ranked)))
    if rule in ("top_p", "top_p_softmax") and value >= 1:
        return everything
    if rule == "top_p":
        return everything[: slow_prefix(ranked, value * sum(ranked) - eps)]
    if rule == "top_p_softmax":
        best = ranked[0]
        odds = [Fraction(math.exp(float(s - best) * (1 if largest else -1))) for s in ranked]
        return everything[: slow_prefix(odds, value * sum(odds))]
    if rule == "top_k":
        return everything[: max(1, math.floor(value * num))]
    if rule == "top_k_count":
        return everything[: int(value)]
    if rule == "min_p" and largest:
        return [i for i in everything if ranked[i] >= value * ranked[0]]
    if rule == "min_p":
        return [i for i in everything if value * ranked[i] <= ranked[0]]
    if rule == "nonzero":
        return [i for i in everything if ranked[i] > eps]
    assert rule == "quantile"
    first, last = (round(Fraction(len(ranked)) * (value - 1 + side) / 4) for side in (0, 1))
    return everything[first:last]


def slow_select(scores, rule, value, eps, largest, keep_zero) -> list[int]:
    if rule == "none":
        return list(range(len(scores)))
    exact = [Fraction(float(s)) for s in scores]
    order = [i for i in range(len(exact)) if keep_zero or exact[i] != 0]
    order.sort(key=lambda i: -exact[i] if largest else exact[i])  # list.sort is stable
    if not order:
        return []
    ranked = [exact[i] for i in order]
    value, eps = Fraction(str(value)), Fraction(str(eps))
    return sorted(order[i] for i in slow_rule(ranked, rule, value, eps, largest, len(exact)))


VALUES = {
    "top_p": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0),
    "top_p_softmax": (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0),
    "top_k": (0.0, 0.1, 0.25, 0.29, 0.3, 0.7, 1.0),
    "top_k_count": (1, 2, 3, 50),
    "min_p": (0.0, 0.25, 0.5, 1.0),
    "nonzero": (0.9,),
    "quantile": (1, 2, 3, 4),
    "none": (0.9,),
}


@pytest.mark.parametrize("rule", VALUES)
def test_every_rule_keeps_what_an_exact_reading_of_its_definition_keeps(rule):
    rng = np.random.default_rng(0)
    for largest, keep_zero in itertools.product((True, False), repeat=2):
        for _ in range(60):
            num = int(rng.choice([1, 2, 5, 8, 33]))
            scores = rng.integers(0, rng.choice([2, 5, 1000]), num) / 8  # ties, exact sums
            value, eps = rng.choice(VALUES[rule]).item(), float(rng.choice([0.0, 0.3]))
            options = {"value": value, "eps": eps, "largest": largest, "keep_zero": keep_zero}
            expected = slow_select(scores, rule, value, eps, largest, keep_zero)
            assert select(scores, rule=rule, **options).tolist() == expected, (scores, options)


def test_a_prefix_that_reaches_its_mass_up_to_rounding_is_enough():
    for num, scale in itertools.product(range(2, 30), (0.1, 0.3, 1 / 3, 0.7, 1e-5, 7e8)):
        for count in range(1, num):
            scores = np.full(num, scale)
            assert len(select(scores, value=count / num)) == count
            assert len(select(scores, rule="top_p_softmax", value=count / num)) == count
    pair = [0.1 + 0.2, 0.21]  # 0.7 of the first is 0.21000000000000002
    for largest in (True, False):
        assert select(pair, rule="min_p", value=0.7, largest=largest).tolist() == [0, 1]


def test_softmax_mass_is_safe_for_large_scores():
    assert select([900.0, 899.0, -900.0], rule="top_p_softmax", value=0.7).tolist() == [0]
    assert select([900.0, -900.0], rule="top_p_softmax", value=1.0).tolist() == [0, 1]


def slow_ragen(scores: list[float], value: float, eps: float) -> list[int]:
    """The reference loop: add the best group until the target is met, stop at a zero score."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    target, total, count = value * sum(scores) - eps, 0.0, 0
    while total < target and count < len(order) and scores[order[count]] > 0:
        total += scores[order[count]]
        count += 1
    return sorted(order[:count]) if total >= target else []


def test_ragen_preset_keeps_what_the_reference_loop_keeps():
    rng = np.random.default_rng(1)
    for _ in range(200):
        rewards = rng.random((8, 4)) * rng.choice([0, 0.02, 1], (8, 1))
        scores = [statistics.stdev(row) if len(set(row)) > 1 else 0.0 for row in rewards.tolist()]
        expected = slow_ragen(scores, 0.9, 0.01)
        assert select_groups(rewards, **preset("ragen")).kept.tolist() == expected
    no_filter = {**preset("ragen"), "value": 1.0, "keep_zero": True}
    assert select_groups(np.zeros((3, 2)), **no_filter).kept_fraction == 1


def test_selection_metrics_are_means_over_all_and_over_kept_groups():
    rewards = [[1, 0], [0.5, 0], [0, 0], [0.1, 0]]  # sample stds 0.7071, 0.3536, 0, 0.0707
    metrics = select_groups(rewards, value=0.5).metrics()
    assert metrics["filter/num_zero"] == 1
    assert metrics["filter/reward_std_mean"] == pytest.approx(1.6 / 4 * math.sqrt(0.5))
    assert metrics["filter/kept_reward_std_mean"] == pytest.approx(math.sqrt(0.5))
    by_length = select_groups([[3, 5]], score="length").metrics()
    assert not any("reward_std" in name for name in by_length)
