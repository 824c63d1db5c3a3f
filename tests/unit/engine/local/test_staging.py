"""Gradients come to the host in order, and weights go back rounded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from moored.engine.local.staging import Staging  # noqa: E402


def devices():
    gpu = pytest.param("cuda", marks=pytest.mark.gpu)
    return pytest.mark.parametrize("device", ["cpu", gpu])


@devices()
def test_gradients_arrive_in_float32_and_in_order(device):
    weights = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in (3, 8, 5, 2)]
    gradients = [torch.full_like(w, i, dtype=torch.float32) for i, w in enumerate(weights)]
    arrived = [found.clone() for found in Staging(weights).fetch(gradients)]
    assert [found.tolist() for found in arrived] == [[0.0] * 3, [1.0] * 8, [2.0] * 5, [3.0] * 2]
    assert all(found.device.type == "cpu" and found.dtype == torch.float32 for found in arrived)


@devices()
def test_a_gradient_stays_while_the_next_one_is_on_its_way(device):
    weights = [torch.zeros(4, device=device) for _ in range(3)]
    gradients = [torch.full_like(w, i) for i, w in enumerate(weights)]
    fetched = Staging(weights).fetch(gradients)
    first = next(fetched)
    assert first.tolist() == [0.0] * 4
    second = next(fetched)
    assert second.tolist() == [1.0] * 4
    assert first.data_ptr() != second.data_ptr()


@devices()
def test_weights_are_rounded_to_the_precision_of_their_copies(device):
    used = [
        torch.zeros(2, dtype=torch.bfloat16, device=device),
        torch.zeros((1, 3), device=device),
        torch.zeros(1, dtype=torch.bfloat16, device=device),
    ]
    staging = Staging(used)
    # 1 + 2^-9 is nearest to 1 in bfloat16, which has 8 bits.
    masters = [torch.full(weight.shape, 1.0 + 2.0**-9) for weight in used]
    for weight, master in zip(used, masters, strict=True):
        staging.send(weight, master)
    staging.finish()
    assert [weight.flatten().tolist() for weight in used] == [
        [1.0, 1.0],
        [1.0 + 2.0**-9] * 3,
        [1.0],
    ]
