"""The algorithms: each is one line over shared pieces.

An algorithm says how rewards become advantages and how token losses become one number; the filter,
KL, entropy, clipping and the learner are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moored import algo
from moored.config import AlgorithmConfig
from moored.names import Aggregation
from moored.training.batch import Sample

GroupAdvantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(reward of each trajectory, its group) -> advantage of each trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    aggregation: Aggregation
    group_advantage: GroupAdvantage | None = None
    """None: GAE from a critic."""
    sequence_ratio: bool = False

    @property
    def needs_critic(self) -> bool:
        return self.group_advantage is None


ALGORITHMS: Mapping[str, Algorithm] = {
    "ppo": Algorithm(aggregation="token_mean"),
    "dapo": Algorithm(aggregation="token_mean", group_advantage=algo.grpo),
    "grpo": Algorithm(aggregation="seq_mean_token_mean", group_advantage=algo.grpo),
    "dr_grpo": Algorithm(aggregation="constant", group_advantage=algo.dr_grpo),
    "rloo": Algorithm(aggregation="seq_mean_token_sum", group_advantage=algo.rloo),
    "reinforce_pp": Algorithm(
        aggregation="token_mean", group_advantage=lambda rewards, _: algo.reinforce_pp(rewards)
    ),
    "gspo": Algorithm(
        aggregation="seq_mean_token_mean", group_advantage=algo.grpo, sequence_ratio=True
    ),
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenAdvantages:
    """The advantage of every token of a sample, zero where it is not trained."""

    advantages_T: np.ndarray
    returns_T: np.ndarray | None = None
    """What the critic should have predicted; None without a critic, like the next."""
    old_values_T: np.ndarray | None = None
    """What the critic predicted."""


def group_advantages(
    samples: Sequence[Sample], rewards: np.ndarray, groups: np.ndarray, advantage: GroupAdvantage
) -> list[TokenAdvantages]:
    """One advantage per trajectory, the same for each of its sampled tokens."""
    advantages = advantage(rewards, groups)
    return [
        TokenAdvantages(advantages_T=np.where(s.loss_mask_T, advantages[s.trajectory], 0.0))
        for s in samples
    ]


def gae_advantages(
    samples: Sequence[Sample], values: Sequence[np.ndarray], options: AlgorithmConfig
) -> list[TokenAdvantages]:
    """GAE over the sampled tokens of each sample, whitened over the batch."""
    width = max(len(sample.ids_T) for sample in samples)
    mask, rewards, ends, old_values = (
        np.stack([_padded(array, width) for array in arrays])
        for arrays in (
            [s.loss_mask_T for s in samples],
            [s.rewards_T for s in samples],
            [s.turn_ends_T for s in samples],
            values,
        )
    )
    if options.bilevel:
        estimate = algo.bilevel_gae(
            rewards,
            old_values,
            mask,
            ends,
            options.gamma,
            options.lam,
            gamma_turn=options.gamma_turn,
            lam_turn=options.lam,
        )
    else:
        estimate = algo.gae(rewards, old_values, mask, options.gamma, options.lam)
    whitened = algo.whiten(estimate.advantages, mask)
    return [
        TokenAdvantages(
            advantages_T=whitened[row, : len(sample.ids_T)],
            returns_T=estimate.returns[row, : len(sample.ids_T)],
            old_values_T=np.where(sample.loss_mask_T, values[row], 0.0),
        )
        for row, sample in enumerate(samples)
    ]


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to max - buffer, then linearly down to -1 at max."""
    if buffer <= 0:
        return 0.0
    return float(np.clip((max_length - buffer - length) / buffer, -1.0, 0.0))


def _padded(array: np.ndarray, width: int) -> np.ndarray:
    return np.pad(array, (0, width - len(array)))
