"""A plain Hugging Face model of the shape of a sharded one, without or with its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from moored.engine.lora import BASE


def empty_twin(model: Any, device: torch.device | None = None) -> Any:
    """A model of the same shape on the meta device, with copies of the buffers on `device`.

    `model` is the Hugging Face model itself, with or without adapters in it.
    """
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    for name, buffer in model.named_buffers():
        owner, _, last = name.replace(BASE, ".").rpartition(".")
        where = device or buffer.device
        twin.get_submodule(owner)._buffers[last] = buffer.detach().to(where, copy=True)
    return twin.requires_grad_(False).eval()


def plain_twin(
    model: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    keeps: bool = True,
) -> Any:
    """A model of the same shape with `weights`; without `keeps` they are only gathered.

    Gathering is a collective that all ranks take part in.
    """
    if not keeps:
        for _ in weights:
            pass
        return None
    twin = empty_twin(model, device)
    found = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in weights}
    twin.load_state_dict(found, strict=False, assign=True)
    twin.tie_weights()
    return twin
