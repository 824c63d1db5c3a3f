"""The algorithms: each is one line over shared pieces.

An algorithm says how rewards become advantages, what a token loses and how token losses become one
number; the filter, KL, entropy and the learner are the same for all; the options that a name sets
besides are in `moored.config_rules`. A new one is an `Algorithm` in any module:
`algorithm.name=my_module:MY_ALGORITHM`.

An estimator of advantages is a function (reward of each trajectory, its group) -> advantage of each
trajectory, like those of `moored.algo`, or a `TokenEstimator`, which works on the tokens of
trajectories and may use a critic. Both go by a name of `moored.names.ESTIMATORS` or by
`module:attribute`. Shape legend: B trajectories, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from moored import algo
from moored.algo.advantages import Advantages
from moored.config import AlgorithmConfig
from moored.errors import MooredError
from moored.names import ALGORITHMS, ESTIMATORS, Aggregation
from moored.training import losses

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How advantages are estimated, what a token loses, and how token losses are aggregated."""

    advantage: Estimator
    aggregation: Aggregation
    loss: losses.Loss = losses.ppo_clip
    whitens: bool = False
    """Whiten advantages over the kept tokens also when they come from a group estimator."""

    @property
    def needs_critic(self) -> bool:
        return isinstance(self.advantage, TokenEstimator) and self.advantage.needs_critic


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
REWARDS_TO_GO = TokenEstimator(_rewards_to_go, needs_critic=False)
"""REINFORCE++: discounted rewards to go; the whitening of all tokens is its only baseline."""

PPO = Algorithm(advantage=GAE, aggregation="token_mean")
DAPO = Algorithm(advantage=algo.grpo, aggregation="token_mean")
GRPO = Algorithm(advantage=algo.grpo, aggregation="seq_mean_token_mean")
DR_GRPO = Algorithm(advantage=algo.dr_grpo, aggregation="constant")
RLOO = Algorithm(advantage=algo.rloo, aggregation="seq_mean_token_sum")
REINFORCE_PP = Algorithm(advantage=REWARDS_TO_GO, aggregation="token_mean", whitens=True)
GSPO = Algorithm(advantage=algo.grpo, aggregation="seq_mean_token_mean", loss=losses.gspo)
CISPO = Algorithm(advantage=algo.grpo, aggregation="token_mean", loss=losses.cispo)


def load_algorithm(options: AlgorithmConfig) -> Algorithm:
    """The algorithm that `options` name, with the pieces that they replace."""
    found = ALGORITHMS.get_object(options.name)
    if not isinstance(found, Algorithm):
        raise MooredError(
            f"algorithm {options.name!r} is of type {type(found).__name__}; name a "
            f"moored.training.algorithms.Algorithm, or give a function of your own as "
            f"algorithm.advantage"
        )
    if options.advantage is not None:
        found = replace(found, advantage=load_estimator(options.advantage))
    if options.ddof and found.advantage is algo.grpo:
        found = replace(found, advantage=partial(algo.grpo, ddof=options.ddof))
    return found if options.aggregation is None else replace(found, aggregation=options.aggregation)


def load_estimator(name: str) -> Estimator:
    """The advantage estimator of this name or `module:attribute`."""
    found = ESTIMATORS.get_object(name)
    if isinstance(found, TokenEstimator):
        return found
    if not callable(found):
        raise MooredError(
            f"advantage estimator {name!r} is of type {type(found).__name__}; name a function "
            f"(rewards, group_ids) -> advantages, or a moored.training.algorithms.TokenEstimator"
        )
    return cast(GroupEstimator, found)
