"""The files in the folder of a model; needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moored.errors import MooredError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


def check_model_folder(folder: Path, name: str) -> None:
    """Refuse a folder without configuration or tokenizer, and a model mixed with an adapter."""
    if not (folder / "config.json").is_file():
        raise MooredError(f"model folder {name!r} {_without_config(folder)}")
    if not read_description(folder):
        raise MooredError(
            f"model folder {name!r}: config.json is not JSON with keys; copy or download it again"
        )
    if (folder / "adapter_config.json").is_file():
        # transformers would put the adapter into the model while it loads.
        raise MooredError(
            f"model folder {name!r} holds both a whole model and an adapter "
            f"(adapter_config.json); move the adapter's files into a folder of their own, or "
            f"delete them where they are merged into the model already"
        )
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        raise MooredError(
            f"model folder {name!r} holds no tokenizer (tokenizer.json); save it there too, with "
            f"tokenizer.save_pretrained({name!r})"
        )


def has_model_weights(folder: Path) -> bool:
    """True where weights of a model lie, or the index of such; an adapter's do not count."""
    files = [*folder.glob("*.safetensors*"), *folder.glob("pytorch_model*.bin")]
    return any(not file.name.startswith("adapter_") for file in files)


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
