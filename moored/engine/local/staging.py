"""Copies between a GPU and states in main memory, made while the processor computes.

A GPU copies by itself, and at full speed, from and to pinned memory. There are two such buffers
each way: one is copied while the other is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

Copy = Callable[[], None]
"""Waits until a copy is made."""


class Staging:
    """Brings gradients of weights to the host, and weights back."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        device = weights[0].device
        most = max(weight.numel() for weight in weights)
        widest = max(weight.numel() * weight.element_size() for weight in weights)
        self._down = _Lane(4 * most, device)
        self._up = _Lane(widest, device)

    def fetch(self, gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Each gradient in main memory, in float32, valid until the next one is asked for."""
        ahead: deque[tuple[torch.Tensor, Copy]] = deque()
        for gradient in gradients:
            buffer = self._down.buffer(gradient, torch.float32)
            ahead.append((buffer, self._down.copy(buffer, gradient)))
            if len(ahead) == 2:
                yield _arrived(*ahead.popleft())
        while ahead:
            yield _arrived(*ahead.popleft())

    def send(self, used: torch.Tensor, master: torch.Tensor) -> None:
        """Round a weight to the precision of its copy on the GPU, and copy it there."""
        rounded = self._up.buffer(used, used.dtype)
        self._up.copy(used, rounded.copy_(master))

    def finish(self) -> None:
        """Wait until all weights that were sent are there."""
        self._up.finish()


class _Lane:
    """Two buffers that take turns, for copies in one direction."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)
        ]
        self._copies: list[Copy] = [_nothing, _nothing]
        self._turn = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_gpu else None

    def buffer(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The buffer whose turn it is, once its last copy is made."""
        self._turn = 1 - self._turn
        self._copies[self._turn]()
        num_bytes = like.numel() * dtype.itemsize
        return self._buffers[self._turn][:num_bytes].view(dtype).view(like.shape)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Copy:
        """Begin to copy from or to the buffer whose turn it is."""
        if self._stream is None:
            into.copy_(source)
            return _nothing
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            made = self._stream.record_event().synchronize
        self._copies[self._turn] = made
        return made

    def finish(self) -> None:
        for made in self._copies:
            made()


def _arrived(buffer: torch.Tensor, made: Copy) -> torch.Tensor:
    made()
    return buffer


def _nothing() -> None:
    """Copies within main memory are made at once."""
