"""Weights on their way to replicas: through Ray's object store, where numpy arrays are shared
without copies, or straight from the learner (`moored.engine.ray.circle`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Packed = dict[str, tuple[np.ndarray, str]]
"""By name: an array and "", or a tensor's bytes in its shape and the name of its type."""

SENDER = 0
"""The member of a meeting that has weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where a learner and replicas meet, and which of them this is."""

    address: tuple[str, int]
    circle: str
    """The name of a group that is kept while its members are the same."""
    round: int
    """Each meeting of a circle has another one."""
    size: int
    on_gpus: bool
    """Weights go from GPU to GPU."""
    member: int = SENDER


def pack_weights(weights: Iterable[tuple[str, torch.Tensor | np.ndarray]]) -> Packed:
    """Weights as arrays; numpy has no bfloat16, so a tensor travels as its bytes."""
    return {
        name: (weight, "") if isinstance(weight, np.ndarray) else _to_bytes(weight)
        for name, weight in weights
    }


def _to_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    import torch

    whole = tensor.detach().cpu().contiguous()
    raw = whole.reshape(-1).view(torch.uint8).numpy().reshape(*whole.shape, -1)
    return raw, str(whole.dtype).removeprefix("torch.")


def unpack_weights(packed: Packed) -> Iterator[tuple[str, Any]]:
    """The weights again; tensors are views of the packed bytes, to be read only."""
    for name, (array, kind) in packed.items():
        yield name, _to_tensor(array, kind) if kind else array


def _to_tensor(raw: np.ndarray, kind: str) -> torch.Tensor:
    import torch

    with warnings.catch_warnings():
        # torch warns of arrays that cannot be written to, as those of the object store.
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(raw)
    return tensor.view(getattr(torch, kind)).reshape(raw.shape[:-1])
