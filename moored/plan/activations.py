"""What a micro-batch keeps in memory, tensor by tensor.

Counted from the layers of transformers (Llama, Qwen) over `engine/fast/tree_attention.py`, and from
the fused ones of `engine/fast/layers.py`; the tests compare the tables with what autograd really
saves. The residual stream is float32. Under autocast every linear layer keeps a bfloat16 copy of
its input of its own, unless the input is bfloat16 already, as it is in fused layers.
w width, q queries, k keys (of all heads), i inner width, h heads, r rank of LoRA.
"""

from __future__ import annotations

from typing import Literal

from moored.models.shapes import ModelShape
from moored.plan.coefficients import MemoryCoefficients

LayerKind = Literal["fused", "bfloat16", "float32"]
"""How the learner computes layers: by `engine/fast/layers.py`, or as transformers does, under
autocast or without."""


def layer_bytes(shape: ModelShape, kind: LayerKind, *, lora_rank: int = 0) -> int:
    """For one token, what autograd keeps of one layer until its backward pass."""
    if kind == "fused":
        return sum(_fused_layer(shape, lora_rank).values())
    saved = _layer_in_bf16(shape, lora_rank) if kind == "bfloat16" else _layer_in_float32(shape)
    return sum(saved.values())


def _fused_layer(shape: ModelShape, rank: int) -> dict[str, int]:
    """Backwards, its kernels compute normed inputs and SiLUs again instead of reading them."""
    w, q, k, i, h = _letters(shape)
    roots = 4 * (h + shape.kv_heads)
    return {
        "inputs of the norms (float32)": 2 * 4 * w,
        "their inverse roots": 2 * 4,
        "outputs of the norms, which the products after each share": 2 * 2 * w,
        "inputs and roots of the norms of queries and keys": (
            0 if shape.qk_norm == "none" else 2 * q + 2 * k + roots
        ),
        "rotated queries and keys, values": 2 * q + 2 * k + 2 * k,
        "outputs of attention, also the input of the out product": 2 * q,
        "log-sum-exps (float32)": 4 * h,
        "gate, up, and the product of the gated units": 3 * 2 * i,
        "LoRA: inputs of the second factors": 7 * 2 * rank,
    }


def _layer_in_bf16(shape: ModelShape, rank: int) -> dict[str, int]:
    w, q, k, i, h = _letters(shape)
    return {
        "inputs of the norms (float32)": 2 * 4 * w,
        "their inverse roots": 2 * 4,
        # For the gradient of a norm's weight, which LoRA does not train.
        "normed inputs (float32)": 0 if rank else 2 * 4 * w,
        "inputs of the q, k and v products": 3 * 2 * w,
        "rotated queries and keys, values": 2 * q + 2 * k + 2 * k,
        "outputs of attention, also the input of the out product": 2 * q,
        "log-sum-exps (float32)": 4 * h,
        "inputs of the gate and up products": 2 * 2 * w,
        "gate, its SiLU, up, and their product": 4 * 2 * i,
        "LoRA: inputs of the second factors": 7 * 2 * rank,
        **_more_norms(shape, 2, has_grad=not rank),
    }


def _layer_in_float32(shape: ModelShape) -> dict[str, int]:
    w, q, k, i, h = _letters(shape)
    return {
        "inputs of the norms": 2 * 4 * w,
        "their inverse roots": 2 * 4,
        "normed inputs": 2 * 4 * w,
        "outputs of the norms": 2 * 4 * w,
        "rotated queries and keys, values": 4 * q + 4 * k + 4 * k,
        "outputs of attention": 4 * q,
        "log-sum-exps": 4 * h,
        "gate, its SiLU, up, and their product": 4 * 4 * i,
        **_more_norms(shape, 4, has_grad=True),
    }


def _more_norms(shape: ModelShape, element: int, *, has_grad: bool) -> dict[str, int]:
    """Norms of queries and keys (float32 inputs, roots, normed), and of a layer's two outputs."""
    w, q, k, _, h = _letters(shape)
    one = 4 + (element if has_grad else 0)
    found = {}
    if shape.qk_norm != "none":
        roots = h + shape.kv_heads if shape.qk_norm == "head" else 2
        found["norms of queries and keys"] = one * (q + k) + 4 * roots
    if shape.norms_per_layer > 2:
        found["norms of the outputs"] = (shape.norms_per_layer - 2) * (one * w + 4)
    return found


def outer_bytes(shape: ModelShape, *, lora_rank: int = 0) -> int:
    """For one token, what is kept outside the layers until they are reached, and after that."""
    return _behind_bytes(shape, lora_rank) + _before_bytes(shape, lora_rank)


def _behind_bytes(shape: ModelShape, rank: int) -> int:
    """Input, inverse root and normed input of the last norm, and hidden states, for the head."""
    w = shape.width
    # The normed input is for the gradient of the norm's weight, which LoRA does not train.
    return 4 * w + 4 + (0 if rank else 4 * w) + 4 * w


def _before_bytes(shape: ModelShape, rank: int) -> int:
    """Ids, for the gradient of the embedding, and the two angles that all layers share."""
    return (0 if rank else 8) + 2 * 4 * shape.head_width


def forward_bytes(shape: ModelShape, kind: LayerKind) -> int:
    """For one token, the most that a pass without gradients holds at a time: in the gated units.

    Embeddings, input of the layer (fused: and what it still had to add) and residual stream; input
    of the units (float32 but for fused norms); gate (fused) or its SiLU, up, and their product; the
    angles.
    """
    w, i = shape.width, shape.inner
    normed = 2 * w + 2 * w if kind == "fused" else 4 * w
    return 3 * 4 * w + normed + 3 * _element(kind) * i + 2 * 4 * shape.head_width


def prefill_bytes(shape: ModelShape, *, bf16: bool) -> int:
    """For one token, the same in `Decoder.forward` of the fast sampler: when gate and up are made.

    Stream (float32); input; queries, keys and values; mixed values; output of the layer before;
    gate, up and their product.
    """
    w, q, k, i, _ = _letters(shape)
    return 4 * w + (2 if bf16 else 4) * (w + (q + 2 * k) + q + w + 3 * i)


def backward_bytes(shape: ModelShape, kind: LayerKind) -> int:
    """For one token, what the backward pass of a layer needs beyond what was kept for it.

    Most when the product of the gated units is taken apart: two more of the inner width, and the
    gradient of the residual stream.
    """
    return _element(kind) * 2 * shape.inner + 4 * shape.width


def _element(kind: LayerKind) -> int:
    return 4 if kind == "float32" else 2


def saved_bytes(
    shape: ModelShape, tokens: int, kind: LayerKind, *, checkpointing: bool, lora_rank: int = 0
) -> int:
    """What lies in memory when the backward pass begins."""
    layer = layer_bytes(shape, kind, lora_rank=lora_rank)
    kept = 4 * shape.width if checkpointing else layer
    return tokens * (shape.layers * kept + outer_bytes(shape, lora_rank=lora_rank))


def backward_work_bytes(
    shape: ModelShape,
    tokens: int,
    given: MemoryCoefficients,
    kind: LayerKind,
    *,
    checkpointing: bool,
    lora_rank: int = 0,
) -> int:
    """The most that the backward pass of the policy adds to `saved_bytes`: at the head, or later.

    Gradients of weights are added to their sums and freed at once.
    """
    element = _element(kind)
    head = 0 if lora_rank else element * shape.head_parameters
    in_layer = tokens * (backward_bytes(shape, kind) - _behind_bytes(shape, lora_rank))
    if checkpointing:
        # The layer was computed again first; its input was kept.
        layer = layer_bytes(shape, kind, lora_rank=lora_rank)
        in_layer += tokens * (layer - 4 * shape.width)
    # A tied matrix waits for the gradient of the embedding, which comes last.
    in_layer += head if shape.is_tied else 0
    return max(_at_head(shape, tokens, given, element, trains_head=not lora_rank), in_layer)


def _at_head(
    shape: ModelShape, tokens: int, given: MemoryCoefficients, element: int, *, trains_head: bool
) -> int:
    """Gradients of hidden states and, in float32, of the head; beside them a chunk, or a copy.

    A chunk has float32 logits and their derivatives, beside those of the chunk before. The head's
    gradient is rounded in the end.
    """
    chunk = logits_per_chunk(shape, tokens, given)
    rounded = element * shape.head_parameters if trains_head and element == 2 else 0
    exact = 4 * shape.head_parameters if trains_head else 0
    beside = max((4 + 2 * element) * chunk, element * chunk + rounded)
    return tokens * 4 * shape.width + exact + beside


def logits_per_chunk(shape: ModelShape, tokens: int, given: MemoryCoefficients) -> int:
    """Logits that are computed at a time."""
    return min(given.logits_per_chunk, tokens * shape.vocabulary)


def _letters(shape: ModelShape) -> tuple[int, int, int, int, int]:
    return shape.width, shape.query_width, shape.key_width, shape.inner, shape.heads
