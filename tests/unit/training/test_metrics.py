"""The numbers of a step, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from moored.config import FilterConfig, load_config
from moored.engine.base import Learner
from moored.training.algorithms import load_algorithm
from moored.training.samples import Sample, score_groups, select_samples, step_metrics
from moored.training.update import estimate_advantages
from moored.types import Group, Prompt, StopReason, Trajectory, Turn

NO_FILTER = FilterConfig(rule="none")


def turn(reward: float, *, length: int = 2, is_valid: bool = True) -> Turn:
    return Turn(
        prompt=Prompt(np.array([1])),
        completion_ids=np.arange(length),
        logprobs=np.zeros(length),
        reply="",
        reward=reward,
        is_valid=is_valid,
    )


def episode(
    reward: float, *, success: bool, stop: StopReason = StopReason.DONE, length: int = 2
) -> Trajectory:
    return episode_of(turn(reward, length=length), success=success, stop=stop)


def episode_of(
    *turns: Turn, success: bool = False, stop: StopReason = StopReason.DONE
) -> Trajectory:
    return Trajectory(
        env="toy", task_seed=0, episode_seed=0, turns=turns, stop=stop, success=success
    )


def metrics_of(*members: Trajectory) -> dict[str, float]:
    groups = [Group(group_id=0, env="toy", task_seed=0, trajectories=members)]
    return step_metrics(NO_FILTER, groups, score_groups(NO_FILTER, groups), [], [], {})


def test_success_and_reward_are_of_the_same_episodes_those_without_an_error():
    lost = episode(5.0, success=False, stop=StopReason.ENV_ERROR)
    found = metrics_of(episode(1.0, success=True), episode(0.0, success=False), lost, lost)
    assert found["rollout/success_rate"] == pytest.approx(1 / 2)
    assert found["rollout/reward_mean"] == pytest.approx(1 / 2)
    assert found["rollout/error_count"] == 2.0


def test_a_step_of_errors_alone_has_neither_success_nor_reward():
    found = metrics_of(episode(0.0, success=False, stop=StopReason.SAMPLER_ERROR))
    assert math.isnan(found["rollout/success_rate"]) and math.isnan(found["rollout/reward_mean"])


def test_reward_variance_is_missing_where_no_group_has_two_rewards_to_compare():
    lost = episode(0.0, success=False, stop=StopReason.ENV_ERROR)
    for members in ((lost, lost), (episode(1.0, success=True), lost, lost)):
        found = metrics_of(*members)
        assert math.isnan(found["rollout/reward_variance_mean"])
        assert math.isnan(found["rollout/reward_variance_std_over_mean"])
    found = metrics_of(episode(1.0, success=True), episode(0.0, success=False), lost)
    assert found["rollout/reward_variance_mean"] == pytest.approx(1 / 4)


LOST = StopReason.ENV_ERROR
# A solved group, one that differs by the price of a move, and one that a failure is lost from.
SOLVED = (episode(10.0, success=True), episode(0.0, success=False))
PRICED = (episode(-0.1, success=False, length=6), episode(-0.2, success=False))
TORN = (
    episode(10.0, success=True),
    episode(9.0, success=True),
    episode(0.0, success=False, stop=LOST),
)


class Critic:
    """Predicts 0 everywhere."""

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.zeros(len(sample.ids_T) + 1) for sample in samples]


def share_of(members: Sequence[Sequence[Trajectory]], *overrides: str) -> float:
    """`signal/outcome_free_share` of a step on these groups, through the code of a step."""
    config = load_config({}, ["algorithm.name=grpo", "filter.rule=none", *overrides])
    groups = [
        Group(group_id=k, env="toy", task_seed=0, trajectories=tuple(own))
        for k, own in enumerate(members)
    ]
    selection, algorithm = score_groups(config.filter, groups), load_algorithm(config.algorithm)
    samples = select_samples(config, groups, selection)
    critic = cast(Learner, Critic())
    advantages = estimate_advantages(config, algorithm, critic, groups, samples)
    metrics = step_metrics(config.filter, groups, selection, samples, advantages, {})
    return metrics["signal/outcome_free_share"]


def test_outcome_free_share_of_a_step_weighs_advantages_by_the_tokens_that_they_train():
    # GRPO: |advantage| is 1 throughout, on 2 + 2 tokens and on 6 + 2.
    assert share_of([SOLVED, PRICED]) == pytest.approx(8 / 12, abs=1e-4)
    # Dr. GRPO: 5 on 2 + 2 tokens, 0.05 on 6 + 2.
    plain = share_of([SOLVED, PRICED], "algorithm.advantage=dr_grpo")
    assert plain == pytest.approx(0.4 / 20.4)


def test_outcome_free_share_is_of_what_is_trained_on_after_the_filter():
    assert share_of([SOLVED, PRICED], "filter.rule=top_p") == 0.0
    assert share_of([SOLVED, PRICED], "filter.rule=top_p", "filter.action=mask") == 0.0
    # Variances 25 and 0.0025: the second group weighs 1e-4.
    soft = share_of([SOLVED, PRICED], "filter.action=soft")
    assert soft == pytest.approx(8e-4 / (4 + 8e-4), rel=1e-3)


def test_outcome_free_share_leaves_out_episodes_that_ended_in_an_error():
    # What is left of the torn group succeeded throughout: it is outcome-free, 2 + 2 tokens of 8.
    assert share_of([SOLVED, TORN]) == pytest.approx(4 / 8, abs=1e-4)


def test_outcome_free_share_of_token_advantages_is_their_sum_over_the_tokens_of_a_group():
    # REINFORCE++: rewards to go 10, 10, 0, 0 and -0.1 six times, -0.2 twice; mean 1.6 of 12.
    found = share_of([SOLVED, PRICED], "algorithm.name=reinforce_pp")
    mean = (20 - 0.6 - 0.4) / 12
    mixed, free = 2 * (10 - mean) + 2 * mean, 6 * (mean + 0.1) + 2 * (mean + 0.2)
    assert found == pytest.approx(free / (mixed + free))
    assert share_of([SOLVED, PRICED], "algorithm.name=ppo") == pytest.approx(found)


def test_outcome_free_share_is_1_without_a_success_and_missing_without_a_push():
    assert share_of([PRICED, PRICED]) == 1.0
    assert math.isnan(share_of([(PRICED[0], PRICED[0])]))
    assert math.isnan(share_of([(episode(0.0, success=False, stop=LOST),) * 2]))


def test_rewards_of_well_formed_and_malformed_turns_are_logged_apart():
    # Two valid moves cost 0.2, a malformed reply 0.1: the cheaper one.
    mixed = episode_of(turn(-0.2), turn(-0.1, is_valid=False), turn(-0.2))
    solved = episode_of(turn(0.8), success=True)
    lost = episode_of(turn(-5.0), turn(-5.0, is_valid=False), stop=LOST)
    found = metrics_of(mixed, solved, lost)
    assert found["rollout/valid_turn_reward_mean"] == pytest.approx(0.4 / 3)
    assert found["rollout/malformed_turn_reward_mean"] == pytest.approx(-0.1)
    assert math.isnan(metrics_of(solved)["rollout/malformed_turn_reward_mean"])
    assert math.isnan(metrics_of(lost)["rollout/valid_turn_reward_mean"])
