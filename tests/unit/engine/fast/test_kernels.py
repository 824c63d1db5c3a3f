"""Triton kernels against the same operations in plain torch.

They run on a GPU, or without one under Triton's interpreter: TRITON_INTERPRET=1 pytest …
"""

from __future__ import annotations

import copy
import os
from dataclasses import fields

import pytest
import torch

from moored.engine.fast import plain_ops
from moored.engine.fast.rows import MAX_STOPS, Rows

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)
from moored.engine.fast import kernels

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAPACITY, SLOTS = 160, 9


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def some_rows(counts: torch.Tensor) -> Rows:
    """Four rows: two share a prefix, one has another, one has none."""
    slots, befores = numbers(3, 0, 4, 1), numbers(0, 50, 11, 20)
    prefix_lengths = numbers(70, 70, 9, 0)
    cells = [b + torch.arange(int(c)) for b, c in zip(befores, counts, strict=True)]
    return Rows(
        slots=slots,
        starts=(counts.cumsum(0) - counts).int(),
        counts=counts,
        befores=befores,
        prefix_slots=numbers(6, 6, 7, 1),
        prefix_lengths=prefix_lengths,
        max_count=int(counts.max()),
        token_slots=slots.repeat_interleave(counts),
        cells=torch.cat(cells).int(),
        offsets=prefix_lengths.repeat_interleave(counts),
    )


def on_device(rows: Rows) -> Rows:
    moved = copy.copy(rows)
    for field in fields(rows):
        value = getattr(rows, field.name)
        if isinstance(value, torch.Tensor):
            setattr(moved, field.name, value.to(DEVICE))
    return moved


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (3, 1, 70, 30)], ids=["one", "several"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 4, 32), (9, 3, 64), (6, 2, 16), (14, 2, 256)]
)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed"])
def test_attention_with_shared_prefixes_equals_plain_torch(
    counts, heads, kv_heads, width, has_norm
):
    torch.manual_seed(0)
    rows = some_rows(numbers(*counts))
    qkv = torch.randn(sum(counts), (heads + 2 * kv_heads) * width)
    keys, values = torch.randn(2, SLOTS, kv_heads, CAPACITY, width)
    angles = torch.arange(2 * CAPACITY)[:, None] * torch.rand(width // 2)
    tables = angles.cos(), angles.sin()
    norms = tuple(torch.rand(2, width)) if has_norm else None
    found = []
    for ops, device in ((plain_ops, "cpu"), (kernels, DEVICE)):
        here = on_device(rows) if ops is kernels else rows
        q, k, v = (t.clone().to(device) for t in (qkv, keys, values))
        t = tuple(table.to(device).contiguous() for table in tables)
        n = tuple(gain.to(device) for gain in norms) if norms else None
        out = torch.full((len(q), heads * width), torch.nan, device=device)
        here.plan = ops.plan(here, t)
        ops.attend(q, k, v, t, n, out, here, heads, 1e-6, width**-0.5)
        found.append([tensor.cpu() for tensor in (k, v, out)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-4)


def test_norms_of_sums_and_of_embeddings_equal_plain_torch():
    torch.manual_seed(0)
    x, delta, gain = torch.randn(7, 48), torch.randn(7, 48), torch.rand(48)
    ids = torch.tensor([3, 0, 6, 6, 1, 2, 5], dtype=torch.int32)
    found = []
    for ops, device in ((plain_ops, "cpu"), (kernels, DEVICE)):
        own = x.clone().to(device)
        normed = ops.add_norm(own, delta.to(device), gain.to(device), 1e-6, torch.empty_like(own))
        first = torch.empty_like(own)
        begun = ops.embed_norm(ids.to(device), delta.to(device), gain.to(device), 1e-6, first)
        found.append([tensor.cpu() for tensor in (own, normed, begun, first)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_a_norm_adds_the_parts_of_a_product_first():
    torch.manual_seed(0)
    x, gain, parts = torch.randn(7, 48), torch.rand(48), torch.randn(3, 7, 48)
    expected = plain_ops.add_norm(x.clone(), parts.sum(dim=0), gain, 1e-6, torch.empty(7, 48))
    own = x.clone().to(DEVICE)
    found = kernels.add_norm(own, parts.to(DEVICE), gain.to(DEVICE), 1e-6, torch.empty_like(own))
    torch.testing.assert_close(own.cpu(), x + parts.sum(dim=0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [50, 1000, 9000])
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.0])
def test_draws_equal_plain_torch(vocabulary, beta):
    torch.manual_seed(0)
    num_rows = 16
    logits = torch.randn(num_rows, vocabulary) * 3
    rows = torch.arange(num_rows)
    state = (
        rows * 977777777777 + 5,
        rows.flip(0).int(),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.full((num_rows,), 7, dtype=torch.int32),
        (rows % 3).int(),
        (rows % 4 != 1).int(),
    )
    stops = torch.arange(MAX_STOPS, dtype=torch.int32)
    max_tokens = torch.tensor([3], dtype=torch.int32)  # rows with two tokens so far stop
    found = []
    for ops, device in ((plain_ops, "cpu"), (kernels, DEVICE)):
        own = tuple(tensor.clone().to(device) for tensor in state)
        out = (
            torch.zeros(num_rows, 8, dtype=torch.int32, device=device),
            torch.zeros(num_rows, 8, device=device),
        )
        limits = torch.tensor([beta], device=device), stops.to(device), max_tokens.to(device)
        ops.draw(logits.to(device), *limits, own, out)
        found.append([tensor.cpu() for tensor in (*own, *out)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
