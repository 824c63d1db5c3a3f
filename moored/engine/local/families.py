"""What the engine needs to know about kinds of models."""

from __future__ import annotations

from typing import Any

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose layers are norm, attention, norm, gated linear units, and hand extra arguments down
to their attention."""


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Angles that do not depend on the length of the sequence."""


def has_fixed_angles(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in ROPE_TYPES


def sliding_window(config: Any) -> int | None:
    """How many tokens back some layers look, if they do not look back to the start."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)
