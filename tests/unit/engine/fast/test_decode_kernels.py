"""Products and attention of decoding steps against plain torch, as in `test_kernels`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from moored.engine.base import Request, SamplingParams
from moored.engine.fast.rows import Rows
from moored.engine.fast.sampler import SlotSampler
from moored.engine.fast.tiles import AttentionTile, Tile
from moored.types import Prompt
from tests.unit.engine.fast.test_samplers import VOCABULARY, tiny_model

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)
from moored.engine.fast import decode_kernels, hopper_attention, hopper_products, kernels

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(
    not decode_kernels.has_copy_engine(DEVICE), reason="for a GPU of the Hopper generation"
)
TILES = {
    "one": Tile(16, 32, 32),
    "wide": Tile(64, 16, 64),
    "parts": Tile(16, 16, 32, parts=3),
    "more parts than columns": Tile(16, 32, 64, parts=4),
}


def factors(num_rows: int, num_lines: int, num_columns: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (num_rows, num_columns), (num_lines, num_columns), (num_lines,)
    return [torch.randn(shape).to(DEVICE) for shape in shapes]


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", [(5, 48, 128), (33, 50, 176)], ids=["even", "odd"])
def test_parts_of_a_product_add_up_to_it(tile, shape):
    x, weight, bias = factors(*shape)
    out = torch.full((tile.parts, len(x), len(weight)), torch.nan, device=DEVICE)
    decode_kernels.linear(x, weight, bias, out, tile)
    expected = F.linear(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(out.sum(dim=0), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tile", [TILES["one"], TILES["wide"]], ids=["one", "wide"])
@pytest.mark.parametrize("shape", [(5, 96, 128), (33, 50, 176)], ids=["even", "odd"])
def test_a_product_is_gated_as_in_plain_torch(tile, shape):
    x, weight, _ = factors(*shape)
    weight = weight / 8
    out = torch.full((len(x), len(weight) // 2), torch.nan, device=DEVICE)
    decode_kernels.linear(x, weight, None, out, tile, gated=True)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    torch.testing.assert_close(out, (F.silu(gate) * up).float(), atol=1e-4, rtol=1e-4)


EARLY = {
    "one block": Tile(16, 64, 256, stages=1, is_early=True),
    "more blocks than stages": Tile(16, 64, 64, stages=2, is_early=True),
    "many rows": Tile(128, 128, 64, warps=8, stages=3, is_early=True),
    "parts": Tile(128, 64, 64, parts=2, stages=2, is_early=True),
    "more parts than columns": Tile(16, 64, 64, parts=4, stages=1, is_early=True),
}


@needs_hopper
@pytest.mark.parametrize("tile", EARLY.values(), ids=EARLY)
@pytest.mark.parametrize("shape", [(5, 96, 128), (16, 200, 176)], ids=["even", "odd"])
def test_early_products_are_those_of_plain_torch(tile, shape):
    x, weight, bias = (factor.bfloat16() for factor in factors(*shape))
    whole = F.linear(x.double(), weight.double(), bias.double())
    out = torch.full((tile.parts, len(x), len(weight)), torch.nan, device=DEVICE)
    hopper_products.product(x, weight, bias, out, tile)
    torch.testing.assert_close(out.sum(dim=0), whole.float(), atol=1e-4, rtol=1e-4)
    if tile.parts == 1:
        weight = weight / 8
        gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
        out = torch.full((len(x), len(weight) // 2), torch.nan, device=DEVICE)
        hopper_products.product(x, weight, None, out, tile, gated=True)
        torch.testing.assert_close(out, (F.silu(gate) * up).float(), atol=1e-4, rtol=1e-4)


EARLY_ATTENTION = {
    "one": AttentionTile(64, 4, stages=2, is_early=True),
    "one warp": AttentionTile(32, 1, stages=6, is_early=True),
    "large tiles": AttentionTile(128, 4, is_early=True),
    "shared": AttentionTile(64, 4, splits=3, is_early=True),
    "shared by many": AttentionTile(64, 4, splits=8, is_early=True),
}


@needs_hopper
@pytest.mark.parametrize("tile", EARLY_ATTENTION.values(), ids=EARLY_ATTENTION)
@pytest.mark.parametrize(("width", "group"), [(64, 7), (128, 8), (128, 16)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_early_attention_is_that_of_plain_steps(tile, width, group, has_norm):
    """Of rows with and without a prefix, whose cells fill tiles, more than them, or none."""
    torch.manual_seed(0)
    befores, prefixes = [0, 1, 64, 130, 300, 3], [0, 128, 0, 37, 64, 1]
    num_rows, kv_heads, capacity = len(befores), 2, 320
    heads = group * kv_heads

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def random(*shape) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    own = ints(range(num_rows))
    rows = Rows(
        slots=own + 1,
        starts=own,
        counts=torch.ones_like(own),
        befores=ints(befores),
        prefix_slots=own * 0,
        prefix_lengths=ints(prefixes),
        max_count=1,
        token_slots=own + 1,
        cells=ints(befores),
        offsets=ints(prefixes),
    )
    angles = random(2 * capacity, width // 2)
    tables = angles.cos(), angles.sin()
    norms = (random(width), random(width)) if has_norm else None
    cache = random(2, num_rows + 1, kv_heads, capacity, width).bfloat16()
    qkv = random(num_rows, (heads + 2 * kv_heads) * width).bfloat16()
    found = []
    halves = torch.stack([qkv.float() / 2] * 2)
    for attend_one, given, its_tile in (
        (decode_kernels.attend_one, qkv, AttentionTile(32, 1)),
        (hopper_attention.attend_one, qkv, tile),
        (hopper_attention.attend_one, halves, tile),
    ):
        keys, values = cache.clone()
        out = torch.full((num_rows, heads * width), torch.nan, device=DEVICE).bfloat16()
        rest = tables, norms, out, rows, heads, 1e-6, width**-0.5, its_tile
        for _ in range(2):  # what the first call leaves behind is ready for the second
            attend_one(given, keys, values, *rest)
        found.append((out.float(), keys, values))
    for out, keys, values in found[1:]:
        torch.testing.assert_close(out, found[0][0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(keys, found[0][1], atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(values, found[0][2], atol=0, rtol=0)


@needs_hopper
@pytest.mark.parametrize("num_rows", [3, 40, 100])
def test_early_steps_give_the_log_probabilities_of_plain_torch(num_rows):
    """A small Qwen2 with heads of 64, whose steps go through products and attention of Hopper."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config)
    model = model.to(DEVICE, torch.bfloat16).eval()
    sampler = SlotSampler(model, dtype=torch.bfloat16, max_context=256)
    rng, params = np.random.default_rng(0), SamplingParams(max_tokens=12)
    prompts = [rng.integers(3, VOCABULARY, size=n) for n in rng.integers(1, 200, num_rows - 2)]
    prompts += [prompts[0]] * 2
    requests = [Request(session=i, prompt=Prompt(p), seed=i) for i, p in enumerate(prompts)]
    whole = model.float()
    for prompt, reply in zip(prompts, sampler.generate(requests, params), strict=True):
        ids = torch.tensor(np.concatenate([prompt, reply.token_ids]), device=DEVICE)[None]
        with torch.no_grad():
            logps = whole(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        expected = logps.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        np.testing.assert_allclose(reply.logprobs, expected, atol=0.05)


def small_tile(*_, gated=False, most_parts=1, copies=False) -> Tile:
    return Tile(16, 16, 32, parts=2 if most_parts > 1 else 1)


@pytest.mark.parametrize("shape", ["grouped", "biased", "qwen2", "qwen3", "untied"])
def test_replies_written_with_own_products_equal_those_of_plain_torch(shape, monkeypatch):
    monkeypatch.setattr(kernels, "tile_of", small_tile)
    rng, params = np.random.default_rng(0), SamplingParams(max_tokens=5, temperature=0.7)
    shared = rng.integers(3, VOCABULARY, size=21)
    prompts = [rng.integers(3, VOCABULARY, size=n) for n in (3, 40)] + [shared] * 4
    requests = [Request(session=i, prompt=Prompt(p), seed=i) for i, p in enumerate(prompts)]
    samplers = []
    for device in ("cpu", DEVICE):
        model = tiny_model(shape).to(device)
        samplers.append(SlotSampler(model, dtype=torch.float32, max_context=64))
    samplers[1].decoder.ops = kernels
    for plain, ours in zip(*(s.generate(requests, params) for s in samplers), strict=True):
        np.testing.assert_array_equal(ours.token_ids, plain.token_ids)
        np.testing.assert_allclose(ours.logprobs, plain.logprobs, atol=1e-4)
