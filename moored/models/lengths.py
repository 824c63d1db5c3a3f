"""How long a dialogue may be for a model, by its config.json or by the config of a loaded model.

Both are read by the same names, so that what would refuse a loaded model refuses it before.
"""

from __future__ import annotations

from collections.abc import Mapping

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that models have for the tokens they were made for; GPT-2 and MPT have their own."""
WINDOW_IF_ASKED = ("qwen", "smollm3")
"""How types begin that use their `sliding_window` only where `use_sliding_window` says so."""


def read_positions(config: object) -> int | None:
    """Tokens that a model was made for; None where it does not say, or has no positions."""
    text = _text_part(config)
    # ALiBi: tokens are known by their distance, of which there is no longest.
    if _read(text, "model_type") == "bloom" or _read(text, "alibi") is True:
        return None
    found = (_whole(text, name) for name in POSITIONS)
    return next((number for number in found if number is not None), None)


def position_limit(config: object) -> int | None:
    """Likewise; None where the model scales its angles, and so reaches beyond them."""
    text = _text_part(config)
    rope = _read(text, "rope_parameters") or _read(text, "rope_scaling")
    return None if scales_angles(rope) else read_positions(config)


def sliding_window(config: object) -> int | None:
    """How many tokens back some layers look, if they do not look back to the start."""
    text = _text_part(config)
    is_used = _read(text, "use_sliding_window")
    if is_used is None:
        is_used = not str(_read(text, "model_type")).startswith(WINDOW_IF_ASKED)
    return _whole(text, "sliding_window") if is_used else None


def scales_angles(rope: object) -> bool:
    """True for rope parameters other than plain ones; each kind of layer may have its own."""
    if not isinstance(rope, Mapping):
        return False
    kind = rope.get("rope_type", rope.get("type"))
    return kind not in (None, "default") or any(scales_angles(part) for part in rope.values())


def _text_part(config: object) -> object:
    """What a model of several kinds of input says of its text; else the whole."""
    return _read(config, "text_config") or config


def _whole(config: object, name: str) -> int | None:
    """A whole number above 0; None where there is no such number."""
    value = _read(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    return value


def _read(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
