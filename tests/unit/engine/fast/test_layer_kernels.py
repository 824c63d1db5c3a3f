"""Kernels of a training pass against autograd over the same operations in plain torch.

They run on a GPU, or without one under Triton's interpreter: TRITON_INTERPRET=1 pytest …
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)
from moored.engine.fast import layer_kernels as kernels
from moored.engine.fast import tree_attention as trees
from tests.unit.engine.fast.test_layers import KINDS, check_that_fused_layers_are_the_models_own

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("width", [5, 64, 300])
def test_norms_and_their_derivatives(width: int):
    x, weight, grad = some(7, width).requires_grad_(), some(width, seed=1).requires_grad_(), None
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    grad = some(7, width, seed=2)
    expected.backward(grad)
    out, scales = kernels.norm(x.detach(), weight.detach(), 1e-5, torch.float32)
    d_x, d_weight = kernels.norm_backward(grad, x.detach(), weight.detach(), scales)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_x, x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_weight, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [5, 64, 300])
def test_norms_of_sums_and_their_derivatives(width: int):
    x, delta = some(7, width).requires_grad_(), some(7, width, seed=3).requires_grad_()
    weight = some(width, seed=1).requires_grad_()
    d_total, grad = some(7, width, seed=4), some(7, width, seed=2)
    total = x + delta
    expected = weight * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5))
    torch.autograd.backward([expected, total], [grad, d_total])
    given = x.detach(), delta.detach(), weight.detach()
    found, out, scales = kernels.add_norm(*given, 1e-5, torch.float32)
    torch.testing.assert_close(found, total.detach())
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    d_x, d_delta, d_weight = kernels.add_norm_backward(
        grad, d_total, found, given[2], scales, torch.bfloat16
    )
    torch.testing.assert_close(d_x, x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_delta.float(), x.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(d_weight, weight.grad, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_weight_adds_up_over_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(kernels, "NORM_PROGRAMS", 3)
    x, weight, grad = some(8, 16).requires_grad_(), some(16, seed=1).requires_grad_(), some(8, 16)
    (weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))).backward(grad)
    _, scales = kernels.norm(x.detach(), weight.detach(), 1e-5, torch.float32)
    _, d_weight = kernels.norm_backward(grad, x.detach(), weight.detach(), scales)
    torch.testing.assert_close(d_weight, weight.grad, rtol=1e-4, atol=1e-5)


def test_gated_units_and_their_derivatives():
    gate, up = some(3, 700).requires_grad_(), some(3, 700, seed=1).requires_grad_()
    grad = some(3, 700, seed=2)
    expected = F.silu(gate) * up
    expected.backward(grad)
    torch.testing.assert_close(kernels.silu_mul(gate.detach(), up.detach()), expected.detach())
    d_gate, d_up = kernels.silu_mul_backward(grad, gate.detach(), up.detach())
    torch.testing.assert_close(d_gate, gate.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_up, up.grad, rtol=1e-4, atol=1e-5)


WIDTHS = [16, 48, 80, 96]
"""Of heads: powers of 2, and others that models have."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [(3, 1), (4, 4)])
def test_rotations_turn_halves_against_each_other_and_back(width: int, heads: tuple[int, int]):
    # More rows than a program takes.
    both = [some(70, count, width, seed=count) for count in heads]
    angles = some(70, width // 2, seed=1)
    cos, sin = (torch.cat([each, each], dim=-1) for each in (angles.cos(), angles.sin()))
    turned = kernels.rotate(both[0], both[1], cos, sin, 1.0)
    for x, found in zip(both, turned, strict=True):
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], dim=-1)
        torch.testing.assert_close(found, x * cos[:, None] + half * sin[:, None])
    for x, found in zip(both, kernels.rotate(*turned, cos, sin, -1.0), strict=True):
        torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_two_parts_merge_into_one_softmax(width: int):
    # More rows than a program takes.
    out, other = some(50, 3, width), some(50, 3, width, seed=1)
    lse, other_lse = some(3, 54), some(3, 50)
    lse[:, 5] = 40.0
    expected = out.clone(), lse.clone()
    trees._merge(expected[0], expected[1][:, 4:], other, other_lse)
    kernels.merge(out, lse[:, 4:], other, other_lse)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_kernels_have_the_outputs_and_gradients_of_the_model(kind: str):
    if DEVICE.type == "cuda":
        pytest.skip("the learner's tests compare gradients in bfloat16 there")
    check_that_fused_layers_are_the_models_own(kind)
