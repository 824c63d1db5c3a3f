"""The numbers of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from moored.algo import reward_variance
from moored.config import FilterConfig
from moored.training.batch import Sample
from moored.training.selection import filter_rewards, sample_weights
from moored.types import Group, Selection


def step_metrics(
    options: FilterConfig,
    groups: Sequence[Group],
    selection: Selection,
    samples: Sequence[Sample],
    stats: Mapping[str, float],
) -> dict[str, float]:
    """What a step generated, kept and trained on; `stats` are those of the update.

    Success and reward are of the episodes that did not end in an error, NaN when all did: an error
    says nothing about the policy. Reward variance is of the rewards that the filter scores, and NaN
    where no group has two. Masked tokens are not trained on.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    generated = sum(len(turn.completion_ids) for turn in turns)
    weights = sample_weights(options, samples, selection)
    trained = sum(s.num_loss_tokens for s, w in zip(samples, weights, strict=True) if w)
    whole = [t for t in trajectories if not t.stop.is_error]
    rv = reward_variance([filter_rewards(group, options.reward) for group in groups])
    return {
        "rollout/reward_mean": float(np.mean([t.reward for t in whole] or [np.nan])),
        "rollout/success_rate": float(np.mean([t.success for t in whole] or [np.nan])),
        "rollout/validity_rate": float(np.mean([turn.is_valid for turn in turns] or [0.0])),
        "rollout/turns_mean": len(turns) / len(trajectories),
        "rollout/reply_tokens_mean": generated / max(len(turns), 1),
        "rollout/error_count": float(sum(t.stop.is_error for t in trajectories)),
        "rollout/truncated_count": float(sum(t.stop.is_truncation for t in trajectories)),
        "rollout/reward_variance_mean": rv.mean if len(rv.known) else math.nan,
        "rollout/reward_variance_std_over_mean": rv.std_over_mean if len(rv.known) else math.nan,
        "tokens/generated": float(generated),
        "tokens/trained": float(trained),
        "tokens/discarded": float(generated - trained),
        "update/is_empty": float(trained == 0),
        **selection.metrics(),
        **stats,
    }
