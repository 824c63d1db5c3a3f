"""Groups to training samples.

A sample is one prompt and what followed it: sampled tokens (trained) and observation tokens (not).
Its rewards are those of the environment, less what an overlong reply costs. `engine.packing` lays
samples out as tensors. Shape legend: B rows, T tokens of a continuation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from moored.config import Config
from moored.names import AGGREGATIONS, check_name
from moored.types import Group, Prompt, Trajectory, Turn


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """One prompt and what followed it. Numbers are zero where `loss_mask_T` is not set."""

    prompt: Prompt
    images: tuple[object, ...] = ()
    """Images that observations of the continuation refer to, in order."""
    ids_T: np.ndarray
    loss_mask_T: np.ndarray
    """True exactly on sampled tokens."""
    old_logprobs_T: np.ndarray
    importance_T: np.ndarray | None = None
    """Factor on the loss of each token, see `algorithm.importance_cap`; None: 1."""
    turn_ends_T: np.ndarray
    """True on the last sampled token of each turn."""
    rewards_T: np.ndarray
    """Turn rewards, on the last sampled token of their turn."""
    group: int
    """Index of the group in the batch."""
    trajectory: int
    """Index of the trajectory in the batch; several samples may share one."""
    is_truncated: bool = False
    """The episode was cut off after the last token, by a limit of turns or of tokens."""
    weight: float = 1.0
    """Factor of the filter on the loss of its tokens."""
    is_masked: bool = False
    """The filter leaves it out of the update and of every mean; its weight is 0."""

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenAdvantages:
    """The advantage of every token of a sample, zero where it is not trained."""

    advantages_T: np.ndarray
    returns_T: np.ndarray | None = None
    """What the critic should have predicted; None without a critic, like the next."""
    old_values_T: np.ndarray | None = None
    """What the critic predicted."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossSample:
    """A sample as one update takes it: what the loss needs to know of each token."""

    sample: Sample
    advantages_T: np.ndarray
    weights_T: np.ndarray
    """Share of each token in the policy loss of its update, by the algorithm's aggregation."""
    mean_weights_T: np.ndarray
    """Share of each token in means over the tokens of its update: entropy, KL, value loss; zero
    exactly where the token takes no part in the update."""
    returns_T: np.ndarray | None = None
    """What the critic should have predicted; None without a critic, like the next."""
    old_values_T: np.ndarray | None = None
    """What the critic predicted when the advantages were estimated."""


def build_samples(
    groups: Sequence[Group],
    kept: np.ndarray | None = None,
    *,
    reward_of: Callable[[Turn], float] = attrgetter("reward"),
) -> list[Sample]:
    """One sample per trajectory; several where the history of a trajectory was re-rendered.

    `kept` (P,) says which groups are wanted; None takes all. `reward_of` gives a turn's reward.
    """
    samples, number = [], 0
    for index, group in enumerate(groups):
        is_wanted = kept is None or bool(kept[index])
        for place, trajectory in enumerate(group.trajectories if is_wanted else ()):
            samples += _trajectory_samples(trajectory, index, number + place, reward_of)
        number += len(group.trajectories)
    return samples


def by_trajectory(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples of each trajectory, in order of first appearance.

    Where a chat template rewrites history (e.g. strips earlier reasoning) a trajectory has a sample
    for each turn; it is still one trajectory in every mean, and its turns lead to one another.
    """
    found: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        found.setdefault(sample.trajectory, []).append(index)
    return list(found.values())


def _trajectory_samples(
    trajectory: Trajectory, group: int, number: int, reward_of: Callable[[Turn], float]
) -> list[Sample]:
    if trajectory.stop.is_error:
        return []
    samples: list[Sample] = []
    pieces: list[tuple[np.ndarray, bool, np.ndarray, float]] = []
    start: Prompt | None = None
    stream = Prompt(np.zeros(0, dtype=np.int64))
    for turn, reward in _turns_with_tokens(trajectory, reward_of):
        if start is not None and turn.prompt.continues(stream):
            seen = turn.prompt.ids[len(stream.ids) :]
            pieces.append((seen, False, np.zeros(len(seen)), 0.0))
        else:
            if start is not None:
                samples.append(_sample(start, stream.images, pieces, group, number))
            start, pieces = turn.prompt, []
        pieces.append((turn.completion_ids, True, turn.logprobs, reward))
        stream = turn.prompt.then(turn.completion_ids)
    if start is not None:
        is_cut = trajectory.stop.is_truncation
        samples.append(_sample(start, stream.images, pieces, group, number, is_truncated=is_cut))
    return samples


def _turns_with_tokens(
    trajectory: Trajectory, reward_of: Callable[[Turn], float]
) -> list[tuple[Turn, float]]:
    """Turns that sampled a token, and their rewards; an empty reply adds its own to the one before.

    What an empty reply earned before any token was sampled, no token can be trained on.
    """
    found: list[tuple[Turn, float]] = []
    for turn in trajectory.turns:
        if len(turn.completion_ids):
            found.append((turn, reward_of(turn)))
        elif found:
            last, reward = found[-1]
            found[-1] = last, reward + reward_of(turn)
    return found


def _sample(
    prompt: Prompt,
    images: tuple[object, ...],
    pieces: Sequence[tuple[np.ndarray, bool, np.ndarray, float]],
    group: int,
    number: int,
    *,
    is_truncated: bool = False,
) -> Sample:
    ids = np.concatenate([ids for ids, *_ in pieces]).astype(np.int64)
    mask, ends = np.zeros(len(ids), dtype=bool), np.zeros(len(ids), dtype=bool)
    rewards = np.zeros(len(ids))
    stop = 0
    for piece, sampled, _, reward in pieces:
        start, stop = stop, stop + len(piece)
        if sampled:
            mask[start:stop] = True
            ends[stop - 1] = True
            rewards[stop - 1] = reward
    return Sample(
        prompt=prompt,
        images=images[len(prompt.images) :],
        ids_T=ids,
        loss_mask_T=mask,
        old_logprobs_T=np.concatenate([logprobs for *_, logprobs, _ in pieces]),
        turn_ends_T=ends,
        rewards_T=rewards,
        group=group,
        trajectory=number,
        is_truncated=is_truncated,
    )


def shaped_reward(config: Config, turn: Turn) -> float:
    """The reward of a turn, less the penalty for an overlong reply."""
    longest, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    return turn.reward + overlong_penalty(len(turn.completion_ids), longest, buffer)


def shaped_rewards(config: Config, group: Group) -> np.ndarray:
    """(G,) shaped rewards of the trajectories; NaN where one ended in an error."""
    return np.array(
        [
            math.nan if t.stop.is_error else math.fsum(shaped_reward(config, x) for x in t.turns)
            for t in group.trajectories
        ]
    )


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to max - buffer, then linearly down to -1 at max."""
    if buffer <= 0:
        return 0.0
    return float(np.clip((max_length - buffer - length) / buffer, -1.0, 0.0))


def token_weights(samples: Sequence[Sample], how: str, *, max_length: int) -> list[np.ndarray]:
    """The share of every loss token in the loss of one update, times the filter's weight.

    Rows of the aggregation are trajectories, whose tokens may be spread over several samples. The
    denominators are of the whole update, so the result does not depend on how it is cut into
    micro-batches or spread over devices; masked samples do not count in them.
    """
    counts: dict[int, int] = {}
    for s in samples:
        if not s.is_masked:
            counts[s.trajectory] = counts.get(s.trajectory, 0) + s.num_loss_tokens
    tokens = np.array([*counts.values()], dtype=np.int64)
    shares = token_shares(tokens, how, max_length=max_length)
    share_of = dict(zip(counts, shares, strict=True))
    return [
        np.where(s.loss_mask_T, share_of.get(s.trajectory, 0.0) * s.weight, 0.0) for s in samples
    ]


def token_shares(tokens_B: np.ndarray, how: str, *, max_length: int) -> np.ndarray:
    """(B,) share of each token of a row in the loss, from the number of tokens of each row.

    `token_mean`: 1 / tokens. `seq_mean_token_mean` (GRPO): mean over rows of the row's mean.
    `seq_mean_token_sum`: mean over rows of the row's sum. `constant` (Dr. GRPO): 1 / (rows *
    max_length). Rows without tokens are left out of every mean.
    """
    check_name("aggregation", how, AGGREGATIONS)
    num_rows, same_B = np.count_nonzero(tokens_B), np.ones_like(tokens_B)
    divisors_B = {
        "token_mean": same_B * tokens_B.sum(),
        "seq_mean_token_mean": num_rows * tokens_B,
        "seq_mean_token_sum": same_B * num_rows,
        "constant": same_B * num_rows * max_length,
    }[how]
    return 1.0 / np.maximum(divisors_B, 1)
