"""Options that an algorithm's name sets where the configuration does not.

`moored.config` asks while it validates; `moored config` prints what they lead to.
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
