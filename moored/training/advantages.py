"""From rewards to the advantage of every token: the estimators, and how to write your own.

A group estimator is a function (reward of each trajectory, its group) -> advantage of each
trajectory, like those of `moored.algo`. A `TokenEstimator` works on the tokens of trajectories, and
may use a critic. Both go by a name of `moored.names.ESTIMATORS` or by `module:attribute`.
Shape legend: B trajectories, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from moored import algo
from moored.algo.advantages import Advantages
from moored.config import AlgorithmConfig
from moored.errors import MooredError
from moored.names import ESTIMATORS
from moored.training.batch import Sample, by_trajectory

GroupEstimator = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(reward of each trajectory, its group) -> advantage of each trajectory."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenValues:
    """Trajectories as padded arrays (B, T): the tokens of all their samples, one after another."""

    rewards_BT: np.ndarray
    values_BT: np.ndarray
    """The critic's value before each token; 0 without a critic."""
    mask_BT: np.ndarray
    """True on sampled tokens."""
    turn_ends_BT: np.ndarray
    """True on the last sampled token of each turn."""
    bootstrap_B: np.ndarray
    """The critic's value after the last token of an episode that was cut off; 0 for others, and
    without `algorithm.bootstrap_truncated`."""


@dataclass(frozen=True, slots=True)
class TokenEstimator:
    """An estimator of token advantages; they are then whitened over the tokens that are kept."""

    function: Callable[[TokenValues, AlgorithmConfig], Advantages]
    needs_critic: bool = True


Estimator = GroupEstimator | TokenEstimator


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
    if isinstance(found, TokenEstimator):
        return found
    if not callable(found):
        raise MooredError(
            f"advantage estimator {name!r} is of type {type(found).__name__}; name a function "
            f"(rewards, group_ids) -> advantages, or a moored.training.advantages.TokenEstimator"
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


def token_advantages(
    samples: Sequence[Sample],
    values: Sequence[np.ndarray] | None,
    estimator: TokenEstimator,
    options: AlgorithmConfig,
) -> list[TokenAdvantages]:
    """Advantages over the sampled tokens of each trajectory, through all of its samples.

    `values` are the critic's before each token and after the last one, (T + 1,); None: no critic.
    """
    known = values or [np.zeros(len(sample.ids_T) + 1) for sample in samples]
    rows = by_trajectory(samples)
    tokens = _token_values(samples, known, rows)
    if not options.bootstrap_truncated:
        tokens = replace(tokens, bootstrap_B=np.zeros(len(rows)))
    found = estimator.function(tokens, options)
    result: dict[int, TokenAdvantages] = {}
    for row, members in enumerate(rows):
        stop = 0
        for index in members:
            start, stop = stop, stop + len(samples[index].ids_T)
            old = np.where(samples[index].loss_mask_T, known[index][:-1], 0.0)
            result[index] = TokenAdvantages(
                advantages_T=found.advantages[row, start:stop],
                returns_T=None if values is None else found.returns[row, start:stop],
                old_values_T=None if values is None else old,
            )
    return [result[index] for index in range(len(samples))]


def _token_values(
    samples: Sequence[Sample], values: Sequence[np.ndarray], rows: Sequence[Sequence[int]]
) -> TokenValues:
    """The samples of each row one after another; only its last may have been cut off."""

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return _padded([np.concatenate([arrays[index] for index in members]) for members in rows])

    last = [members[-1] for members in rows]
    return TokenValues(
        rewards_BT=joined([s.rewards_T for s in samples]),
        values_BT=joined([values_T1[:-1] for values_T1 in values]),
        mask_BT=joined([s.loss_mask_T for s in samples]),
        turn_ends_BT=joined([s.turn_ends_T for s in samples]),
        bootstrap_B=np.array([values[i][-1] if samples[i].is_truncated else 0.0 for i in last]),
    )


def whitened(
    samples: Sequence[Sample], advantages: Sequence[TokenAdvantages]
) -> list[TokenAdvantages]:
    """Advantages with mean 0 and variance 1 over the loss tokens of samples that have a weight."""
    flat = np.concatenate([found.advantages_T for found in advantages])
    kept = [s.loss_mask_T & (s.weight != 0.0) for s in samples]
    stops = np.cumsum([len(sample.ids_T) for sample in samples])
    parts = np.split(algo.whiten(flat, np.concatenate(kept)), stops[:-1])
    return [
        replace(found, advantages_T=part) for found, part in zip(advantages, parts, strict=True)
    ]


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """(B, T), filled up with zeros."""
    padded = np.zeros((len(arrays), max(map(len, arrays))), dtype=np.result_type(*arrays))
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


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


def _rewards_to_go(tokens: TokenValues, options: AlgorithmConfig) -> Advantages:
    no_values_BT = np.zeros(tokens.mask_BT.shape)
    return algo.gae(tokens.rewards_BT, no_values_BT, tokens.mask_BT, options.gamma)


GAE = TokenEstimator(_gae)
BILEVEL_GAE = TokenEstimator(_bilevel_gae)
REINFORCE_PP = TokenEstimator(_rewards_to_go, needs_critic=False)
"""REINFORCE++: discounted rewards to go; the whitening of all tokens is its only baseline."""
