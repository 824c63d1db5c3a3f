"""LoRA adapters as PEFT saves them: a folder without a model, which names its base.

Whether the two fit together is read from the headers of their weights; needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moored.errors import MooredError
from moored.models.folder import has_model_weights, read_description, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base's modules."""
HEAD = "lm_head"
"""The output layer, which is not in the files of a base whose embedding is tied to it."""
ENDS = {"embed_tokens", HEAD}
"""Layers that have one weight where they are tied."""
SOME_LAYERS = ("layers_to_transform", "layers_pattern", "layer_replication", "exclude_modules")
"""Options of an adapter that need not change every layer."""
IN_LAYER = re.compile(r"(\D+\.)(\d+)(\..+)")
"""The name of a module: before the number of its layer, the number, and after it."""
NAME_ITS_BASE = f"name the model it was trained on in its {CONFIG}"


def is_adapter(folder: Path) -> bool:
    """True for a folder that holds an adapter and no model of its own."""
    if not (folder / CONFIG).is_file():
        return False
    return not (folder / "config.json").is_file() or not has_model_weights(folder)


def named_base(folder: Path) -> str:
    """The model that an adapter was trained on, as it is written there."""
    base = _options(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise MooredError(
            f"adapter {str(folder)!r} does not say what it was trained on; set "
            f"base_model_name_or_path in its {CONFIG}"
        )
    return base


def _options(folder: Path) -> Mapping[str, Any]:
    """What the adapter_config.json says."""
    try:
        data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MooredError(f"adapter {str(folder)!r}: {CONFIG} cannot be read ({error})") from error
    return data if isinstance(data, Mapping) else {}


def check_adapter(folder: Path, base: Path | None) -> None:
    """Refuse what is no adapter of weights or is damaged, and a base that it does not fit.

    `base` is a folder, or None where its files are not here. What they do not tell of the two is
    found once they are loaded.
    """
    if "num_virtual_tokens" in _options(folder):
        raise cannot_merge(folder)
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
        for name, shape in _shapes(folder / WEIGHTS).items():
            own = name.removeprefix(PREFIX)
            if known.get(own, shape) != shape:
                raise has_other_shape(folder, named_base(folder), own)
        if _lacks_layers(folder, base, known):
            raise lacks_modules(folder, named_base(folder))
    if _changes_ends(folder) and read_description(base).get("tie_word_embeddings") is True:
        raise is_tied(folder, named_base(folder))


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
                f"{module!r} of {_text(wanted)}, the base {has}; {NAME_ITS_BASE}"
            )


def _lacks_layers(folder: Path, base: Path, known: Mapping[str, tuple[int, ...]]) -> bool:
    """The base has layers of which the adapter changes nothing, though it is of all layers."""
    options, depth = _options(folder), read_description(base).get("num_hidden_layers")
    targets, shapes = options.get("target_modules"), _shapes(folder / WEIGHTS)
    # A single layer may be given by its number, also 0.
    is_of_some = any(options.get(name) not in (None, [], "") for name in SOME_LAYERS)
    if not isinstance(targets, list) or is_of_some:
        return False
    adapted = [IN_LAYER.fullmatch(name) for name in _adapted(shapes)]
    kinds = {(found[1], found[3]) for found in adapted if found}
    layers = {(found[1], int(found[2])) for found in adapted if found}
    # PEFT does not adapt what it saves as a whole.
    modules = [name.removesuffix(".weight") for name in known if f"{PREFIX}{name}" not in shapes]
    for module in modules:
        found = IN_LAYER.fullmatch(module)
        if found is None or (found[1], found[3]) not in kinds or not _is_target(module, targets):
            continue
        # Files may have more layers than the model, such as those that guess ahead.
        is_used = not isinstance(depth, int) or int(found[2]) < depth
        if is_used and (found[1], int(found[2])) not in layers:
            return True
    return False


def _is_target(module: str, targets: Sequence[str]) -> bool:
    """As PEFT reads a list of targets: each is the whole name of a module or its end."""
    return any(f".{module}".endswith(f".{target}") for target in targets)


def _changes_ends(folder: Path) -> bool:
    """It changes or replaces the embedding or the output layer."""
    options = _options(folder)
    named = [options.get(key) for key in ("target_modules", "modules_to_save")]
    names = [str(name) for own in named if isinstance(own, list) for name in own]
    return any(name.rpartition(".")[2] in ENDS for name in names)


def cannot_merge(folder: Path) -> MooredError:
    """Of an adapter that changes no weights."""
    return MooredError(
        f"adapter {str(folder)!r} cannot be merged into the weights of a model, as prompts that "
        f"were learned cannot; give a LoRA adapter"
    )


def lacks_modules(folder: Path, base: str) -> MooredError:
    """Of a base with more layers than the adapter."""
    return MooredError(
        f"adapter {str(folder)!r} does not fit its base {base!r}: the adapter has no weights for "
        f"some modules that it should change, as if the base had more layers; {NAME_ITS_BASE}"
    )


def has_other_shape(folder: Path, base: str, name: str) -> MooredError:
    """Of weights that the adapter has in place of the base's."""
    return MooredError(
        f"adapter {str(folder)!r} does not fit its base {base!r}: {name!r} has another shape in "
        f"each, as after adding tokens to a vocabulary; {NAME_ITS_BASE}"
    )


def is_tied(folder: Path, base: str) -> MooredError:
    """Of an adapter that would part two layers of its base that are one."""
    return MooredError(
        f"adapter {str(folder)!r} changes the embedding or the output layer (embed_tokens or "
        f"lm_head), but its base {base!r} has one weight for both (tie_word_embeddings), so "
        f"merging would give a different model; train the adapter without these two in "
        f"target_modules and modules_to_save, or on a base with tie_word_embeddings=false"
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
