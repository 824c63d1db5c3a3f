"""I(Z;A|X) and I(X;A) worked out by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from moored.diagnostics import action_information, reasoning_action_information
from moored.diagnostics.chain import reasoning_action, state_action
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group, Prompt, StopReason, Trajectory, Turn


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


def entropy(*shares: float) -> float:
    return -sum(p * math.log(p) for p in shares)


def fixed_actions(keys: str) -> np.ndarray:
    """Every reasoning fixes its action: an action is possible after equal reasonings only."""
    return np.array([[0.0 if a == b else -1e3 for b in keys] for a in keys])


@pytest.mark.parametrize("keys", ["a" * 15 + "b", "aab", "aabbcc", "abcd"])
def test_a_reasoning_that_came_up_often_weighs_as_often(keys):
    shares = [keys.count(key) / len(keys) for key in set(keys)]
    for reasoning_keys in (None, [list(keys)]):
        report = reasoning_action_information([fixed_actions(keys)], reasoning_keys=reasoning_keys)
        assert report.mi_nats == pytest.approx(entropy(*shares))


def test_fifteen_reasonings_alike_and_one_other_carry_a_quarter_of_a_nat():
    block = fixed_actions("a" * 15 + "b")
    report = reasoning_action_information([block], reasoning_keys=[["a"] * 15 + ["b"]])
    assert report.mi_nats == pytest.approx(0.2338, abs=1e-4)


def test_prompts_with_one_distinct_reasoning_count_zero():
    # One prompt of five has two reasonings, H(2/3, 1/3) = 0.636; without the others that would be
    # the result, but where reasoning does not vary it controls nothing: 0.636 / 5.
    blocks = [fixed_actions("aab"), *[np.full((3, 3), -0.5)] * 4]
    keys = [["a", "a", "b"], *[["c"] * 3] * 4]
    report = reasoning_action_information(blocks, reasoning_keys=keys, permutations=9)
    assert report.mi_nats == pytest.approx(entropy(2 / 3, 1 / 3) / 5)
    assert (report.num_prompts, report.num_actions, report.num_constant_prompts) == (5, 15, 4)
    assert report.num_skipped_prompts == 0
    alike = reasoning_action_information([np.zeros((2, 2))], reasoning_keys=[["c", "c"]])
    assert alike.mi_nats == 0


def test_noise_between_scores_of_one_reasoning_counts_zero():
    # Scored twice in bfloat16, the same reasoning gives two numbers.
    block = np.array([[-1.0, -1.01], [-1.01, -1.0]])
    assert reasoning_action_information([block], reasoning_keys=[["c", "c"]]).mi_nats == 0


def test_a_prompt_with_one_action_has_nothing_to_compare():
    blocks = [fixed_actions("ab"), np.zeros((1, 1))]
    report = reasoning_action_information(blocks, reasoning_keys=[["a", "b"], ["c"]])
    assert report.mi_nats == pytest.approx(math.log(2))
    assert (report.num_prompts, report.num_skipped_prompts) == (1, 1)
    assert report.num_constant_prompts == 0


def test_an_action_that_begins_a_longer_one_is_told_apart_by_its_end():
    # "U" after reasoning 0, "U || R" after reasoning 1, both certain. Without its end "U" is as
    # likely after either, and half of the information is lost: 0.347 for log 2 = 0.693.
    up, right, think, close = 40, 41, 1, 2
    replies = [[think, 20, close, up, close], [think, 21, close, up, right, close]]
    spans = [(3, 4), (3, 5)]

    def turn(task: int, reply: list[int], span: tuple[int, int]) -> Turn:
        return Turn(
            prompt=Prompt(np.array([100 + task])),
            completion_ids=np.array(reply),
            logprobs=np.zeros(len(reply)),
            think_span=(1, 2),
            answer_span=span,
            reply="",
        )

    def group(task: int) -> Group:
        turns = [turn(task, *x) for x in zip(replies, spans, strict=True)]
        trajectories = [
            Trajectory(env="toy", task_seed=task, episode_seed=i, turns=(t,), stop=StopReason.DONE)
            for i, t in enumerate(turns)
        ]
        return Group(group_id=task, env="toy", task_seed=task, trajectories=tuple(trajectories))

    def logp(thought: int, done: list[int], token: int) -> float:
        written = replies[thought - 20][3:]
        return 0.0 if written[: len(done) + 1] == [*done, token] else -1e3

    def score(requests):
        return [
            [
                np.array([logp(r.prompt.ids[2], ids[:k].tolist(), ids[k]) for k in range(len(ids))])
                for ids in r.continuations
            ]
            for r in requests
        ]

    assert reasoning_action([group(0), group(1)], score).mi_nats == pytest.approx(math.log(2))
    assert state_action([group(0), group(1)]).num_distinct_actions == 2


def test_the_upper_bound_is_averaged_over_actions_like_the_information():
    blocks = [fixed_actions("ab"), fixed_actions("abcdef")]
    report = reasoning_action_information(blocks)
    assert report.mi_upper_bound == pytest.approx((2 * math.log(2) + 6 * math.log(6)) / 8)
    assert report.mi_nats == pytest.approx(report.mi_upper_bound)  # reached, never passed


def test_one_prompt_has_no_interval_and_two_have_none_that_is_half_right():
    found = [
        reasoning_action_information([fixed_actions("ab")] * count, bootstrap=50).interval
        for count in (1, 2, 3)
    ]
    assert found[:2] == [None, None] and found[2] is not None


def test_chain_refuses_what_it_cannot_measure():
    with pytest.raises(TooFewPromptsError):
        reasoning_action_information([np.zeros((1, 1))])
    with pytest.raises(MooredError, match=r"scores\[0\]"):
        reasoning_action_information([np.zeros((2, 3))])
    with pytest.raises(MooredError, match=r"reasoning_keys\[0\] has 1 keys for 2"):
        reasoning_action_information([np.zeros((2, 2))], reasoning_keys=[["a"]])
    with pytest.raises(MooredError, match="one row per prompt, got 0 for 1"):
        reasoning_action_information([np.zeros((2, 2))], reasoning_keys=[])
    with pytest.raises(MooredError, match="bootstrap must be"):
        reasoning_action_information([np.zeros((2, 2))], bootstrap=-1)
    with pytest.raises(MooredError, match="permutations must be"):
        action_information(["x", "y"], ["a", "b"], permutations=-1)
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


def test_chain_information_is_the_mean_gain_over_all_actions_of_unequal_groups():
    rng = np.random.default_rng(17)
    blocks = [rng.normal(-3, 2, (k, k)) for k in (2, 3, 6, 2, 9)]
    gains = [
        [row[k] - math.log(sum(map(math.exp, row)) / len(row)) for k, row in enumerate(block)]
        for block in blocks
    ]
    report = reasoning_action_information(blocks, bootstrap=4000)
    assert report.mi_nats == pytest.approx(statistics.mean(itertools.chain(*gains)))
    sums, counts = [sum(g) for g in gains], [len(g) for g in gains]
    draws = itertools.product(range(5), repeat=5)
    means = [sum(sums[i] for i in draw) / sum(counts[i] for i in draw) for draw in draws]
    low, high = np.quantile(means, [0.025, 0.975])
    assert report.interval is not None
    assert report.interval.low == pytest.approx(low, abs=0.05 * (high - low))
    assert report.interval.high == pytest.approx(high, abs=0.05 * (high - low))


def test_chain_p_value_equals_the_share_of_all_dealings():
    rng = np.random.default_rng(18)
    block = rng.normal(0, 1, (4, 4)) + 0.5 * np.eye(4)
    sums = [sum(block[k, d[k]] for k in range(4)) for d in itertools.permutations(range(4))]
    exact = statistics.mean(bool(s >= sums[0] - 1e-9) for s in sums)
    report = reasoning_action_information([block], permutations=4000)
    assert 0.05 < exact < 0.95
    assert report.p_value == pytest.approx(exact, abs=0.03)
