"""LoRA adapters as PEFT saves them: a folder without a model, which names its base.

`merge_adapter` refuses pairs that do not fit, of which PEFT itself warns at most.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.errors import MooredError
from moored.models.folder import has_model_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base's modules."""
MISSING = "Found missing adapter keys"
"""How PEFT's warning begins where the files lack weights of modules that are to be adapted."""
MISMATCH = re.compile(r"size mismatch for (?:base_model\.model\.)?(\S+):")
TOKENS = "TrainableTokensWrapper"
"""PEFT's class of an embedding or output layer of which some tokens were trained."""


def is_adapter(folder: Path) -> bool:
    """True for a folder that holds an adapter and no model of its own."""
    if not (folder / CONFIG).is_file():
        return False
    return not (folder / "config.json").is_file() or not has_model_weights(folder)


def named_base(folder: Path) -> str:
    """The model that an adapter was trained on, as it is written there."""
    try:
        options = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base = options["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise MooredError(
            f"adapter {str(folder)!r} does not say what it was trained on; set "
            f"base_model_name_or_path in its {CONFIG}"
        )
    return base


def merge_adapter(model: PreTrainedModel, folder: Path, base: str) -> PreTrainedModel:
    """The model with the adapter in its weights, all of which can be trained."""
    plain = _ends(model)
    modules = {name for name, _ in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = _adapted(model, folder, base)
        if not hasattr(adapted, "merge_and_unload"):
            raise MooredError(
                f"adapter {str(folder)!r} cannot be merged into the weights of a model, as learned "
                f"prompts cannot; give a LoRA adapter"
            )
        _check_layers(folder, base, modules)
        changed = {own for own, end in zip(_ends(model), plain, strict=True) if own is not end}
        # Of single tokens PEFT itself has one set of rows for both.
        if _is_tied(*plain) and any(type(own).__name__ != TOKENS for own in changed):
            raise MooredError(
                f"adapter {str(folder)!r} changes the embedding or the output layer (embed_tokens "
                f"or lm_head), but its base {base!r} has one weight for both (tie_word_embeddings)"
                f", so merging would give a different model; train the adapter without these two "
                f"in target_modules and modules_to_save, or on a base with "
                f"tie_word_embeddings=false"
            )
        merged = adapted.merge_and_unload()
    # peft froze them for the adapter's sake.
    return merged.requires_grad_(True)


def _adapted(model: PreTrainedModel, folder: Path, base: str) -> Any:
    """What PEFT makes of the two; a pair that does not fit is refused."""
    from peft import PeftModel

    warnings.filterwarnings("error", message=MISSING)
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except UserWarning as error:
        raise _misfit(
            folder,
            base,
            "the adapter has no weights for some modules, as if the base had more layers",
        ) from error
    except RuntimeError as error:
        found = MISMATCH.search(str(error))
        if found is None:
            raise
        raise _misfit(folder, base, f"{found[1]!r} has another shape in each") from error


def _check_layers(folder: Path, base: str, modules: set[str]) -> None:
    """Refuse weights of modules that the base lacks, which PEFT leaves out without a word."""
    from safetensors import safe_open

    if not (folder / WEIGHTS).is_file():
        return
    with safe_open(folder / WEIGHTS, framework="np") as opened:
        names = (name.removeprefix(PREFIX).partition(".lora_") for name in sorted(opened.keys()))
        lost = [module for module, is_lora, _ in names if is_lora and module not in modules]
    if lost:
        raise _misfit(folder, base, f"the base has no {lost[0]!r}")


def _misfit(folder: Path, base: str, why: str) -> MooredError:
    return MooredError(
        f"adapter {str(folder)!r} does not fit its base {base!r}: {why}; name the model it was "
        f"trained on in its {CONFIG}"
    )


def _ends(model: PreTrainedModel) -> tuple[object, object]:
    """The modules that read and write tokens; PEFT puts its own in the place of those it adapts."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _is_tied(first: object, last: object) -> bool:
    return getattr(first, "weight", None) is getattr(last, "weight", ())
