"""The numbers of a step, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.config import FilterConfig
from moored.training.metrics import step_metrics
from moored.training.selection import score_groups
from moored.types import Group, Prompt, StopReason, Trajectory, Turn

NO_FILTER = FilterConfig(rule="none")


def episode(reward: float, *, success: bool, stop: StopReason = StopReason.DONE) -> Trajectory:
    turn = Turn(
        prompt=Prompt(np.array([1])),
        completion_ids=np.arange(2),
        logprobs=np.zeros(2),
        reply="",
        reward=reward,
    )
    return Trajectory(
        env="toy", task_seed=0, episode_seed=0, turns=(turn,), stop=stop, success=success
    )


def metrics_of(*members: Trajectory) -> dict[str, float]:
    groups = [Group(group_id=0, env="toy", task_seed=0, trajectories=members)]
    return step_metrics(NO_FILTER, groups, score_groups(NO_FILTER, groups), [], {})


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
