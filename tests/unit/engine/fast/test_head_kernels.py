"""Kernels of the head against the same operations in plain torch.

They run on a GPU, or without one under Triton's interpreter: TRITON_INTERPRET=1 pytest …
"""

from __future__ import annotations

import os

import pytest
import torch

from moored.engine import passes

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1", allow_module_level=True)
from moored.engine.fast import head_kernels

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some_logits(vocabulary: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 6.0 * torch.randn(rows, vocabulary, generator=generator)
    logits[:1] += 300.0  # far from 0: exponents must be taken against the largest
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    return logits.to(DEVICE), targets.to(DEVICE)


@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_one_pass_finds_what_several_do(vocabulary: int, beta: float):
    logits, targets = some_logits(vocabulary)
    ours = head_kernels.summarize(logits, targets, beta)
    exact = passes._summarize(logits.double(), targets, beta, with_entropy=True)
    for found, expected in zip(ours, exact, strict=True):
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
@pytest.mark.parametrize("given", ["both", "logp", "entropy"])
def test_derivatives_equal_the_written_out_ones(vocabulary: int, given: str):
    logits, targets = some_logits(vocabulary)
    log_z, _, entropy = passes._summarize(logits.clone(), targets, 0.7, with_entropy=True)
    assert isinstance(entropy, torch.Tensor)
    to_logp, to_entropy = torch.linspace(-1, 2, 5), torch.linspace(3, -1, 5)
    grads = (
        to_logp.to(DEVICE) if given != "entropy" else None,
        to_entropy.to(DEVICE) if given != "logp" else None,
    )
    arguments = targets, 0.7, log_z, entropy, *grads, torch.float32
    ours = head_kernels.slopes(logits, *arguments)
    plain = passes._slopes(logits.clone(), *arguments)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_no_rows_are_no_work():
    logits, targets = some_logits(64, rows=0)
    assert head_kernels.summarize(logits, targets, 1.0)[0].shape == (0,)
