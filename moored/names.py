"""Names that options may take, and which numbers go with them.

Configuration and maths both check against these, so a name is known in one place.
"""

from __future__ import annotations

from typing import Literal, get_args

from moored.errors import MooredError, close_match_hint

Score = Literal["variance", "std", "reward_mean", "length", "entropy", "entropy_std"]
Rule = Literal[
    "top_p", "top_p_softmax", "top_k", "top_k_count", "min_p", "nonzero", "quantile", "none"
]
FilterAction = Literal["drop", "mask", "refill", "soft"]
LossScale = Literal["none", "linear", "sqrt"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
Schedule = Literal["constant", "linear", "cosine"]

SCORES: tuple[str, ...] = get_args(Score)
RULES: tuple[str, ...] = get_args(Rule)
LOSS_SCALES: tuple[str, ...] = get_args(LossScale)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    """Raise with a close match when `name` is not known."""
    if name not in known:
        raise MooredError(f"unknown {kind} {name!r}; {close_match_hint(name, known)}")


def check_rule_value(rule: str, value: float) -> None:
    """Raise when `value` makes no sense for the selection rule."""
    check_name("rule", rule, RULES)
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
