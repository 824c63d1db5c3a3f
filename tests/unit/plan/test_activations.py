"""The tables of kept tensors are what autograd really keeps."""

from __future__ import annotations

import pytest

from moored.plan.activations import (
    backward_bytes,
    backward_work_bytes,
    forward_bytes,
    layer_bytes,
    outer_bytes,
    prefill_bytes,
    saved_bytes,
)
from moored.plan.coefficients import MemoryCoefficients
from moored.plan.shapes import shape_from_config
from tests.unit.plan.tiny import tiny

TOKENS = 24
"""Unlike any width below, so that what has one entry for each token is known by its shape."""


def test_a_layer_of_a_tiny_model_by_hand():
    # Norms: inputs and normed, float32, twice 32 + 4; inputs of q, k and v 24, of gate and up 16;
    # q 8, k 4, v 4, out 8, two log-sum-exps 8; gate, SiLU, up and product 64.
    assert layer_bytes(tiny(), bf16=True) == 2 * (32 + 4) + 24 + 16 + 8 + 4 + 4 + 8 + 8 + 64
    # In float32 the three share one output of the norm: 2 x (48 + 4), q 16, k 8, v 8, out 16.
    assert layer_bytes(tiny(), bf16=False) == 2 * (48 + 4) + 16 + 8 + 8 + 16 + 8 + 128
    # Adapters of rank 3: no normed inputs (32 less), another input of the out product, 7 x 6.
    assert layer_bytes(tiny(), bf16=True, lora_rank=3) == 208 - 32 + 8 + 42


def test_what_lies_outside_of_the_layers_by_hand():
    # Ids 8, two angles for 2 numbers of a head 16, last norm 16 + 16 + 4, hidden states 16.
    assert outer_bytes(tiny()) == 8 + 16 + 36 + 16
    assert outer_bytes(tiny(), lora_rank=3) == 16 + 20 + 16


def test_passes_without_gradients_by_hand():
    assert forward_bytes(tiny(), bf16=True) == 16 + 16 + 8 + 3 * 16
    assert forward_bytes(tiny(), bf16=False) == 16 + 16 + 3 * 32
    assert prefill_bytes(tiny(), bf16=True) == 16 + 8 + 8 + 3 * 16
    assert backward_bytes(tiny(), bf16=True) == 2 * 16 + 16


def test_checkpointing_keeps_only_the_inputs_of_layers():
    assert saved_bytes(tiny(), 10, bf16=True, checkpointing=False) == 10 * (2 * 208 + 76)
    assert saved_bytes(tiny(), 10, bf16=True, checkpointing=True) == 10 * (2 * 16 + 76)


def test_the_backward_pass_needs_most_at_the_head_or_in_a_layer():
    def work(given, checkpointing=False, lora_rank=0, **changes):
        options = {"bf16": True, "checkpointing": checkpointing, "lora_rank": lora_rank}
        return backward_work_bytes(tiny(**changes), 10, given, **options)

    # 10 tokens, 30 of 100 logits at a time: 4 bytes, derivatives of 2 bytes twice; the gradient of
    # 40 weights of the head in float32, that of the hidden states.
    narrow = MemoryCoefficients(logits_per_chunk=30)
    assert work(narrow) == 8 * 30 + 4 * 40 + 10 * 16
    # With few logits at a time most is needed when the head's gradient is rounded.
    few = MemoryCoefficients(logits_per_chunk=10)
    assert work(few) == 2 * 10 + (4 + 2) * 40 + 10 * 16
    # No more than there are.
    wide = MemoryCoefficients(logits_per_chunk=1000)
    assert work(wide) == 8 * 100 + 4 * 40 + 10 * 16
    # Adapters: no gradient of the head.
    assert work(wide, lora_rank=3) == 8 * 100 + 10 * 16
    # A layer that is computed again keeps all but its input for a while, and needs 48 bytes; what
    # lay behind the layers (32 + 4 + 16) is gone. The tied head waits for the embedding.
    again = 10 * (208 - 16 + 48 - 52)
    assert work(narrow, checkpointing=True) == again + 2 * 40
    assert work(narrow, checkpointing=True, is_tied=False) == again


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
@pytest.mark.parametrize(("bf16", "rank"), [(True, 0), (True, 8), (False, 0)])
def test_autograd_keeps_what_the_tables_say(kind, bf16, rank):
    """One layer more keeps `layer_bytes` more; without layers, `outer_bytes` is left."""
    transformers = pytest.importorskip("transformers")
    options = {"head_dim": 32} if kind == "Qwen3Config" else {}
    configs = [
        getattr(transformers, kind)(
            vocab_size=50,
            hidden_size=64,
            intermediate_size=224,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=layers,
            **options,
        )
        for layers in (1, 2)
    ]
    one, two = (saved_for_backward(config, bf16, rank) for config in configs)
    shape = shape_from_config(configs[0].to_dict(), kind)
    assert two - one == TOKENS * layer_bytes(shape, bf16=bf16, lora_rank=rank)
    # The hidden states of the head are kept by the head itself.
    outer = outer_bytes(shape, lora_rank=rank) - 4 * shape.width
    assert 2 * one - two == TOKENS * outer


def saved_for_backward(config, bf16: bool, rank: int) -> int:
    """Bytes that autograd keeps in a pass over `TOKENS`, weights and their copies left out."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    use_bare_attention(model)
    if bf16:
        for weight in model.parameters():
            weight.data = weight.data.bfloat16() if weight.dim() > 1 else weight.data
        # The residual stream is float32.
        model.model.embed_tokens.register_forward_hook(lambda _, __, out: out.float())
    if rank:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, options).get_base_model()
        # As in training, where gradients flow through every layer.
        model.enable_input_require_grads()
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and TOKENS in tensor.shape:
            found[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 50, (1, TOKENS))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        model.model(
            input_ids=ids,
            attention_mask=torch.zeros(1, 1, 1, 1),
            position_ids=torch.arange(TOKENS)[None],
            use_cache=False,
        )
    return sum(storage.nbytes() for storage in found.values())


def use_bare_attention(model) -> None:
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
