"""The shapes of models that the fast engine computes."""

from __future__ import annotations

from typing import Any

from moored.models.lengths import sliding_window

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose layers are norm, attention, norm, gated linear units, and hand extra arguments down
to their attention."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Angles that do not depend on the length of the sequence."""
HEAD_WIDTHS = (16, 32, 64, 128, 256)
"""Those that the kernels of the fast sampler are made for."""


def is_fast_shape(config: Any) -> bool:
    """True for the shapes that the fast sampler knows; others go through the model's own code."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LLAMA_SHAPED
        and getattr(config, "hidden_act", "silu") == "silu"
        and has_fixed_angles(config)
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and sliding_window(config) is None
        and not getattr(config, "mlp_bias", False)
        and head_width(config) in HEAD_WIDTHS
    )


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def has_fixed_angles(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in ROPE_TYPES
