"""Advantages of tokens, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moored.config import AlgorithmConfig
from moored.errors import MooredError
from moored.training.algorithms import BILEVEL_GAE, GAE, REWARDS_TO_GO, TokenEstimator
from moored.training.samples import Sample, TokenAdvantages, build_samples, token_weights
from moored.training.update import group_advantages, token_advantages, whitened
from moored.types import Group, Prompt, StopReason, Trajectory, Turn


def sample(*, reward: float, trajectory: int, is_truncated: bool = False) -> Sample:
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
    samples = [
        sample(reward=1.0, trajectory=0),
        sample(reward=1.0, trajectory=1, is_truncated=True),
    ]
    values = [np.array([0.5, 9.0, 0.25, 4.0])] * 2
    found = token_advantages(samples, values, GAE, AlgorithmConfig())
    ended, cut = whitened(samples, found)
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
            [sample(reward=1.0, trajectory=0)],
            np.zeros(2),
            np.zeros(2),
            lambda rewards, _: rewards[:1],
        )


def pieces(*rewards: float, trajectory: int = 0, is_truncated: bool = False) -> list[Sample]:
    """One sample a turn, as a chat template that strips earlier reasoning leaves them."""
    return [
        Sample(
            prompt=Prompt(np.array([1, turn])),
            ids_T=np.array([5, 6]),
            loss_mask_T=np.array([True, True]),
            old_logprobs_T=np.zeros(2),
            turn_ends_T=np.array([False, True]),
            rewards_T=np.array([0.0, reward]),
            group=0,
            trajectory=trajectory,
            is_truncated=is_truncated and turn == len(rewards) - 1,
        )
        for turn, reward in enumerate(rewards)
    ]


def returns_of(
    samples: list[Sample], values: list[list[float]], estimator: TokenEstimator, **options: float
) -> list[list[float]]:
    config = AlgorithmConfig.model_validate(options)
    found = token_advantages(samples, [np.array(v) for v in values], estimator, config)
    return [given.returns_T.tolist() for given in found if given.returns_T is not None]


def test_a_reward_of_the_last_turn_credits_the_turns_before_it_through_all_their_samples():
    zeros = [[0.0, 0.0, 0.0]] * 3
    assert returns_of(pieces(0, 0, 10), zeros, GAE) == [[10, 10]] * 3
    # Discounted from token to token, 0.5^5 to 1, as in one unbroken sample.
    expected = [[10 / 32, 10 / 16], [10 / 8, 10 / 4], [10 / 2, 10]]
    assert returns_of(pieces(0, 0, 10), zeros, GAE, gamma=0.5) == expected


def test_advantages_of_pieces_equal_those_of_the_unbroken_trajectory():
    parts = pieces(1.0, -2.0, 10.0)
    whole = Sample(
        prompt=parts[0].prompt,
        ids_T=np.concatenate([part.ids_T for part in parts]),
        loss_mask_T=np.ones(6, dtype=bool),
        old_logprobs_T=np.zeros(6),
        turn_ends_T=np.concatenate([part.turn_ends_T for part in parts]),
        rewards_T=np.concatenate([part.rewards_T for part in parts]),
        group=0,
        trajectory=0,
    )
    values = [np.array([0.3, 0.1, 7.0]), np.array([0.2, 0.9, 7.0]), np.array([0.5, 0.4, 7.0])]
    joined = np.array([0.3, 0.1, 0.2, 0.9, 0.5, 0.4, 7.0])
    options = AlgorithmConfig(gamma=0.9, lam=0.8)
    for estimator in (GAE, BILEVEL_GAE):
        found = token_advantages(parts, values, estimator, options)
        (expected,) = token_advantages([whole], [joined], estimator, options)
        got = np.concatenate([given.advantages_T for given in found])
        np.testing.assert_allclose(got, expected.advantages_T)


def test_only_the_end_of_the_trajectory_is_continued_by_the_critic():
    # The values after the last token of a piece, 7, count at the very end and only when cut off.
    values = [[0.0, 0.0, 7.0], [0.0, 0.0, 7.0]]
    assert returns_of(pieces(0, 10), values, GAE) == [[10, 10], [10, 10]]
    cut = pieces(0, 10, is_truncated=True)
    assert returns_of(cut, values, GAE) == [[17, 17], [17, 17]]
    # Turn level with 0.5: the last turn returns 10 + 0.5 * 7, the first half of that.
    found = returns_of(cut, values, BILEVEL_GAE, gamma_turn=0.5)
    assert found == [[6.75, 6.75], [13.5, 13.5]]


def test_without_bootstrap_truncated_an_episode_that_was_cut_off_ends_there():
    values = [[0.0, 0.0, 7.0], [0.0, 0.0, 7.0]]
    cut = pieces(0, 10, is_truncated=True)
    assert returns_of(cut, values, GAE, bootstrap_truncated=False) == [[10, 10], [10, 10]]
    found = returns_of(cut, values, BILEVEL_GAE, gamma_turn=0.5, bootstrap_truncated=False)
    assert found == [[5, 5], [10, 10]]


def test_trajectories_do_not_credit_each_other():
    samples = [*pieces(0, 1), *pieces(0, 10, trajectory=1)]
    zeros = [[0.0, 0.0, 0.0]] * 4
    assert returns_of(samples, zeros, GAE) == [[1, 1], [1, 1], [10, 10], [10, 10]]


def test_reinforce_pp_needs_no_critic_and_credits_all_samples_of_a_trajectory():
    samples = [*pieces(0, 1), *pieces(0, 3, trajectory=1)]
    found = token_advantages(samples, None, REWARDS_TO_GO, AlgorithmConfig())
    assert [given.advantages_T.tolist() for given in found] == [[1, 1], [1, 1], [3, 3], [3, 3]]
    assert all(given.returns_T is None and given.old_values_T is None for given in found)


def test_whitening_uses_the_tokens_of_kept_samples_alone():
    samples = [*pieces(0), *pieces(0, trajectory=1), *pieces(0, trajectory=2)]
    advantages = [TokenAdvantages(advantages_T=np.full(2, x)) for x in (1.0, 3.0, 100.0)]
    weighed = [replace(s, weight=w) for s, w in zip(samples, (1.0, 0.5, 0.0), strict=True)]
    found = whitened(weighed, advantages)
    # 1, 1, 3, 3 have mean 2 and variance 1.
    expected = [[-1, -1], [1, 1], [0, 0]]
    for given, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(given.advantages_T, values, rtol=1e-7)


def test_a_trajectory_in_pieces_counts_once_in_sequence_means():
    # One trajectory of three pieces (6 tokens), one of one piece (2 tokens).
    samples = [*pieces(0, 0, 0), *pieces(0, trajectory=1)]
    expected = {
        "token_mean": [1 / 8] * 3 + [1 / 8],
        "seq_mean_token_mean": [1 / 12] * 3 + [1 / 4],
        "seq_mean_token_sum": [1 / 2] * 3 + [1 / 2],
        "constant": [1 / 20] * 3 + [1 / 20],
    }
    for how, shares in expected.items():
        found = token_weights(samples, how, max_length=10)
        np.testing.assert_allclose([weights[0] for weights in found], shares)
