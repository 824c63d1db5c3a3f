"""A shape small enough to count by hand, and a configuration for it."""

from __future__ import annotations

from typing import Any

from moored.config import Config, load_config
from moored.models.shapes import ModelShape


def tiny(**changes: Any) -> ModelShape:
    """Two layers of width 4, inner 8, two heads of 2 on one KV head, 10 tokens."""
    sizes: dict[str, Any] = {
        "family": "llama",
        "layers": 2,
        "width": 4,
        "inner": 8,
        "heads": 2,
        "kv_heads": 1,
        "head_width": 2,
        "vocabulary": 10,
        "is_tied": True,
    }
    return ModelShape(**{**sizes, **changes})


def config(*options: str) -> Config:
    """GRPO without KL on 2 x 4 episodes, each of up to 16 tokens."""
    few = ["rollout.num_groups=2", "rollout.group_size=4", "rollout.max_context=16"]
    few += ["algorithm.name=grpo", "algorithm.kl_coef=0", "rollout.max_response_tokens=4"]
    few += ["engine.micro_batch_tokens=100", "engine.gradient_checkpointing=false"]
    return load_config({}, [*few, *options])
