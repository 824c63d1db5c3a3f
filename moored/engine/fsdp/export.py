"""A plain Hugging Face model with the weights of a sharded one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from moored.engine.lora import BASE


def plain_twin(
    model: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    keeps: bool = True,
) -> Any:
    """A model of the same shape with `weights`; without `keeps` they are only gathered.

    `model` is the Hugging Face model itself; gathering is a collective that all ranks take part in.
    """
    if not keeps:
        for _ in weights:
            pass
        return None
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    found = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in weights}
    twin.load_state_dict(found, strict=False, assign=True)
    twin.tie_weights()
    for name, buffer in model.named_buffers():
        owner, _, last = name.replace(BASE, ".").rpartition(".")
        twin.get_submodule(owner)._buffers[last] = buffer.detach().to(device, copy=True)
    return twin.requires_grad_(False).eval()
