"""LoRA adapters as PEFT saves them: a folder without a model, which names its base.

Whether the two fit together is read from the headers of their weights; needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from moored.errors import MooredError
from moored.models.folder import has_model_weights, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base's modules."""
HEAD = "lm_head"
"""The output layer, which is not in the files of a base whose embedding is tied to it."""


def is_adapter(folder: Path) -> bool:
    """True for a folder that holds an adapter and no model of its own."""
    if not (folder / CONFIG).is_file():
        return False
    return not (folder / "config.json").is_file() or not has_model_weights(folder)


def base_name(folder: Path) -> str:
    """The model that an adapter was trained on."""
    try:
        data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MooredError(f"adapter {str(folder)!r}: {CONFIG} cannot be read ({error})") from error
    base = data.get("base_model_name_or_path") if isinstance(data, Mapping) else None
    if not isinstance(base, str) or not base:
        raise MooredError(
            f"adapter {str(folder)!r} does not say what it was trained on; set "
            f"base_model_name_or_path in its {CONFIG}"
        )
    return base


def check_adapter(folder: Path, base: Path | None) -> None:
    """Refuse damaged weights, and a base (a folder, or None where unknown) of other shapes."""
    try:
        _shapes(folder / WEIGHTS)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise MooredError(
            f"adapter {str(folder)!r}: {WEIGHTS} is missing or damaged ({error}); copy or download "
            f"it again"
        ) from error
    if base is None:
        return
    known: dict[str, tuple[int, ...]] = {}
    for file in sorted(base.glob("*.safetensors")):
        known |= _shapes(file)
    # Of weights in other formats the shapes are known once they are loaded.
    if known:
        check_fit(folder, base, known)


def check_fit(folder: Path, base: Path, known: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a base whose weights, shapes by name, are not those that the adapter changes."""
    for module, wanted in _adapted(_shapes(folder / WEIGHTS)).items():
        # Files of a base may lack the name of the whole (`transformer.`) before those of layers.
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        found = next((known[name] for name in names if name in known), None)
        if found is None and module == HEAD:
            continue
        if found is None or sorted(found) != sorted(wanted):
            has = "has no such weights" if found is None else f"has {_text(found)}"
            raise MooredError(
                f"adapter {str(folder)!r} does not fit its base {str(base)!r}: it adapts "
                f"{module!r} of {_text(wanted)}, the base {has}; name the model it was trained on "
                f"in its {CONFIG}"
            )


def _adapted(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Modules with LoRA weights, and the (out, in) shape that these are for."""
    found = {}
    for name, shape in shapes.items():
        module, is_first, _ = name.removeprefix(PREFIX).partition(".lora_A.")
        second = shapes.get(name.replace(".lora_A.", ".lora_B."))
        if is_first and second is not None:
            found[module] = (second[0], shape[1])
    return found


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor["shape"]) for name, tensor in read_header(file).items()}


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
