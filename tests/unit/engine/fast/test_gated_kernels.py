"""Gated units in one kernel against plain torch.

On a GPU of the Hopper generation, or without one under Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)
from moored.engine.fast import gated_kernels, kernels
from moored.engine.fast.tiles import MANY_ROWS, GatedTile

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
if torch.cuda.is_available() and not HAS_HOPPER:
    pytest.skip("for a GPU of the Hopper generation", allow_module_level=True)
pytestmark = [pytest.mark.gpu] if HAS_HOPPER else []
# The interpreter cannot multiply bfloat16.
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_HOPPER else ("cpu", torch.float32)
TILE = GatedTile() if HAS_HOPPER else GatedTile(rows=16, lines=16, columns=16, together=2)


@pytest.mark.parametrize(
    ("rows", "lines", "columns"), [(64, 32, 32), (70, 24, 40), (16, 8, 8), (5000, 264, 72)], ids=str
)
def test_gated_units_equal_plain_torch(monkeypatch, rows, lines, columns):
    if not HAS_HOPPER:
        rows = min(rows, 100)
        few = SimpleNamespace(multi_processor_count=3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: few)
    torch.manual_seed(0)
    x, gate, up = (
        torch.randn(size, columns, device=DEVICE).to(DTYPE) for size in (rows, lines, lines)
    )
    found = gated_kernels.gated_product(x, gate, up, TILE)
    expected = F.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
    assert found.shape == expected.shape and found.dtype == DTYPE
    error = (found.float() - expected).norm() / expected.norm()
    assert error < (5e-3 if HAS_HOPPER else 1e-5)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1])
def test_a_layer_gives_the_same_on_both_sides_of_the_bound(rows):
    torch.manual_seed(0)
    y, gate_up = torch.randn(rows, 64, device=DEVICE), torch.randn(2 * 96, 64, device=DEVICE)
    found = kernels._gated(y.to(DTYPE), gate_up.to(DTYPE))
    made = F.linear(y.to(DTYPE).float(), gate_up.to(DTYPE).float())
    expected = F.silu(made[:, :96]) * made[:, 96:]
    assert (found.float() - expected).norm() / expected.norm() < 1e-2
