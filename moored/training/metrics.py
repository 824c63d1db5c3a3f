"""The numbers of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from moored.algo import outcome_free_share, reward_variance
from moored.config import FilterConfig
from moored.training.advantages import TokenAdvantages
from moored.training.batch import Sample
from moored.training.selection import filter_rewards, group_ids
from moored.types import Group, Selection, Trajectory


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
