"""Attention over a line of prompts and continuations against plain masked attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from moored.engine.fast.tree_attention import attend_tree, use_tree_attention
from moored.engine.packing import Tree, micro_batches, pack, to_line, to_tensors
from moored.engine.passes import compute_layers_twice, hidden_states
from moored.types import Prompt
from tests.tiny_model import tiny_model

TREES = {
    "one": Tree((3,), ((4,),)),
    "equal": Tree((5, 2), ((6, 6, 6), (3, 3))),
    "unequal": Tree((5, 1, 7), ((6, 2, 1), (1,), tuple(range(19, 0, -1)))),
    "lone prompt": Tree((5, 4), ((2,), ())),
    "empty": Tree((3, 2), ((3,) * 8 + (0,), (0, 0))),
}


def who_sees_whom(tree: Tree) -> torch.Tensor:
    """(N, N) worked out token by token."""
    first = tree.num_prompt_tokens
    spans, at, begin = [], first, 0
    for length, members in zip(tree.prompts, tree.continuations, strict=True):
        prompt = range(begin, begin + length)
        spans += [(token, [*range(begin, token + 1)]) for token in prompt]
        for member in members:
            spans += [(t, [*prompt, *range(at, t + 1)]) for t in range(at, at + member)]
            at += member
        begin += length
    seen = torch.zeros(at, at, dtype=torch.bool)
    for token, others in spans:
        seen[token, others] = True
    return seen


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_outputs_and_gradients_equal_masked_attention(tree, kv_heads):
    torch.manual_seed(0)
    seen = who_sees_whom(tree)
    num = len(seen)
    shapes = (num, 4, 8), (num, kv_heads, 8), (num, kv_heads, 8)
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    upstream = torch.randn(num, 4, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(4 // kv_heads, dim=1).transpose(0, 1),
        v.repeat_interleave(4 // kv_heads, dim=1).transpose(0, 1),
        attn_mask=seen,
        scale=0.3,
    ).transpose(0, 1)
    found = attend_tree(q, k, v, tree, 0.3)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(found, expected)
    for ours, plain in zip(
        torch.autograd.grad(found, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_on_a_line_equals_the_model_on_masked_rows(kind, checkpointing):
    options: dict[str, Any] = {"sliding_window": None} if kind == "mistral" else {}
    model = tiny_model(kind, **options).double()
    assert use_tree_attention(model, model.device, bf16=False)
    if checkpointing:
        compute_layers_twice(model)
        model.train()
    rng = np.random.default_rng(0)
    prompts = [Prompt(rng.integers(0, 64, size=size)) for size in (9, 4)]
    lengths = [12, 3, 3, 1, 7, 7, 2]
    replies = [rng.integers(0, 64, size=length) for length in lengths]
    owners = [prompts[i % 2] for i in range(7)]
    found = {}
    for lay_out in (to_line, to_tensors):
        model.zero_grad()
        outputs = {}
        rows = pack(owners, lengths, max_tokens=40)
        for batch in micro_batches(rows, max_tokens=60, padded=lay_out is to_tensors):
            packed = lay_out(batch, replies, torch.device("cpu"))
            hidden = hidden_states(model.model, packed)
            (hidden**2).sum().backward()
            outputs |= dict(packed.split(hidden.detach().numpy()))
        grads = [p.grad.clone() for p in model.model.parameters()]
        found[lay_out] = [outputs[i] for i in range(7)], grads
    (line, line_grads), (rows, row_grads) = found.values()
    for ours, theirs in zip(line, rows, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for ours, theirs in zip(line_grads, row_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_models_with_other_attention_keep_their_own():
    gpt = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    )
    assert not use_tree_attention(gpt, gpt.device, bf16=False)
    windowed = tiny_model("mistral", sliding_window=8)
    assert not use_tree_attention(windowed, windowed.device, bf16=False)
    assert windowed.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("width", "fits"), [(80, True), (256, True), (100, False), (264, False)])
def test_on_a_gpu_head_widths_are_those_of_flash_attention(width, fits):
    model = tiny_model(head_dim=width)
    assert use_tree_attention(model, torch.device("cuda"), bf16=True) is fits


def test_others_who_use_the_model_see_no_difference():
    """Padding masks and cached stretches go through as before."""
    torch.manual_seed(0)
    model = tiny_model().double()
    ids = torch.randint(1, 64, (2, 6))
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])

    def uses() -> list[torch.Tensor]:
        with torch.no_grad():
            half = model(ids[:, :3], use_cache=True)
            rest = model(ids[:, 3:], past_key_values=half.past_key_values)
            return [model(ids, attention_mask=padded).logits[:, 2:], rest.logits]

    before = uses()
    assert use_tree_attention(model, model.device, bf16=False)
    for ours, theirs in zip(uses(), before, strict=True):
        torch.testing.assert_close(ours, theirs)
