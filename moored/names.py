"""Names that options may take, and which numbers go with them.

Configuration and maths both check against these, so a name is known in one place. What can be added
to is a `Registry`: a name and where its object lives, so that checking a name imports nothing, and
`module:attribute` stands for an object outside the package. The other sets of names are closed.
"""

from __future__ import annotations

from typing import Literal, get_args

from moored.errors import MooredError, close_match_hint
from moored.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "ppo": "moored.training.algorithms:PPO",
        "dapo": "moored.training.algorithms:DAPO",
        "grpo": "moored.training.algorithms:GRPO",
        "dr_grpo": "moored.training.algorithms:DR_GRPO",
        "rloo": "moored.training.algorithms:RLOO",
        "reinforce_pp": "moored.training.algorithms:REINFORCE_PP",
        "gspo": "moored.training.algorithms:GSPO",
    },
)
ESTIMATORS = Registry(
    "advantage estimator",
    {
        "gae": "moored.training.advantages:GAE",
        "bilevel_gae": "moored.training.advantages:BILEVEL_GAE",
        "grpo": "moored.algo:grpo",
        "dr_grpo": "moored.algo:dr_grpo",
        "rloo": "moored.algo:rloo",
        "reinforce_pp": "moored.training.advantages:reinforce_pp",
    },
)
SCORES = Registry(
    "score",
    {
        "variance": "moored.algo.scores:variance",
        "std": "moored.algo.scores:std",
        "reward_mean": "moored.algo.scores:mean",
        "length": "moored.algo.scores:LENGTH",
        "entropy": "moored.algo.scores:ENTROPY",
        "entropy_std": "moored.algo.scores:ENTROPY_STD",
    },
)
RULES = Registry(
    "rule",
    {
        "top_p": "moored.algo.rules:top_p",
        "top_p_softmax": "moored.algo.rules:top_p_softmax",
        "top_k": "moored.algo.rules:top_k",
        "top_k_count": "moored.algo.rules:top_k_count",
        "min_p": "moored.algo.rules:min_p",
        "nonzero": "moored.algo.rules:nonzero",
        "quantile": "moored.algo.rules:quantile",
        "none": "moored.algo.rules:none",
    },
)
ENGINES = Registry(
    "engine",
    {
        "local": "moored.engine.local.engine:LocalEngine",
        "endpoint": "moored.engine.endpoint.engine:EndpointEngine",
    },
)

FilterAction = Literal["drop", "mask", "refill", "soft"]
LossScale = Literal["none", "linear", "sqrt"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
Schedule = Literal["constant", "linear", "cosine"]

LOSS_SCALES: tuple[str, ...] = get_args(LossScale)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    """Raise with a close match when `name` is not known."""
    if name not in known:
        raise MooredError(f"unknown {kind} {name!r}; {close_match_hint(name, known)}")


def check_rule_value(rule: str, value: float) -> None:
    """Raise when `value` makes no sense for a built-in selection rule; others check their own."""
    RULES.check(rule)
    if rule in ("top_p", "top_p_softmax"):
        valid, remedy = value >= 0.0, "a share of the total in [0, 1]"
    elif rule == "top_k":
        valid = 0.0 <= value <= 1.0
        remedy = "a fraction of the groups in [0, 1] (for a count use top_k_count)"
    elif rule == "top_k_count":
        valid, remedy = value >= 1 and value % 1 == 0, "a whole number of groups >= 1"
    elif rule == "min_p":
        valid, remedy = 0.0 <= value <= 1.0, "a fraction of the best score in [0, 1]"
    elif rule == "quantile":
        valid, remedy = value in (1, 2, 3, 4), "the quarter to keep: 1, 2, 3 or 4"
    else:
        valid, remedy = True, ""
    if not valid:
        raise MooredError(f"rule {rule} takes {remedy}, got value {value}")
