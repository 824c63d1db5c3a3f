"""An adapter merged into the model that it was trained on, or refused where that is another model.

PEFT itself warns of such pairs at most, and merges them.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moored.models.adapter import cannot_merge, has_other_shape, is_tied, lacks_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MISSING = "Found missing adapter keys"
"""How PEFT's warning begins where the files lack weights of modules that are to be adapted."""
MISMATCH = re.compile(r"size mismatch for (?:base_model\.model\.)?(\S+):")
TOKENS = "TrainableTokensWrapper"
"""PEFT's class of an embedding or output layer of which some tokens were trained."""


def merge_adapter(model: PreTrainedModel, folder: Path, base: str) -> PreTrainedModel:
    """The model with the adapter in its weights, all of which can be trained."""
    plain = _ends(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = _adapted(model, folder, base)
        if not hasattr(adapted, "merge_and_unload"):
            raise cannot_merge(folder)
        changed = {own for own, end in zip(_ends(model), plain, strict=True) if own is not end}
        # Of single tokens PEFT itself has one set of rows for both.
        if _is_tied(*plain) and any(type(own).__name__ != TOKENS for own in changed):
            raise is_tied(folder, base)
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
        raise lacks_modules(folder, base) from error
    except RuntimeError as error:
        found = MISMATCH.search(str(error))
        if found is None:
            raise
        raise has_other_shape(folder, base, found[1]) from error


def _ends(model: PreTrainedModel) -> tuple[object, object]:
    """The modules that read and write tokens; PEFT puts its own in the place of those it adapts."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _is_tied(first: object, last: object) -> bool:
    return getattr(first, "weight", None) is getattr(last, "weight", ())
