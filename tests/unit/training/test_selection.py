"""Scores and selection of recorded groups, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moored.config import Config, load_config
from moored.training.samples import (
    Sample,
    TokenAdvantages,
    score_groups,
    select_samples,
    step_metrics,
    token_weights,
)
from moored.types import Group, Prompt, StopReason, Trajectory, Turn


def options(*overrides: str) -> Config:
    return load_config({}, ["algorithm.name=dapo", *overrides])


def played(reward: float, *, length: int = 2, logprob: float = -1.0) -> Trajectory:
    turn = Turn(
        prompt=Prompt(np.array([1])),
        completion_ids=np.arange(length),
        logprobs=np.full(length, logprob),
        reply="",
        reward=reward,
    )
    return Trajectory(env="toy", task_seed=0, episode_seed=0, turns=(turn,), stop=StopReason.DONE)


def group(*members: Trajectory) -> Group:
    return Group(group_id=0, env="toy", task_seed=0, trajectories=members)


def test_soft_keeps_every_group_that_has_a_weight():
    # Variances 1/4, 1/16 and 0; top_p 0.75 alone would keep the first: 0.25 of 0.3125 is 0.8.
    rewards = [(0.0, 1.0), (0.0, 0.5), (1.0, 1.0)]
    three = [group(*map(played, own)) for own in rewards]
    config = options("filter.action=soft", "filter.rule=top_p", "filter.value=0.75")
    selection = score_groups(config.filter, three)
    assert selection.kept.tolist() == [0, 1]
    samples = select_samples(config, three, selection)
    metrics = step_metrics(config.filter, three, selection, samples, untrained(samples), {})
    assert (metrics["filter/num_kept"], metrics["tokens/trained"]) == (2.0, 8.0)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("drop", {0: 1.0}),
        ("refill", {0: 1.0}),
        ("mask", {0: 1.0, 1: None, 2: None}),
        # Variances 1/4, 1/16 and 0: as shares of the largest.
        ("soft", {0: 1.0, 1: 0.25, 2: 0.0}),
    ],
)
def test_what_an_action_makes_of_groups_that_the_rule_does_not_keep(action: str, expected: dict):
    rewards = [(0.0, 1.0), (0.0, 0.5), (1.0, 1.0)]
    three = [group(*map(played, own)) for own in rewards]
    config = options(f"filter.action={action}", "filter.rule=top_k_count", "filter.value=1")
    samples = select_samples(config, three, score_groups(config.filter, three))
    assert {s.group: None if s.is_masked else s.weight for s in samples} == expected
    # Four tokens a group; masked ones count in no mean, those of weight 0 do.
    shares = token_weights(samples, "token_mean", max_length=2)
    counted = 4 * sum(weight is not None for weight in expected.values())
    for sample, found in zip(samples, shares, strict=True):
        np.testing.assert_allclose(found, (expected[sample.group] or 0.0) / counted)


def untrained(samples: Sequence[Sample]) -> list[TokenAdvantages]:
    return [TokenAdvantages(advantages_T=np.zeros(len(sample.ids_T))) for sample in samples]


def moved(task_reward: float, *, penalty: float = 0.0, success: bool = False) -> Trajectory:
    """One reply; with a penalty it is malformed."""
    turn = Turn(
        prompt=Prompt(np.array([1])),
        completion_ids=np.arange(2),
        logprobs=np.zeros(2),
        reply="",
        reward=task_reward + penalty,
        penalty=penalty,
        is_valid=penalty == 0.0,
    )
    return Trajectory(
        env="toy", task_seed=0, episode_seed=0, turns=(turn,), stop=StopReason.DONE, success=success
    )


def scores_of(members: Sequence[Trajectory], *overrides: str) -> float:
    one = group(*members)
    return float(score_groups(options(*overrides).filter, [one]).scores[0])


def test_a_group_of_failures_with_one_malformed_reply_scores_zero_unless_total_is_asked_for():
    failures = [moved(0.0), moved(0.0), moved(0.0), moved(0.0, penalty=-0.4)]
    assert scores_of(failures, "filter.score=variance") == 0.0
    # Rewards 0, 0, 0, -0.4: mean -0.1, variance (3 * 0.01 + 0.09) / 4.
    total = scores_of(failures, "filter.score=variance", "filter.reward=total")
    assert total == pytest.approx(0.03)


def test_a_malformed_reply_that_escapes_the_price_of_moves_is_not_better_than_a_failure():
    # Ten failed moves cost 1; a malformed reply moves nothing, and costs a penalty of 2.
    failures = [moved(-1.0), moved(-1.0), moved(-1.0), moved(0.0, penalty=-2.0)]
    assert scores_of(failures, "filter.score=variance") == 0.0
    # Beside a success it is as bad as failing: 9, 9 and 0 without a failure, 9, -1, -1 with one.
    solved = [moved(9.0, success=True), moved(9.0, success=True), moved(0.0, penalty=-2.0)]
    assert scores_of(solved, "filter.score=variance") == pytest.approx(18.0)
    mixed = [moved(9.0, success=True), moved(-1.0), moved(0.0, penalty=-2.0)]
    assert scores_of(mixed, "filter.score=variance") == pytest.approx(200.0 / 9.0)


def test_groups_of_malformed_replies_alone_have_no_task_variance():
    malformed = [moved(0.0, penalty=-0.1), moved(0.0, penalty=-0.2)]
    assert scores_of(malformed, "filter.score=variance") == 0.0


def test_a_success_after_a_malformed_turn_keeps_its_task_reward():
    recovered = moved(9.0, penalty=-0.1, success=True)
    assert scores_of([recovered, moved(1.0)], "filter.score=variance") == pytest.approx(16.0)


def test_best_and_worst_are_ranked_by_the_reward_that_the_filter_scores():
    one = group(moved(-2.0), moved(-1.0), moved(0.0, penalty=-5.0), moved(3.0, success=True))
    # By task the malformed reply ties with the worst failure, which comes first.
    for reward, worst in (("task", 0), ("total", 2)):
        config = options("filter.rule=none", "filter.best_and_worst=1", f"filter.reward={reward}")
        chosen = select_samples(config, [one], score_groups(config.filter, [one]))
        assert [sample.trajectory for sample in chosen] == [worst, 3]


def test_filter_reward_success_goes_by_the_outcome_whatever_was_earned():
    lost = replace(moved(5.0), stop=StopReason.ENV_ERROR)
    failures = [moved(0.0), moved(-0.1), moved(-0.9)]
    solved = [moved(9.0, success=True), moved(10.0, success=True), lost]
    mixed = [moved(9.0, success=True), moved(8.9), moved(8.8), lost]
    groups = [group(*members) for members in (failures, solved, mixed)]
    by_task, by_outcome = (
        score_groups(options(f"filter.reward={r}", "filter.rule=nonzero").filter, groups)
        for r in ("task", "success")
    )
    assert by_task.kept.tolist() == [0, 1, 2]
    assert by_outcome.kept.tolist() == [2]
    # The variance of 1, 0, 0; the error is left out.
    assert by_outcome.scores == pytest.approx([0.0, 0.0, 2 / 9])
    chosen = options("filter.reward=success").filter
    metrics = step_metrics(chosen, groups, by_outcome, [], [], {})
    assert metrics["rollout/reward_variance_mean"] == pytest.approx(2 / 27)


def test_reward_variance_in_the_log_is_of_the_rewards_that_the_filter_scores():
    groups = [group(moved(0.0), moved(0.0), moved(0.0), moved(0.0, penalty=-0.4))]
    for reward, variance in (("task", 0.0), ("total", 0.03)):
        chosen = options(f"filter.reward={reward}").filter
        metrics = step_metrics(chosen, groups, score_groups(chosen, groups), [], [], {})
        assert metrics["rollout/reward_variance_mean"] == pytest.approx(variance)
        assert metrics["rollout/reward_mean"] == pytest.approx(-0.1)


def test_scores_of_length_and_entropy_are_taken_of_tokens_not_of_rewards():
    groups = [
        group(played(9.0, length=4, logprob=-0.5), played(9.0, length=2, logprob=-1.5)),
        group(played(0.0, length=6), played(1.0, length=8)),
    ]

    def scores(score: str) -> list[float]:
        return score_groups(options(f"filter.score={score}").filter, groups).scores.tolist()

    assert scores("length") == [3, 7]
    assert scores("entropy") == [1, 1]
    assert scores("entropy_std") == [0.5, 0]
    assert scores("reward_mean") == [9, 0.5]
