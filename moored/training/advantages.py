"""From rewards to the advantage of every token: the estimators, and how to write your own.

A group estimator is a function (reward of each trajectory, its group) -> advantage of each
trajectory, like those of `moored.algo`. A `CriticEstimator` works on tokens and the values of a
critic. Both go by a name of `moored.names.ESTIMATORS` or by `module:attribute`.
Shape legend: B samples, T tokens of a continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from moored import algo
from moored.algo.advantages import Advantages
from moored.config import AlgorithmConfig
from moored.errors import MooredError
from moored.names import ESTIMATORS
from moored.training.batch import Sample

GroupEstimator = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(reward of each trajectory, its group) -> advantage of each trajectory."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenValues:
    """Samples as padded arrays (B, T), for estimators that use a critic."""

    rewards_BT: np.ndarray
    values_BT: np.ndarray
    """The critic's value before each token."""
    mask_BT: np.ndarray
    """True on sampled tokens."""
    turn_ends_BT: np.ndarray
    """True on the last sampled token of each turn."""
    bootstrap_B: np.ndarray
    """The critic's value after the last token of an episode that was cut off; 0 for others."""


@dataclass(frozen=True, slots=True)
class CriticEstimator:
    """An estimator that needs a critic; its advantages are whitened over the batch."""

    function: Callable[[TokenValues, AlgorithmConfig], Advantages]


Estimator = GroupEstimator | CriticEstimator


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenAdvantages:
    """The advantage of every token of a sample, zero where it is not trained."""

    advantages_T: np.ndarray
    returns_T: np.ndarray | None = None
    """What the critic should have predicted; None without a critic, like the next."""
    old_values_T: np.ndarray | None = None
    """What the critic predicted."""


def load_estimator(name: str) -> Estimator:
    """The advantage estimator of this name or `module:attribute`."""
    found = ESTIMATORS.get_object(name)
    if isinstance(found, CriticEstimator):
        return found
    if not callable(found):
        raise MooredError(
            f"advantage estimator {name!r} is of type {type(found).__name__}; name a function "
            f"(rewards, group_ids) -> advantages, or a moored.training.advantages.CriticEstimator"
        )
    return cast(GroupEstimator, found)


def group_advantages(
    samples: Sequence[Sample], rewards: np.ndarray, groups: np.ndarray, estimator: GroupEstimator
) -> list[TokenAdvantages]:
    """One advantage per trajectory, the same for each of its sampled tokens."""
    advantages = np.asarray(estimator(rewards, groups))
    if advantages.shape != rewards.shape:
        raise MooredError(
            f"an advantage estimator must return one number for each of {len(rewards)} "
            f"trajectories, got shape {advantages.shape}"
        )
    return [
        TokenAdvantages(advantages_T=np.where(s.loss_mask_T, advantages[s.trajectory], 0.0))
        for s in samples
    ]


def critic_advantages(
    samples: Sequence[Sample],
    values: Sequence[np.ndarray],
    estimator: CriticEstimator,
    options: AlgorithmConfig,
) -> list[TokenAdvantages]:
    """Advantages over the sampled tokens of each sample, whitened over the batch.

    `values` are the critic's before each token and after the last one, (T + 1,).
    """
    mask_BT = _padded([s.loss_mask_T for s in samples])
    tokens = TokenValues(
        rewards_BT=_padded([s.rewards_T for s in samples]),
        values_BT=_padded([values_T1[:-1] for values_T1 in values]),
        mask_BT=mask_BT,
        turn_ends_BT=_padded([s.turn_ends_T for s in samples]),
        bootstrap_B=np.array(
            [v[-1] if s.is_truncated else 0.0 for s, v in zip(samples, values, strict=True)]
        ),
    )
    found = estimator.function(tokens, options)
    whitened_BT = algo.whiten(found.advantages, mask_BT)
    return [
        TokenAdvantages(
            advantages_T=whitened_BT[row, : len(sample.ids_T)],
            returns_T=found.returns[row, : len(sample.ids_T)],
            old_values_T=np.where(sample.loss_mask_T, values[row][:-1], 0.0),
        )
        for row, sample in enumerate(samples)
    ]


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """(B, T), filled up with zeros."""
    width = max(map(len, arrays))
    return np.stack([np.pad(array, (0, width - len(array))) for array in arrays])


def _gae(tokens: TokenValues, options: AlgorithmConfig) -> Advantages:
    return algo.gae(
        tokens.rewards_BT,
        tokens.values_BT,
        tokens.mask_BT,
        options.gamma,
        options.lam,
        bootstrap=tokens.bootstrap_B,
    )


def _bilevel_gae(tokens: TokenValues, options: AlgorithmConfig) -> Advantages:
    return algo.bilevel_gae(
        tokens.rewards_BT,
        tokens.values_BT,
        tokens.mask_BT,
        tokens.turn_ends_BT,
        options.gamma,
        options.lam,
        gamma_turn=options.gamma_turn,
        lam_turn=options.lam,
        bootstrap=tokens.bootstrap_B,
    )


GAE = CriticEstimator(_gae)
BILEVEL_GAE = CriticEstimator(_bilevel_gae)


def reinforce_pp(rewards: np.ndarray, _: np.ndarray) -> np.ndarray:
    """REINFORCE++ without a group baseline: rewards whitened over the whole batch."""
    return algo.reinforce_pp(rewards)
