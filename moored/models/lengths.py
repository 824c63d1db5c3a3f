"""How long a dialogue may be for a model, by its config.json or by the config of a loaded model.

Both are read by the same names, so that what would refuse a loaded model refuses it before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that models have for the tokens they were made for; GPT-2 and MPT have their own."""
WINDOWS = ("sliding_window", "window_size")
"""Names of how far layers look back; GPT-Neo has its own."""
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
    """Likewise; None where the model scales its angles, and so reaches beyond them.

    Where angles depend on the length of the whole dialogue (LongRoPE, dynamic NTK), it is how long
    they stay the same: after that, keys in a cache would be of other angles than the learner's.
    """
    text = _text_part(config)
    rope = _read(text, "rope_parameters") or _read(text, "rope_scaling")
    if not scales_angles(rope):
        return read_positions(config)
    if "longrope" in rope_types(rope):
        first = (_whole(part, "original_max_position_embeddings") for part in (text, rope))
        return next((length for length in first if length is not None), read_positions(config))
    return read_positions(config) if "dynamic" in rope_types(rope) else None


def sliding_window(config: object) -> int | None:
    """How many tokens back some layers look, if they do not look back to the start."""
    text = _text_part(config)
    is_used = _read(text, "use_sliding_window")
    if is_used is None:
        is_used = not str(_read(text, "model_type")).startswith(WINDOW_IF_ASKED)
    return _least(_whole(text, name) for name in WINDOWS) if is_used else None


def exact_limit(config: object) -> int | None:
    """Tokens of the longest dialogue that sampler and learner compute exactly; None: any."""
    return _least((position_limit(config), sliding_window(config)))


def usual_length(config: object) -> int | None:
    """The same, and no more than the model was made for though it may reach beyond."""
    return _least((read_positions(config), exact_limit(config)))


def scales_angles(rope: object) -> bool:
    """True for rope parameters other than plain ones."""
    return bool(rope_types(rope) - {"default"})


def rope_types(rope: object) -> set[object]:
    """The kinds of angles in rope parameters; each kind of layer may have its own."""
    if not isinstance(rope, Mapping):
        return set()
    own = {rope.get("rope_type", rope.get("type"))} - {None}
    return own.union(*map(rope_types, rope.values()))


def _least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


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
