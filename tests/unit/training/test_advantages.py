"""Advantages of tokens from the values of a critic, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moored.config import AlgorithmConfig
from moored.errors import MooredError
from moored.training.advantages import GAE, critic_advantages, group_advantages
from moored.training.batch import Sample, build_samples
from moored.types import Group, Prompt, StopReason, Trajectory, Turn


def sample(*, reward: float, trajectory: int = 0, is_truncated: bool = False) -> Sample:
    """A reply token, an observation token and another reply token, which earns the reward."""
    return Sample(
        prompt=Prompt(np.array([1])),
        ids_T=np.array([2, 3, 4]),
        loss_mask_T=np.array([True, False, True]),
        old_logprobs_T=np.zeros(3),
        turn_ends_T=np.array([True, False, True]),
        rewards_T=np.array([0.0, 0.0, reward]),
        group=0,
        trajectory=trajectory,
        is_truncated=is_truncated,
    )


def test_only_an_episode_that_was_cut_off_takes_the_value_after_its_last_token():
    samples = [sample(reward=1.0), sample(reward=1.0, is_truncated=True)]
    values = [np.array([0.5, 9.0, 0.25, 4.0])] * 2
    ended, cut = critic_advantages(samples, values, GAE, AlgorithmConfig())
    assert ended.returns_T is not None and cut.returns_T is not None
    assert ended.returns_T.tolist() == [1, 0, 1]
    assert cut.returns_T.tolist() == [5, 0, 5]
    assert cut.old_values_T is not None and cut.old_values_T.tolist() == [0.5, 0, 0.25]
    # Advantages 0.5, 0.75 and 4.5, 4.75 have mean 2.625 and variance (2.125² + 1.875²) / 2.
    scale = ((2.125**2 + 1.875**2) / 2 + 1e-8) ** 0.5
    expected = [-2.125 / scale, 0, -1.875 / scale], [1.875 / scale, 0, 2.125 / scale]
    assert ended.advantages_T == pytest.approx(expected[0])
    assert cut.advantages_T == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("stop", "is_cut"),
    [
        (StopReason.DONE, False),
        (StopReason.TURN_LIMIT, True),
        (StopReason.CONTEXT_LIMIT, True),
    ],
)
def test_of_a_trajectory_that_was_cut_off_the_last_sample_says_so(stop, is_cut):
    turns = tuple(
        Turn(
            prompt=Prompt(np.array(ids)),
            completion_ids=np.array([7]),
            logprobs=np.zeros(1),
            reply="",
        )
        for ids in ([3, 4], [3, 9, 9])  # the history was rewritten
    )
    trajectory = Trajectory(env="toy", task_seed=0, episode_seed=0, turns=turns, stop=stop)
    group = Group(group_id=0, env="toy", task_seed=0, trajectories=(trajectory,))
    assert [found.is_truncated for found in build_samples([group])] == [False, is_cut]


def test_a_group_estimator_must_return_one_number_per_trajectory():
    with pytest.raises(MooredError, match=r"each of 2 trajectories, got shape \(1,\)"):
        group_advantages(
            [sample(reward=1.0)], np.zeros(2), np.zeros(2), lambda rewards, _: rewards[:1]
        )
