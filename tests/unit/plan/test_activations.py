"""The tables of kept tensors are what autograd really keeps."""

from __future__ import annotations

import pytest

from moored.models.shapes import shape_from_config, shape_of
from moored.plan import activations
from moored.plan.activations import (
    backward_work_bytes,
    forward_bytes,
    layer_bytes,
    prefill_bytes,
    saved_bytes,
)
from moored.plan.gpus import GIB
from moored.plan.setup import LayerKind
from tests.tiny_model import tiny_config
from tests.unit.plan.tiny import tiny

TOKENS = 23
"""Divides no width below, so that what has an entry for each token is known by its shape."""


def test_a_layer_of_a_tiny_model_by_hand():
    # Norms: inputs and normed, float32, twice 32 + 4; inputs of q, k and v 24, of gate and up 16;
    # q 8, k 4, v 4, out 8, two log-sum-exps 8; gate, SiLU, up and product 64.
    assert layer_bytes(tiny(), "bfloat16") == 2 * (32 + 4) + 24 + 16 + 8 + 4 + 4 + 8 + 8 + 64
    # In float32 the three share one output of the norm: 2 x (48 + 4), q 16, k 8, v 8, out 16.
    assert layer_bytes(tiny(), "float32") == 2 * (48 + 4) + 16 + 8 + 8 + 16 + 8 + 128
    # Adapters of rank 3: no normed inputs (32 less), and 7 inputs of 6 bytes.
    assert layer_bytes(tiny(), "bfloat16", rank=3) == 208 - 32 + 42


def test_a_fused_layer_of_a_tiny_model_by_hand():
    # Norms: inputs and roots 2 x (16 + 4), outputs 2 x 8; q 8, k 4, v 4, out 8, log-sum-exps 8;
    # gate, up and product 48.
    assert layer_bytes(tiny(), "fused") == 2 * 20 + 16 + 8 + 4 + 4 + 8 + 8 + 48
    # Inputs of the norms of queries and keys 8 + 4, and roots of 2 + 1 heads.
    assert layer_bytes(tiny(qk_norm="head"), "fused") == 136 + 12 + 3 * 4
    assert layer_bytes(tiny(), "fused", rank=3) == 136 + 42


def outer(shape, kind: LayerKind, rank: int) -> int:
    """What is kept for a token beside the layers."""
    saved = saved_bytes(shape, 1, kind, checkpointing=False, rank=rank)
    return saved - shape.layers * layer_bytes(shape, kind, rank)


def test_what_lies_outside_of_the_layers_by_hand():
    # Ids 8, two angles for 2 numbers of a head 16, last norm 16 + 16 + 4, hidden states 16.
    assert outer(tiny(), "fused", 0) == 8 + 16 + 36 + 16
    assert outer(tiny(), "fused", 3) == 16 + 20 + 16


def test_passes_without_gradients_by_hand():
    # Three float32 tensors of the stream, the normed one, three of the inner width, two angles;
    # fused layers also hold what the layer before left to be added.
    assert forward_bytes(tiny(), "fused") == 3 * 16 + 8 + 8 + 3 * 16 + 16
    assert forward_bytes(tiny(), "bfloat16") == 3 * 16 + 16 + 3 * 16 + 16
    assert forward_bytes(tiny(), "float32") == 3 * 16 + 16 + 3 * 32 + 16
    # Stream 16, input 8, q, k and v 8 + 4 + 4, mixed 8, output 8, three of the inner width.
    assert prefill_bytes(tiny(), bf16=True) == 16 + 8 + 16 + 8 + 8 + 3 * 16


def test_checkpointing_keeps_only_the_inputs_of_layers():
    assert saved_bytes(tiny(), 10, "bfloat16", checkpointing=False) == 10 * (2 * 208 + 76)
    assert saved_bytes(tiny(), 10, "bfloat16", checkpointing=True) == 10 * (2 * 16 + 76)


def test_the_backward_pass_needs_most_at_the_head_or_in_a_layer(monkeypatch):
    def work(logits, checkpointing=False, rank=0, **changes):
        monkeypatch.setattr(activations, "LOGITS_PER_CHUNK", logits)
        options = {"checkpointing": checkpointing, "rank": rank}
        return backward_work_bytes(tiny(**changes), 10, "bfloat16", **options)

    # 10 tokens, 30 of 100 logits at a time: 4 bytes, derivatives of 2 bytes twice; the gradient of
    # 40 weights of the head in float32, that of the hidden states.
    narrow = 30
    assert work(narrow) == 8 * 30 + 4 * 40 + 10 * 16
    # With few logits at a time most is needed when the head's gradient is rounded.
    assert work(10) == 2 * 10 + (4 + 2) * 40 + 10 * 16
    # No more than there are.
    wide = 1000
    assert work(wide) == 8 * 100 + 4 * 40 + 10 * 16
    # Adapters: no gradient of the head.
    assert work(wide, rank=3) == 8 * 100 + 10 * 16
    # A layer that is computed again keeps all but its input for a while, and needs 48 bytes; what
    # lay behind the layers (32 + 4 + 16) is gone. The tied head waits for the embedding.
    again = 10 * (208 - 16 + 48 - 52)
    assert work(narrow, checkpointing=True) == again + 2 * 40
    assert work(narrow, checkpointing=True, is_tied=False) == again


@pytest.mark.parametrize(
    ("model", "tokens", "kind", "measured_gib"),
    [
        ("Qwen/Qwen2.5-0.5B", 13_182, "fused", 23.98),
        ("Qwen/Qwen2.5-3B", 7_774, "fused", 80.90),
        ("Qwen/Qwen2.5-0.5B", 13_182, "bfloat16", 30.51),
        ("Qwen/Qwen2.5-3B", 7_774, "bfloat16", 93.90),
    ],
)
def test_updates_on_an_h200_are_within_1_percent_of_the_tables(model, tokens, kind, measured_gib):
    """benchmarks/results/sizes_h200.json; `tokens` are those of its largest micro-batch."""
    shape = shape_of(model)
    kept = saved_bytes(shape, tokens, kind, checkpointing=False)
    kept += backward_work_bytes(shape, tokens, kind, checkpointing=False)
    # Weights of 2 bytes, the optimiser's 12, gradients of 4.
    found = (18 * shape.num_parameters + kept) / GIB
    assert found == pytest.approx(measured_gib, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("kind", "rank"),
    [("fused", 0), ("fused", 8), ("bfloat16", 0), ("bfloat16", 8), ("float32", 0)],
)
def test_autograd_keeps_what_the_tables_say(family, kind, rank, monkeypatch):
    """One layer more keeps `layer_bytes` more; without layers, what is outside them is left."""
    pytest.importorskip("transformers")
    from tests.unit.engine.fast.plain_kernels import use_plain_kernels

    use_plain_kernels(monkeypatch)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 224}
    options = {"head_dim": 32} if family == "qwen3" else {}
    configs = [
        tiny_config(family, **sizes, num_hidden_layers=layers, tie_word_embeddings=False, **options)
        for layers in (1, 2)
    ]
    one, two = (saved_for_backward(config, kind, rank, monkeypatch) for config in configs)
    shape = shape_from_config(configs[0].to_dict(), family)
    assert two - one == TOKENS * layer_bytes(shape, kind, rank=rank)
    # The hidden states of the head are kept by the head itself.
    kept = outer(shape, kind, rank) - 4 * shape.width
    assert 2 * one - two == TOKENS * kept


def saved_for_backward(config, kind: LayerKind, rank: int, monkeypatch) -> int:
    """Bytes that autograd keeps in a pass over `TOKENS`, weights and their copies left out."""
    import torch
    import transformers

    from moored.engine.local.precision import compute_in_bfloat16

    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if rank:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options).get_base_model()
        # As in training, where gradients flow through every layer.
        model.enable_input_require_grads()
    use_bare_attention(model, monkeypatch, is_fused=kind == "fused")
    if kind != "float32":
        compute_in_bfloat16(model)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Norms of queries and keys have a row for each token and head.
        if storage.data_ptr() not in own and any(size % TOKENS == 0 for size in tensor.shape):
            found[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 50, (1, TOKENS))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind != "float32"),
    ):
        model.model(
            input_ids=ids,
            attention_mask=torch.zeros(1, 1, 1, 1),
            position_ids=torch.arange(TOKENS)[None],
            use_cache=False,
            tree=object(),
        )
    return sum(storage.nbytes() for storage in found.values())


def use_bare_attention(model, monkeypatch, *, is_fused: bool = False) -> None:
    """Attention that keeps what the engine's does on a GPU, and computes nothing."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, *grads):
            return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3])

    def attend(module, query, key, value, mask, scaling=None, **options):
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        return Bare.apply(q, k, v)[None], None  # pyright: ignore

    AttentionInterface.register("bare", attend)
    AttentionMaskInterface.register("bare", sdpa_mask)
    model.set_attn_implementation("bare")
    if is_fused:
        from moored.engine.fast import layers

        monkeypatch.setattr(layers, "attend_tree", lambda q, k, v, *_: Bare.apply(q, k, v))
        layers.fuse_layers(model)
