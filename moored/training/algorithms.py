"""The algorithms: each is one line over shared pieces.

An algorithm says how rewards become advantages, what a token loses and how token losses become one
number; the filter, KL, entropy and the learner are the same for all; the options that a name sets
besides are in `moored.config_rules`. A new one is an `Algorithm` in any module:
`algorithm.name=my_module:MY_ALGORITHM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from moored import algo
from moored.config import AlgorithmConfig
from moored.errors import MooredError
from moored.names import ALGORITHMS, Aggregation
from moored.training import advantages, losses
from moored.training.advantages import Estimator, TokenEstimator, load_estimator


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


PPO = Algorithm(advantage=advantages.GAE, aggregation="token_mean")
DAPO = Algorithm(advantage=algo.grpo, aggregation="token_mean")
GRPO = Algorithm(advantage=algo.grpo, aggregation="seq_mean_token_mean")
DR_GRPO = Algorithm(advantage=algo.dr_grpo, aggregation="constant")
RLOO = Algorithm(advantage=algo.rloo, aggregation="seq_mean_token_sum")
REINFORCE_PP = Algorithm(advantage=advantages.REINFORCE_PP, aggregation="token_mean", whitens=True)
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
