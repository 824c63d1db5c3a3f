"""Recording work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def run_aside(compute: Callable[[], T]) -> T:
    """Compute on a stream of its own, where libraries set themselves up for a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = compute()
    torch.cuda.current_stream().wait_stream(side)
    return found


def capture(compute: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record without computing; the result is where every replay will write."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = compute()
    return graph, found
