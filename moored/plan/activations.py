"""What a micro-batch keeps in memory, counted tensor by tensor.

The layers are those of transformers (Llama, Qwen) over `engine/fast/tree_attention.py`, or the
fused ones of `engine/fast/layers.py`; tests compare with what autograd really saves. The residual
stream is float32. w width, q queries, k keys (of all heads), i inner width, h heads, r LoRA's rank.
"""

from __future__ import annotations

from moored.models.shapes import ModelShape
from moored.plan.setup import LayerKind

LOGITS_PER_CHUNK = 1 << 28
"""`LOGITS_PER_CHUNK["cuda"]` of engine/passes.py."""


def layer_bytes(shape: ModelShape, kind: LayerKind, rank: int = 0) -> int:
    """For one token, what autograd keeps of one layer until its backward pass.

    Inputs and inverse roots of two norms; rotated queries, keys, values; outputs of attention and
    log-sum-exps; parts of the gated units. Fused kernels compute normed inputs and SiLUs again.
    Under autocast every linear layer keeps a bfloat16 copy of its input.
    """
    w, q, k, i, h = _letters(shape)
    has_norms = shape.qk_norm != "none"
    if kind == "fused":
        norms = 2 * q + 2 * k + 4 * (h + shape.kv_heads) if has_norms else 0
        return 12 * w + 8 + norms + 4 * q + 4 * k + 4 * h + 6 * i + 14 * rank
    element = 2 if kind == "bfloat16" else 4
    # Normed inputs are kept for the gradient of a norm's weight, which LoRA does not train.
    one = 4 + (0 if rank else element)
    roots = h + shape.kv_heads if shape.qk_norm == "head" else 2
    norms = one * (q + k) + 4 * roots if has_norms else 0
    norms += (shape.norms_per_layer - 2) * (one * w + 4)
    if kind == "bfloat16":
        normed = 0 if rank else 8 * w
        return 18 * w + normed + 8 + norms + 4 * q + 4 * k + 4 * h + 8 * i + 14 * rank
    return 24 * w + 8 + norms + 8 * q + 8 * k + 4 * h + 16 * i


def _behind_bytes(shape: ModelShape, rank: int) -> int:
    """Input, inverse root and normed input of the last norm, and hidden states, for the head."""
    return (8 if rank else 12) * shape.width + 4


def saved_bytes(
    shape: ModelShape, tokens: int, kind: LayerKind, *, checkpointing: bool, rank: int = 0
) -> int:
    """What lies in memory when the backward pass begins: with ids, and angles of all layers."""
    kept = 4 * shape.width if checkpointing else layer_bytes(shape, kind, rank)
    outer = _behind_bytes(shape, rank) + (0 if rank else 8) + 8 * shape.head_width
    return tokens * (shape.layers * kept + outer)


def forward_bytes(shape: ModelShape, kind: LayerKind) -> int:
    """For one token, the most that a pass without gradients holds at a time: in the gated units.

    Embeddings, input of the layer (fused: and what it still had to add), stream; input of the
    units; gate or its SiLU, up, and their product; the angles.
    """
    element = 4 if kind == "float32" else 2
    return 16 * shape.width + 3 * element * shape.inner + 8 * shape.head_width


def prefill_bytes(shape: ModelShape, *, bf16: bool) -> int:
    """For one token, the same in `Decoder.forward` of the fast sampler: when gate and up are made.

    Stream (float32); input; queries, keys and values; mixed values; output of the layer before;
    gate, up and their product.
    """
    w, q, k, i, _ = _letters(shape)
    return 4 * w + (2 if bf16 else 4) * (2 * w + 2 * q + 2 * k + 3 * i)


def backward_work_bytes(
    shape: ModelShape, tokens: int, kind: LayerKind, *, checkpointing: bool, rank: int = 0
) -> int:
    """The most that the backward pass adds to `saved_bytes`: at the head, or in a layer.

    In a layer most when the product of the gated units is taken apart. Gradients of weights are
    added to their sums and freed at once.
    """
    element = 4 if kind == "float32" else 2
    head = 0 if rank else shape.head_parameters
    in_layer = 2 * element * shape.inner + 4 * shape.width - _behind_bytes(shape, rank)
    if checkpointing:
        # The layer was computed again first; its input was kept.
        in_layer += layer_bytes(shape, kind, rank) - 4 * shape.width
    # A tied matrix waits for the gradient of the embedding, which comes last.
    later = tokens * in_layer + (element * head if shape.is_tied else 0)
    # At the head: float32 logits of a chunk and their derivatives, beside those of the chunk
    # before; the gradient of the head in float32, and rounded in the end; that of hidden states.
    chunk = logits_per_chunk(shape, tokens)
    rounded = element * head if element == 2 else 0
    beside = max((4 + 2 * element) * chunk, element * chunk + rounded)
    return max(tokens * 4 * shape.width + 4 * head + beside, later)


def logits_per_chunk(shape: ModelShape, tokens: int) -> int:
    """Logits that are computed at a time."""
    return min(LOGITS_PER_CHUNK, tokens * shape.vocabulary)


def _letters(shape: ModelShape) -> tuple[int, int, int, int, int]:
    return shape.width, shape.query_width, shape.key_width, shape.inner, shape.heads
