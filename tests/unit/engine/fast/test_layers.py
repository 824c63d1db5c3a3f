"""Fused layers compute what the model's own do, whatever computes their parts."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moored.engine.fast import layers
from moored.engine.fast import tree_attention as trees
from moored.engine.packing import Tree
from moored.engine.passes import compute_layers_twice
from tests.tiny_model import tiny_model
from tests.unit.engine.fast.plain_kernels import use_plain_kernels

KINDS = ["llama", "qwen2", "qwen3"]
# A prompt of 5 tokens with continuations of 4 and 3.
TREE = Tree((5,), ((4, 3),))
PLACES = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7]]


def make_model(kind: str, **options: Any) -> Any:
    """Two layers with random weights; norms and biases would else be ones and zeros."""
    model = tiny_model(kind, head_dim=8, **options).eval()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn_like(weight)
    assert trees.use_tree_attention(model, model.device, bf16=False)
    return model


def fused_copy(model: Any) -> Any:
    copied = copy.deepcopy(model)
    layers.fuse_layers(copied)
    return copied


def pass_over_tree(model: Any) -> list[torch.Tensor]:
    """The last hidden states, and gradients of all weights below the head."""
    model.zero_grad()
    found = model.model(
        input_ids=torch.arange(12)[None] % 64,
        position_ids=torch.tensor(PLACES),
        attention_mask=torch.zeros(1, 1, 1, 1),
        use_cache=False,
        tree=TREE,
    ).last_hidden_state
    slopes = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * slopes).sum().backward()
    return [found.detach(), *(weight.grad for weight in model.model.parameters())]


def check_that_fused_layers_are_the_models_own(kind: str, **options: Any) -> None:
    """In float32: outputs and gradients over a tree, of copies too, and logits without one."""
    model = make_model(kind, **options)
    fused = fused_copy(model)
    expected = pass_over_tree(model)
    for each in (fused, copy.deepcopy(fused)):
        for mine, own in zip(pass_over_tree(each), expected, strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_have_the_outputs_and_gradients_of_the_model(kind: str):
    check_that_fused_layers_are_the_models_own(kind)


def test_fused_layers_keep_the_models_own_activation():
    check_that_fused_layers_are_the_models_own("llama", hidden_act="gelu")


def gradients(model: Any, inner: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Outputs over the tree, and gradients of all trained weights but the head."""
    found = pass_over_tree(SimpleNamespace(model=inner, zero_grad=model.zero_grad))[0]
    named = model.named_parameters()
    return found, {n: w.grad for n, w in named if w.requires_grad and "lm_head" not in n}


def check_same(mine: Any, own: Any) -> None:
    torch.testing.assert_close(mine[0], own[0], rtol=1e-4, atol=1e-5)
    assert mine[1].keys() == own[1].keys()
    for name, grad in own[1].items():
        assert (grad is None) == (mine[1][name] is None), name
        if grad is not None:
            # Small entries are what is left of large ones: they are as exact as the largest.
            largest = float(grad.abs().max())
            torch.testing.assert_close(mine[1][name], grad, rtol=1e-4, atol=1e-5 * max(1, largest))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_that_are_computed_twice_have_the_same_gradients(kind: str):
    model = make_model(kind)
    fused = fused_copy(model)
    compute_layers_twice(fused)
    fused.train()
    calls: list[int] = []
    fused.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    check_same(gradients(fused, fused.model), gradients(model, model.model))
    assert len(calls) == 2


@pytest.mark.parametrize("is_twice", [False, True])
def test_fused_layers_with_adapters_have_the_same_gradients(is_twice: bool):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make_model("qwen3"), options)
    fused = copy.deepcopy(model)
    layers.fuse_layers(fused)
    if is_twice:
        compute_layers_twice(fused.get_base_model())
        fused.train()
    inner = [each.get_base_model().model for each in (fused, model)]
    check_same(gradients(fused, inner[0]), gradients(model, inner[1]))


def test_what_layers_hand_on_is_no_view():
    # FSDP2 warns of those.
    seen: list[torch.Tensor] = []
    fused = fused_copy(make_model("llama"))
    fused.model.layers[0].register_forward_hook(lambda _, __, out: seen.extend(out))
    pass_over_tree(fused)
    assert len(seen) == 2 and not seen[0]._is_view()


def test_under_autocast_norms_hand_on_one_rounded_tensor(monkeypatch):
    fused = fused_copy(make_model("qwen3"))
    seen: list[torch.Tensor] = []
    attention = fused.model.layers[0].self_attn
    for product in (attention.q_proj, attention.k_proj, attention.v_proj):
        product.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    # The CPU's own attention over trees knows float32 only.
    monkeypatch.setattr(layers, "attend_tree", lambda q, k, v, *_: q + 0 * (k + v).sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass_over_tree(fused)
    assert [tensor.dtype for tensor in seen] == [torch.bfloat16] * 3
    assert len({tensor.data_ptr() for tensor in seen}) == 1
