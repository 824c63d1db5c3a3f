"""Which groups an update uses, the samples that it is made of, and the numbers of a step.

A sample is one prompt and what followed it: sampled tokens (trained) and observation tokens (not).
Its rewards are those of the environment, less what an overlong reply costs. `engine.packing` lays
samples out as tensors. Shape legend: P groups, B rows, T tokens of a continuation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import numpy as np

from moored.algo import (
    outcome_free_share,
    reward_variance,
    select_groups,
    select_trajectories,
)
from moored.algo.groups import Quantity, cap_malformed, load_score
from moored.config import Config, FilterConfig
from moored.names import AGGREGATIONS, FilterReward, check_name
from moored.types import Group, Prompt, Selection, Trajectory, Turn


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


def score_groups(options: FilterConfig, groups: Sequence[Group]) -> Selection:
    """Score and select groups; `soft` keeps all that have a weight, whatever the rule."""
    quantity = load_score(options.score).quantity
    selection = select_groups(
        np.concatenate([_scored(options, group, quantity) for group in groups]),
        group_ids(groups),
        score=options.score,
        ddof=options.ddof,
        rule=options.rule,
        value=options.value,
        eps=options.eps,
        largest=options.largest,
        keep_zero=options.keep_zero,
    )
    if options.action == "soft":
        return replace(selection, kept=np.flatnonzero(selection.weights))
    return selection


def group_ids(groups: Sequence[Group]) -> np.ndarray:
    """Index of the group of each trajectory."""
    return np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])


def _scored(options: FilterConfig, group: Group, quantity: Quantity) -> np.ndarray:
    """(G,) what the score is taken of; NaN, and so left out, after an error."""
    if quantity == "reward":
        return filter_rewards(group, options.reward)
    return np.array([_of_tokens(trajectory, quantity) for trajectory in group.trajectories])


def filter_rewards(group: Group, kind: FilterReward) -> np.ndarray:
    """(G,) the rewards by which the filter tells the trajectories of a group apart.

    `task` leaves out penalties for malformed replies, see `cap_malformed`; `success` is 1 or 0, and
    NaN after an error.
    """
    if kind == "total":
        return group.rewards
    members = group.trajectories
    if kind == "success":
        return np.array([math.nan if t.stop.is_error else float(t.success) for t in members])
    return cap_malformed(
        np.array([t.task_reward for t in members]),
        np.array([t.is_valid for t in members]),
        np.array([t.success for t in members]),
    )


def _of_tokens(trajectory: Trajectory, quantity: Quantity) -> float:
    if trajectory.stop.is_error:
        return np.nan
    logprobs = np.concatenate([turn.logprobs for turn in trajectory.turns] or [np.zeros(0)])
    if quantity == "length":
        return float(len(logprobs))
    # The mean surprise of sampled tokens estimates the mean entropy they were drawn with.
    return float(-logprobs.mean()) if len(logprobs) else np.nan


def select_samples(config: Config, groups: Sequence[Group], selection: Selection) -> list[Sample]:
    """Samples of the groups and trajectories that go into the update, with shaped rewards.

    What `filter.action` means is decided here: dropped groups have no samples, masked ones are
    marked, and under `soft` every sample has the weight of its group.
    """
    if not len(selection.kept):
        return []
    options, mask_P = config.filter, selection.group_mask
    is_whole = options.action in ("mask", "soft")
    samples = build_samples(
        groups, None if is_whole else mask_P, reward_of=partial(shaped_reward, config)
    )
    if options.action == "soft":
        weights = selection.weights.tolist()
        samples = [replace(s, weight=weights[s.group]) for s in samples]
    if options.action == "mask":
        samples = [
            s if mask_P[s.group] else replace(s, weight=0.0, is_masked=True) for s in samples
        ]
    if options.best_and_worst:
        rewards = np.concatenate([filter_rewards(group, options.reward) for group in groups])
        count = options.best_and_worst
        is_chosen = select_trajectories(rewards, group_ids(groups), best=count, worst=count)
        samples = [s for s in samples if is_chosen[s.trajectory]]
    return samples


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


def step_metrics(
    options: FilterConfig,
    groups: Sequence[Group],
    selection: Selection,
    samples: Sequence[Sample],
    advantages: Sequence[TokenAdvantages],
    stats: Mapping[str, float],
) -> dict[str, float]:
    """What a step generated, kept and trained on; `stats` are those of the update.

    Success and reward are of the episodes that did not end in an error, NaN when all did: an error
    says nothing about the policy. Reward variance is of the rewards that the filter scores, and NaN
    where no group has two. Masked tokens are not trained on. The push of a trajectory, of which the
    outcome-free share is taken, is the sum of |advantage| over its loss tokens, times its weight.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    generated = sum(len(turn.completion_ids) for turn in turns)
    trained = sum(s.num_loss_tokens for s in samples if s.weight)
    push = np.zeros(len(trajectories))
    for sample, found in zip(samples, advantages, strict=True):
        push[sample.trajectory] += sample.weight * float(np.abs(found.advantages_T).sum())
    ended = [math.nan if t.stop.is_error else float(t.success) for t in trajectories]
    whole = [t for t in trajectories if not t.stop.is_error]
    rv = reward_variance([filter_rewards(group, options.reward) for group in groups])
    return {
        "rollout/reward_mean": float(np.mean([t.reward for t in whole] or [np.nan])),
        "rollout/success_rate": float(np.mean([t.success for t in whole] or [np.nan])),
        "rollout/validity_rate": float(np.mean([turn.is_valid for turn in turns] or [0.0])),
        "rollout/valid_turn_reward_mean": _turn_reward_mean(whole, is_valid=True),
        "rollout/malformed_turn_reward_mean": _turn_reward_mean(whole, is_valid=False),
        "rollout/turns_mean": len(turns) / len(trajectories),
        "rollout/reply_tokens_mean": generated / max(len(turns), 1),
        "rollout/error_count": float(sum(t.stop.is_error for t in trajectories)),
        "rollout/truncated_count": float(sum(t.stop.is_truncation for t in trajectories)),
        "rollout/reward_variance_mean": rv.mean if len(rv.known) else math.nan,
        "rollout/reward_variance_std_over_mean": rv.std_over_mean if len(rv.known) else math.nan,
        "signal/outcome_free_share": outcome_free_share(push, ended, group_ids(groups)),
        "tokens/generated": float(generated),
        "tokens/trained": float(trained),
        "tokens/discarded": float(generated - trained),
        "update/is_empty": float(trained == 0),
        **selection.metrics(),
        **stats,
    }


def _turn_reward_mean(trajectories: Sequence[Trajectory], *, is_valid: bool) -> float:
    """Over the well-formed turns, or the malformed ones; NaN where there are none."""
    rewards = [turn.reward for t in trajectories for turn in t.turns if turn.is_valid == is_valid]
    return float(np.mean(rewards or [np.nan]))
