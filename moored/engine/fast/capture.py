"""Recording work as a CUDA graph, and copies that the host does not wait for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

SHORT_SHARE = 0.1
"""Of the device's memory: with less of it free, a recording gives cached memory back first."""


def run_aside(compute: Callable[[], T]) -> T:
    """Compute on a stream of its own, where libraries set themselves up for a capture."""
    side = torch.cuda.Stream()
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


def pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Where a copy to the device does not wait; torch keeps the memory until it was read."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting."""
    return pinned(array, device).to(device, non_blocking=True)


class Fetch:
    """A copy to the host, enqueued behind the work of the present stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._done = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = tensor.clone()

    def wait(self) -> np.ndarray:
        """What was copied, once it is there; a view of pinned memory, to be copied or dropped."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy()
