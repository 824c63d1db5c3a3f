"""A model that waits in main memory, and is on its GPU only while it computes.

Of models of a billion parameters and more, a GPU has what a phase of a step needs and nothing else:
the sampler lends the memory of its cache to updates, and a reference model, which scores once in a
step, is brought for that and forgotten again. Its weights are one piece of memory on either side.
That is one copy at full speed, and what is given back is large enough for whatever comes next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from moored.training.samples import LossSample, Sample

ReferenceOf = Callable[[Sequence[Sample]], list[np.ndarray]]
"""Log-probabilities of samples under the reference model."""

logger = logging.getLogger(__name__)
RELEASED_FROM = 1_000_000_000
"""Parameters of the smallest model that leaves the GPU what it does not need at the moment."""
ALIGNMENT = 512
"""Bytes: every weight begins at a multiple, as those do that torch allocates one by one."""


def is_large(model: nn.Module) -> bool:
    """Whether its updates need memory that others leave them."""
    return sum(weight.numel() for weight in model.parameters()) >= RELEASED_FROM


class Parked:
    """The weights of a module, in main memory except inside `on_device`.

    They do not change there: what a block writes to them is lost. Buffers stay where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = list(module.parameters())
        self._device = self._weights[0].device
        self._offsets, end = [], 0
        for weight in self._weights:
            self._offsets.append(end)
            end += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
        self._host = _pinned(end, self._device)
        self._is_here = False
        for weight, place in zip(self._weights, self._places(self._host), strict=True):
            place.copy_(weight.data)
        self._point_at(self._host)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights where the module computes; blocks may be inside one another."""
        if self._is_here:
            yield
            return
        # Copied in the order of the device's work: what is read waits for it, and what comes into
        # this memory afterwards waits for what reads it.
        self._point_at(self._host.to(self._device, non_blocking=True, copy=True))
        self._is_here = True
        try:
            yield
        finally:
            self._point_at(self._host)
            self._is_here = False

    def _point_at(self, memory: torch.Tensor) -> None:
        for weight, place in zip(self._weights, self._places(memory), strict=True):
            weight.data = place

    def _places(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each weight in a piece of memory."""
        for weight, start in zip(self._weights, self._offsets, strict=True):
            yield memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)


def ahead(score: ReferenceOf, minibatches: Iterable[Sequence[LossSample]]) -> ReferenceOf:
    """As `score`, of the samples of all minibatches, each of which is scored once and now."""
    samples = {id(given.sample): given.sample for part in minibatches for given in part}
    scored = score(list(samples.values())) if samples else []
    found = dict(zip(samples, scored, strict=True))
    return lambda own: [found[id(sample)] for sample in own]


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Main memory that a GPU copies from by itself, and at full speed."""
    if device.type == "cuda":
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            logger.info("the system does not pin %d bytes, so copies of them are slower", num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8)
