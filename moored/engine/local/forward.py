"""Forward passes of any Hugging Face causal LM over packed rows.

A row holds one prompt and many continuations; each of them sees the prompt and itself alone, by a
mask or by `tree_attention`, so the prompt is computed once.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moored.training.batch import Packed

ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def trunk_of(model: nn.Module) -> nn.Module:
    """The decoder without its head; LoRA layers sit inside it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    return getattr(inner, inner.base_model_prefix)  # pyright: ignore[reportArgumentType]


def hidden_states(trunk: nn.Module, packed: Packed) -> torch.Tensor:
    """(S, width) output at the sources of `packed`."""
    kind = packed.input_ids.device.type
    dtype = next(trunk.parameters()).dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    extra = {} if packed.tree is None else {"tree": packed.tree}
    if packed.segments is None:
        # Models pass on a mask of four dimensions as it is; beside a tree nobody looks at it.
        mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=packed.input_ids.device)
    else:
        mask = tree_mask(packed.segments, dtype)
    # cuDNN builds a plan for every new shape, which takes longer than the attention itself.
    with sdpa_kernel(ATTENTION) if kind == "cuda" else nullcontext():
        output = trunk(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=mask,
            use_cache=False,
            **extra,
        ).last_hidden_state
    return output.reshape(-1, output.shape[-1]).index_select(0, packed.sources)


def tree_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, 1, L, L) additive mask: earlier tokens of the prompt or of the same continuation.

    A padding token sees itself, so that no row of the softmax is empty.
    """
    length = segments.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :] & (segments >= 0)[:, :, None]
    allowed = earlier & (own | prompt)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
