"""Which groups an update uses, and the samples that it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moored.algo import (
    outcome_free_share,
    reward_variance,
    select_groups,
    select_trajectories,
)
from moored.algo.groups import Quantity, cap_malformed, load_score
from moored.config import Config, FilterConfig
from moored.names import FilterReward
from moored.training.batch import Sample, TokenAdvantages, build_samples, shaped_reward
from moored.types import Group, Selection, Trajectory


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
