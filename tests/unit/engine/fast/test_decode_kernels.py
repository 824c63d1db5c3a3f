"""Products and attention of decoding steps against plain torch, as in `test_kernels`."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moored.engine.base import Request, SamplingParams
from moored.engine.fast.sampler import SlotSampler
from moored.engine.fast.tiles import Tile
from moored.types import Prompt
from tests.unit.engine.fast.test_samplers import VOCABULARY, tiny_model

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)
from moored.engine.fast import decode_kernels, kernels, wide_kernels

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE_DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
"""The interpreter multiplies bfloat16 in another way."""
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


WIDE = {
    "one": Tile(64, 32, 32, is_wide=True),
    "two blocks": Tile(64, 32, 32, is_wide=True, more_lines=16),
    "parts": Tile(64, 32, 32, parts=3, is_wide=True),
}


@pytest.mark.parametrize("tile", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("shape", [(5, 96, 128), (70, 200, 176)], ids=["even", "odd"])
def test_wide_products_are_those_of_plain_torch(tile, shape):
    x, weight, _ = factors(*shape)
    x, weight = x.to(WIDE_DTYPE), (weight / 8).to(WIDE_DTYPE)
    whole = F.linear(x.double(), weight.double())
    out = torch.full((tile.parts, len(x), len(weight)), torch.nan, device=DEVICE)
    wide_kernels.wide_linear(x, weight, out, tile)
    torch.testing.assert_close(out.sum(dim=0), whole.float(), atol=1e-4, rtol=1e-4)
    if tile.parts == 1:
        gate, up = whole.chunk(2, dim=-1)
        out = torch.full((len(x), len(weight) // 2), torch.nan, device=DEVICE)
        wide_kernels.wide_linear(x, weight, out, tile, gated=True)
        torch.testing.assert_close(out, (F.silu(gate) * up).float(), atol=1e-4, rtol=1e-4)


def small_tile(*_, gated=False, in_parts=False, copies=False) -> Tile:
    return Tile(16, 16, 32, parts=2 if in_parts else 1)


def small_wide_tile(*_, gated=False, in_parts=False, copies=False) -> Tile | None:
    if not (gated or in_parts):
        return None
    return Tile(64, 32, 32, parts=2 if in_parts else 1, is_wide=True, more_lines=16)


@pytest.mark.parametrize("tile_of", [small_tile, small_wide_tile])
@pytest.mark.parametrize("shape", ["grouped", "biased", "qwen2", "qwen3", "untied"])
def test_replies_written_with_own_products_equal_those_of_plain_torch(shape, tile_of, monkeypatch):
    if tile_of is small_wide_tile and shape == "biased":
        pytest.skip("wide products have no bias")
    monkeypatch.setattr(kernels, "tile_of", tile_of)
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
