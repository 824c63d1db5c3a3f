"""I(Z;A|X) and I(X;A) worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.diagnostics import action_information, reasoning_action_information
from moored.errors import MooredError, TooFewPromptsError


def test_actions_that_ignore_reasoning_carry_nothing():
    scores = [np.repeat([[-1.0], [-2.0]], 2, axis=1)]
    report = reasoning_action_information(scores, permutations=50)
    assert report.mi_nats == pytest.approx(0)
    assert report.p_value == 1


def test_actions_fixed_by_reasoning_carry_log_k():
    block = np.full((4, 4), -1e3)
    np.fill_diagonal(block, 0.0)
    report = reasoning_action_information([block] * 3, bootstrap=50, permutations=99)
    assert report.mi_nats == pytest.approx(math.log(4))
    assert report.mi_upper_bound == pytest.approx(math.log(4))
    assert report.p_value == 0.01
    assert report.interval is not None
    assert report.interval.low == pytest.approx(math.log(4))


def test_mean_is_over_actions_of_all_prompts():
    block = np.full((2, 2), -1e3)
    np.fill_diagonal(block, 0.0)
    flat = np.zeros((3, 3))
    report = reasoning_action_information([block, flat])
    assert report.mi_nats == pytest.approx(2 * math.log(2) / 5)
    assert (report.num_prompts, report.num_actions) == (2, 5)


def test_equal_reasonings_are_merged_and_prompts_with_one_are_counted_as_skipped():
    block = np.array([[0.0, 0.0, -50], [0.0, 0.0, -50], [-50, -50, 0.0]])
    merged = reasoning_action_information(
        [block, np.zeros((2, 2))], reasoning_keys=[["a", "a", "b"], ["c", "c"]]
    )
    assert merged.mi_nats == pytest.approx(math.log(2))
    assert merged.num_skipped_prompts == 1


def test_chain_refuses_what_it_cannot_measure():
    with pytest.raises(TooFewPromptsError):
        reasoning_action_information([np.zeros((1, 1))])
    with pytest.raises(MooredError, match=r"scores\[0\]"):
        reasoning_action_information([np.zeros((2, 3))])
    with pytest.raises(MooredError, match="finite"):
        reasoning_action_information([np.full((2, 2), math.nan)])


def test_action_information_by_hand():
    # Two prompts, each with its own action: plug-in log 2; cells 2, prompts 2, actions 2.
    report = action_information(["x", "x", "y", "y"], ["Up", "Up", "Down", "Down"])
    assert report.mi_plugin_nats == pytest.approx(math.log(2))
    assert report.mi_corrected_nats == pytest.approx(math.log(2) + 1 / 8)
    assert report.p_value is None


def test_independent_actions_have_plugin_information_by_chance_only():
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(10), 8).tolist()
    actions = rng.integers(4, size=80).tolist()
    report = action_information(prompts, actions, permutations=199)
    assert report.mi_null_mean_nats is not None and report.p_value is not None
    assert report.mi_plugin_nats > 0.1  # badly biased ...
    assert abs(report.mi_plugin_nats - report.mi_null_mean_nats) < 0.08  # ... as the null shows
    assert report.p_value > 0.05


def test_dependent_actions_stand_out_from_the_null():
    prompts = np.repeat(np.arange(10), 8)
    report = action_information(prompts.tolist(), (prompts % 4).tolist(), permutations=199)
    assert report.p_value == 1 / 200


def test_actions_need_two_prompts_and_equal_lengths():
    with pytest.raises(TooFewPromptsError):
        action_information(["x", "x"], ["a", "b"])
    with pytest.raises(MooredError, match="2 and 1"):
        action_information(["x", "y"], ["a"])
