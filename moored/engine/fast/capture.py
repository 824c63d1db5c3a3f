"""Recording work as a CUDA graph, and copies that the host does not wait for."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from moored.engine.fast.buckets import power_bucket

T = TypeVar("T")

SHORT_SHARE = 0.1
"""Of the device's memory: with less of it free, a recording gives cached memory back first."""
MIN_BUFFER_BYTES = 4096


def run_aside(compute: Callable[[], T]) -> T:
    """Compute on the stream of recordings, where libraries set themselves up for a capture.

    Always on the same one: torch caches memory for each stream, and would keep that of all.
    """
    side = _recording_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = compute()
    torch.cuda.current_stream().wait_stream(side)
    return found


def capture(compute: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record without computing; the result is where every replay will write.

    `torch.cuda.graph` would give all cached memory back first, that of the host too, and everything
    after it would wait for new memory: here that is done only when memory is short.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < SHORT_SHARE * total:
        torch.cuda.empty_cache()
    # Memory of a pool belongs to a stream: one for all recordings, so that they can share it.
    with _no_collection(), torch.cuda.stream(_recording_stream(torch.cuda.current_device())):
        graph.capture_begin(pool)
        try:
            found = compute()
        finally:
            graph.capture_end()
    return graph, found


@cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out: freeing an old graph would end a recording under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class HostBuffers:
    """Pinned memory of the host for copies from and to a device, which then wait for nothing.

    Buffers are used in turn, and each is kept: to allocate pinned memory takes longer than most
    copies. On a CPU they are ordinary memory.
    """

    def __init__(self, device: torch.device, num_buffers: int = 2) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(num_buffers)]
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._turn = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that holds until it is given out again, `num_buffers` calls later."""
        self._turn = (self._turn + 1) % len(self._buffers)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._buffers[self._turn].nbytes < num_bytes:
            size = power_bucket(num_bytes, MIN_BUFFER_BYTES, 2)
            is_pinned = self._device.type == "cuda"
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._buffers[self._turn][:num_bytes].view(dtype).view(*shape)

    def copy(self, into: torch.Tensor, given: torch.Tensor) -> torch.cuda.Event | None:
        """Enqueue a copy from or to the memory taken last; says when it is done, None: now."""
        into.copy_(given, non_blocking=True)
        if self._device.type != "cuda":
            return None
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        self._copied[self._turn] = copied
        return copied

    def send(self, array: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy an array, which may be changed at once, to a tensor of its type on the device."""
        given = torch.from_numpy(array)
        if into is None:
            into = torch.empty(given.shape, dtype=given.dtype, device=self._device)
        self.copy(into, self.take(given.shape, given.dtype).copy_(given))
        return into


class Fetch:
    """A copy to the host, enqueued behind the work of the present stream."""

    def __init__(self, tensor: torch.Tensor, buffers: HostBuffers) -> None:
        self._host = buffers.take(tensor.shape, tensor.dtype)
        self._copied = buffers.copy(self._host, tensor)

    @property
    def is_done(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> np.ndarray:
        """What was copied, once it is there: a view of memory that a later copy overwrites."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()
