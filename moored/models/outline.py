"""A model without its weights, and where each of them lies: for ranks that read a part of each.

The model is on the meta device; only its buffers, such as the angles of positions, are there. Names
and shapes are compared with the headers of the files, so that a whole load is not begun in vain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.models.adapter import is_adapter
from moored.models.find import check_model_name, model_folder
from moored.models.hub import hub_answers
from moored.models.load import explained_loading, quiet_loading

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWNLOADED = ["config.json", "generation_config.json", WEIGHTS, INDEX, "model-*.safetensors"]
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of a safetensors file, by torch's names."""
Headers = dict[Path, dict[str, tuple[str, tuple[int, ...]]]]
"""Type and shape of each weight, by file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one weight lies."""

    file: Path
    name: str


@dataclass(frozen=True, slots=True)
class Outline:
    """A model on the meta device, and the place of each of its weights by the model's names."""

    model: PreTrainedModel
    places: Mapping[str, Place]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, read one at a time; tied ones come under each of their names."""
        from safetensors import safe_open

        tied = self.model.all_tied_weights_keys
        for name, weight in self.model.state_dict().items():
            place = self.places[tied.get(name, name)]
            with safe_open(place.file, framework="pt") as opened:
                yield name, opened.get_tensor(place.name).to(weight.dtype)


def read_outline(name: str, *, exact: bool) -> Outline | None:
    """The outline of a folder or hub id with safetensors; `exact` as in `load_model`.

    None where weights cannot be read in parts: of adapters, of other formats, and where
    transformers computes weights from those in the files.
    """
    check_model_name(name)
    source = model_folder(name)
    is_local = source.is_dir()
    if name == "smollm2" or (is_local and is_adapter(source)):
        return None
    with quiet_loading(), explained_loading(name, is_local=is_local):
        folder = source if is_local else _downloaded(name)
        headers = _read_headers(folder) if folder is not None else {}
        if folder is None or not headers:
            return None
        model = _empty_from(folder, headers, exact=exact)
        places = None if model is None else _find_places(model, headers)
    return None if model is None or places is None else Outline(model, places)


def fill_buffers(model: Any) -> None:
    """Give a model on the meta device those buffers that its configuration determines."""
    import torch

    for weight in model.parameters():
        weight._is_hf_initialized = True
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = torch.empty_like(buffer, device="cpu")
    # What `from_pretrained` calls too, for everything that no file holds.
    model.initialize_weights()


def _downloaded(name: str) -> Path | None:
    """The snapshot of a hub id on this machine; None where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        only_files = not hub_answers()
        found = snapshot_download(name, allow_patterns=DOWNLOADED, local_files_only=only_files)
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _read_headers(folder: Path) -> Headers:
    """Of the files that transformers would load."""
    from safetensors import safe_open

    files = [folder / WEIGHTS]
    if not files[0].is_file() and (folder / INDEX).is_file():
        named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [folder / file for file in sorted(set(named.values()))]
    headers: Headers = {}
    for file in files:
        if file.is_file():
            with safe_open(file, framework="np") as opened:
                slices = {name: opened.get_slice(name) for name in sorted(opened.keys())}
                headers[file] = {
                    name: (found.get_dtype(), tuple(found.get_shape()))
                    for name, found in slices.items()
                }
    return headers


def _empty_from(folder: Path, headers: Headers, *, exact: bool) -> PreTrainedModel | None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        return None
    dtype = torch.float32 if exact else config.dtype or _stored_dtype(headers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        ).eval()
    fill_buffers(model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _stored_dtype(headers: Headers) -> torch.dtype:
    """That of the first weight, as `dtype="auto"` of transformers has it."""
    import torch

    kinds = [kind for header in headers.values() for kind, _ in header.values()]
    return getattr(torch, next((FLOATS[kind] for kind in kinds if kind in FLOATS), "float32"))


def _find_places(model: Any, headers: Headers) -> dict[str, Place] | None:
    """The place of every weight; None when one is missing, of another shape, or computed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted = model.state_dict()
    found: dict[str, Place] = {}
    for file, header in headers.items():
        for stored, (_, shape) in header.items():
            name, converter = rename_source_key(
                stored, renamings, converters, model.base_model_prefix, wanted
            )
            if converter is not None:
                return None
            if name not in wanted:
                continue
            if shape != tuple(wanted[name].shape):
                return None
            found[name] = Place(file, stored)
    tied = model.all_tied_weights_keys
    own = {name for name, _ in model.named_parameters()}
    # Both of a tied pair: whether they are tied depends on their values.
    has_both = any(name in found and source in found for name, source in tied.items())
    return found if found.keys() == own == wanted.keys() - tied.keys() and not has_both else None
