"""What is wrong with the folder of a model, as far as its files tell; needs no torch.

Loading would fail too, but seconds later and in the words of other packages.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from moored.errors import MooredError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors itself reads."""
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


def check_model_folder(folder: Path, name: str) -> None:
    """Refuse a folder without configuration, weights or tokenizer, or with weights cut short."""
    if not (folder / "config.json").is_file():
        raise MooredError(f"model folder {name!r} {_without_config(folder)}")
    read_json(folder / "config.json", name)
    if (folder / "adapter_config.json").is_file():
        # transformers would put the adapter into the model while it loads.
        raise MooredError(
            f"model folder {name!r} holds both a whole model and an adapter "
            f"(adapter_config.json); move the adapter's files into a folder of their own, or "
            f"delete them where they are merged into the model already"
        )
    files = _weight_files(folder, name)
    for file in files:
        _check_whole(file, name)
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        raise MooredError(
            f"model folder {name!r} holds no tokenizer (tokenizer.json); save it there too, with "
            f"tokenizer.save_pretrained({name!r})"
        )


def has_model_weights(folder: Path) -> bool:
    """True where weights of a model lie, or the index of such; an adapter's do not count."""
    index = (folder / "model.safetensors.index.json").is_file()
    return index or bool(_full_weights(folder)) or any(folder.glob("pytorch_model*.bin"))


def read_description(folder: Path) -> dict[str, Any]:
    """The config.json of a model; empty where it cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_plain_tokenizer(folder: Path) -> bool:
    """True where its files alone say that transformers reads the tokenizer as `TokenizersBackend`.

    Only for Llamas: of some other kinds transformers knows better than the files which class it is.
    """
    if not (folder / "tokenizer.json").is_file():
        return False
    try:
        model, tokenizer = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("config.json", "tokenizer_config.json")
        )
        is_plain = tokenizer["tokenizer_class"] == "TokenizersBackend"
        return is_plain and "auto_map" not in tokenizer and model["model_type"] == "llama"
    except (OSError, ValueError, LookupError, TypeError):
        return False


def read_header(file: Path) -> dict[str, dict]:
    """Names, types, shapes and places of the tensors in a safetensors file.

    Raises ValueError where the file is damaged or shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(LENGTH_BYTES)
        if len(start) < LENGTH_BYTES:
            raise ValueError(f"{size} bytes are not a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"its header is cut short, it has {size:,} bytes")
        header = json.loads(handle.read(length))
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    ends = (value["data_offsets"][1] for value in tensors.values())
    wanted = LENGTH_BYTES + length + max(ends, default=0)
    if size < wanted:
        raise ValueError(f"it has {size:,} of {wanted:,} bytes")
    return tensors


def _without_config(folder: Path) -> str:
    if (folder / "model" / "config.json").is_file():
        return f"is a run directory; give its model: {str(folder / 'model')!r}"
    if (folder / "config.yaml").is_file():
        return "is a run directory that has no model yet; let it finish, or name another model"
    runs = sorted(file.parent for file in folder.glob("*/config.yaml"))
    if runs:
        return f"is a folder of runs; give one of them, such as {str(runs[0])!r}"
    found = "holds no config.json" if any(folder.iterdir()) else "is empty"
    return f"{found}; give a folder in Hugging Face format"


def _weight_files(folder: Path, name: str) -> list[Path]:
    """All safetensors files; those that an index names must be there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(read_json(index, name).get("weight_map", {}).values()))
        missing = [file for file in wanted if not (folder / file).is_file()]
        if missing:
            raise MooredError(
                f"model folder {name!r} lacks {len(missing)} of {len(wanted)} files of weights, "
                f"{missing[0]!r} among them; copy or download it again"
            )
        return [folder / file for file in wanted]
    files = _full_weights(folder)
    if not files and not any(folder.glob("pytorch_model*.bin")):
        raise MooredError(
            f"model folder {name!r} holds no weights (model.safetensors); copy or download it again"
        )
    return files


def _full_weights(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("adapter_")]


def _check_whole(file: Path, name: str) -> None:
    try:
        read_header(file)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else "its header cannot be read"
        raise MooredError(
            f"model {name!r} has damaged weights, {file.name!r}: {why}; copy or download it again"
        ) from error


def read_json(file: Path, name: str) -> dict:
    """Keys and values of a file in the folder of model `name`."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MooredError(
            f"model folder {name!r}: {file.name} is not valid JSON ({error}); copy or download it "
            f"again"
        ) from error
    if not isinstance(data, dict):
        raise MooredError(f"model folder {name!r}: {file.name} must hold keys and values")
    return data
