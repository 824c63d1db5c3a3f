"""Log-probabilities of many continuations of one prompt, on a model inside TRL's trainer.

The prompt is computed once: its keys and values are kept, and every continuation reads them. Models
that keep other things (the state of a recurrent layer, say) read the prompt again for each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a cache that several tokens at a time may be added to, row by row. Recurrent layers
forget their state when given several."""
IGNORED = -100


def score_continuations(
    model: Any,
    prompt_ids: np.ndarray,
    continuations: Sequence[np.ndarray],
    *,
    batch_size: int,
    device: torch.device,
) -> list[np.ndarray]:
    """Log-prob of every token of each continuation, `batch_size` rows at a time.

    `model` is one that TRL gave its fused head, which divides logits by the sampling temperature.
    """
    prompt = torch.as_tensor(np.asarray(prompt_ids, dtype=np.int64), device=device)[None]
    # The last token of the prompt goes with each continuation: it predicts the first token.
    cache = _keys_and_values(model, prompt[:, :-1]) if prompt.shape[1] > 1 else None
    opening = prompt[:, -1:] if cache is not None else prompt
    found: dict[int, np.ndarray] = {}
    # Rows of similar length together need the least padding.
    order = sorted(range(len(continuations)), key=lambda index: -len(continuations[index]))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        scored = _score_rows(model, opening, cache, [continuations[index] for index in part])
        for index, row in zip(part, scored, strict=True):
            found[index] = row[: len(continuations[index])]
    return [found[index] for index in range(len(continuations))]


def _keys_and_values(model: Any, prompt: torch.Tensor) -> Any:
    """The cache of a prompt; None where its layers are not keys and values alone."""
    cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values
    layers = getattr(cache, "layers", ())
    return cache if layers and all(type(layer) in PLAIN_LAYERS for layer in layers) else None


def _score_rows(
    model: Any, opening: torch.Tensor, cache: Any, continuations: Sequence[np.ndarray]
) -> np.ndarray:
    """(rows, width) log-probs of continuations that follow `cache` and `opening`."""
    num_rows, width = len(continuations), max(map(len, continuations))
    if width == 0:
        return np.zeros((num_rows, 0))
    mask = np.arange(width) < np.array([[len(row)] for row in continuations])
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.concatenate(continuations)
    rows = torch.as_tensor(ids, device=opening.device)
    input_ids = torch.cat([opening.expand(num_rows, -1), rows], dim=1)
    # Padding stands behind every token that is scored, so causal attention never reads it.
    labels = torch.cat([torch.full_like(opening, IGNORED).expand(num_rows, -1), rows], dim=1)
    extra = {} if cache is None else {"past_key_values": _repeat(cache, num_rows)}
    output = model(input_ids=input_ids, labels=labels, fused_lm_head=True, **extra)
    return output.log_probs[:, -width:].float().cpu().numpy()


def _repeat(cache: Any, num_rows: int) -> Any:
    """A copy for so many rows; a model adds to the cache that it is given."""
    repeated = copy.copy(cache)
    repeated.layers = [copy.copy(layer) for layer in cache.layers]
    repeated.batch_repeat_interleave(num_rows)
    return repeated
