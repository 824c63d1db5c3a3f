"""What options ask of one another: defaults that follow the algorithm, and sizes that must fit.

`moored.config` calls these while it validates; `moored config` prints what they lead to.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel

Options = Mapping[str, object]

ALGORITHM_DEFAULTS: Mapping[str, Options] = MappingProxyType(
    {
        "dapo": {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "entropy_coef": 0.0},
        "grpo": {"clip_high": 0.2, "kl_coef": 0.001, "kl_estimator": "k3"},
        "dr_grpo": {"clip_high": 0.2},
        # arXiv 2507.18071: ratios of whole sequences stay near 1.
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
        # arXiv 2510.13786: weights of up to 5.
        "cispo": {"clip_high": 4.0},
    }
)
"""Options of the section `algorithm` that a name sets where the configuration does not."""
DYNAMIC_SAMPLING: Options = MappingProxyType(
    {"score": "std", "rule": "nonzero", "action": "refill"}
)
"""DAPO's filter: groups of equal rewards are sampled again. Another `filter.rule` replaces it."""
OVERLONG_SHARE = 5
"""DAPO's buffer is a fifth of the longest reply: 4,096 of 20,480 tokens in the paper."""
GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo")
"""Algorithms and estimators whose advantages compare the trajectories of a group."""


def with_algorithm_defaults(data: Options, longest_reply: int) -> dict[str, object]:
    """The data of a configuration with the defaults that its algorithm's name stands for.

    `longest_reply` is the default of rollout.max_response_tokens.
    """
    given = _given(data.get("algorithm"))
    name = given.get("name")
    if name not in ALGORITHM_DEFAULTS:
        return dict(data)
    defaults = dict(ALGORITHM_DEFAULTS[str(name)])
    sections: dict[str, object] = {}
    if name == "dapo":
        longest = _given(data.get("rollout")).get("max_response_tokens", longest_reply)
        if isinstance(longest, int):
            defaults["overlong_buffer"] = longest // OVERLONG_SHARE
        chosen = _given(data.get("filter"))
        if "rule" not in chosen:
            sections["filter"] = {**DYNAMIC_SAMPLING, **chosen}
    return {**data, "algorithm": {**defaults, **given}, **sections}


def _given(section: object) -> Options:
    """The options of a section that were set, whether it is a mapping or an object."""
    if isinstance(section, BaseModel):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return section if isinstance(section, Mapping) else {}


def check_group_size(
    group_size: int, *, rule: str, score: str, algorithm: str, advantage: str | None
) -> None:
    """Raise when groups of one trajectory leave nothing to compare."""
    if group_size > 1:
        return
    remedy = "set rollout.group_size to 2 or more"
    if rule != "none" and ":" not in score:
        raise ValueError(
            f"filter.score = {score} needs several trajectories of each prompt, but "
            f"rollout.group_size is 1; {remedy}, or filter.rule=none"
        )
    if (advantage or algorithm) in GROUP_BASELINES:
        raise ValueError(
            f"{advantage or algorithm} compares the trajectories of a group, but "
            f"rollout.group_size is 1, so that every advantage is 0; {remedy}, or choose "
            f"algorithm.name=ppo or reinforce_pp"
        )


def check_overlong_buffer(buffer: int, longest_reply: int) -> None:
    """Raise when replies would lose reward from before their first token."""
    if buffer > longest_reply:
        raise ValueError(
            f"algorithm.overlong_buffer = {buffer} is longer than the longest reply, "
            f"rollout.max_response_tokens = {longest_reply}; set it to about a fifth of that"
        )


def check_gradients(num_groups: int, *, num_buckets: int, params: str, lora_rank: int) -> None:
    """Raise when groups do not fill the buckets, or weights are asked for that do not exist."""
    if num_groups < num_buckets:
        raise ValueError(
            f"{num_groups} groups do not fill gradients.num_buckets = {num_buckets} buckets; set "
            f"rollout.num_groups to {num_buckets} or more, or gradients.num_buckets to "
            f"{num_groups} or less"
        )
    if params == "lora" and not lora_rank:
        raise ValueError(
            "gradients.params = lora needs LoRA weights, but optimizer.lora_rank is 0; choose all "
            "or last-block"
        )


def check_max_lag(max_lag: int, kind: str) -> None:
    """Refuse to sample beside an update where both would use the same weights.

    An engine of the user's own (`module:attr`) is taken at its word.
    """
    if max_lag and kind != "ray" and ":" not in kind:
        raise ValueError(
            f"rollout.max_lag = {max_lag} needs samplers with weights of their own, but engine "
            f"{kind!r} samples with the learner's; set engine.kind to ray, or max_lag to 0"
        )
