"""Samples of recorded trajectories, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moored.errors import MooredError
from moored.training.samples import Sample, build_samples, token_shares
from moored.types import Group, Prompt, StopReason, Trajectory, Turn


def turn(prompt: Sequence[int], reply: Sequence[int], reward: float) -> Turn:
    return Turn(
        prompt=Prompt(np.array(prompt)),
        completion_ids=np.array(reply, dtype=np.int64),
        logprobs=np.zeros(len(reply)),
        reply="",
        reward=reward,
    )


def samples_of(*turns: Turn) -> list[Sample]:
    episode = Trajectory(env="toy", task_seed=0, episode_seed=0, turns=turns, stop=StopReason.DONE)
    return build_samples([Group(group_id=0, env="toy", task_seed=0, trajectories=(episode,))])


def test_a_reply_without_tokens_adds_its_reward_to_the_last_token_before_it():
    # Prompt 1, reply 5 6, observation 9, an empty reply, observation 8, reply 7.
    (sample,) = samples_of(
        turn([1], [5, 6], 1.0), turn([1, 5, 6, 9], [], -0.25), turn([1, 5, 6, 9, 8], [7], 2.0)
    )
    assert sample.ids_T.tolist() == [5, 6, 9, 8, 7]
    assert sample.rewards_T.tolist() == [0, 0.75, 0, 0, 2]
    assert sample.loss_mask_T.tolist() == [True, True, False, False, True]
    assert sample.turn_ends_T.tolist() == [False, True, False, False, True]


def test_a_reply_without_tokens_after_a_rewritten_history_adds_to_the_sample_before_it():
    (sample,) = samples_of(turn([1], [5, 6], 1.0), turn([2, 3], [], -0.25))
    assert sample.ids_T.tolist() == [5, 6] and sample.rewards_T.tolist() == [0, 0.75]


def test_no_token_gets_the_reward_of_an_empty_reply_that_came_first():
    (sample,) = samples_of(turn([1], [], -0.25), turn([1, 9], [5], 2.0))
    assert sample.prompt == Prompt(np.array([1, 9])) and sample.rewards_T.tolist() == [2]
    assert samples_of(turn([1], [], -0.25)) == []


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
    assert token_shares(np.array([2, 0, 4]), how, max_length=10).tolist() == expected


def test_an_aggregation_of_ones_own_algorithm_is_checked():
    with pytest.raises(MooredError, match="token_mean"):
        token_shares(np.array([1]), "tokenmean", max_length=1)
