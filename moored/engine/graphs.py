"""Forward and backward passes of micro-batches as CUDA graphs: one launch in place of thousands.

A graph is recorded for each shape of a padded batch. It reads its batch from fixed tensors and adds
to fixed gradients, so that a replay needs nothing of the host but the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moored.batch import Packed, Tree
from moored.engine.loss_batch import LossBatch, Shape, pad
from moored.engine.tree_attention import Bounds, bounds_of

Losses = Callable[[LossBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""The loss of a micro-batch, and what to log of it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: LossBatch
    """What it reads, on the device."""
    parts: Mapping[str, torch.Tensor]
    """What it writes besides gradients; the next replay of any graph may overwrite it."""


class Graphs:
    """Adds gradients of micro-batches to those of `weights`."""

    def __init__(self, losses: Losses, weights: Sequence[torch.nn.Parameter]) -> None:
        self._losses = losses
        self._weights = weights
        self._grads = [torch.zeros_like(weight) for weight in weights]
        self._recordings: dict[Shape, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_recorded(self) -> int:
        return len(self._recordings)

    def add_gradients(self, batch: LossBatch) -> Mapping[str, torch.Tensor]:
        """Of one micro-batch, which lies on the host; what to log of it comes back."""
        for weight, grad in zip(self._weights, self._grads, strict=True):
            weight.grad = grad
        padded, shape = pad(batch)
        padded = _with_bounds(padded, shape)
        if shape not in self._recordings:
            self._recordings[shape] = self._record(padded)
        found = self._recordings[shape]
        for into, given in zip(_tensors(found.batch), _tensors(padded), strict=True):
            into.copy_(given)
        found.graph.replay()
        return found.parts

    def _record(self, padded: LossBatch) -> _Recording:
        device = self._weights[0].device
        batch = _on_device(padded, device)
        with torch.cuda.device(device):
            # Once before, since libraries set themselves up at first use.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._gradients(batch)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                grads, parts = self._gradients(batch)
                torch._foreach_add_(self._grads, grads)  # pyright: ignore[reportPrivateImportUsage]
        return _Recording(graph, batch, parts)

    def _gradients(
        self, batch: LossBatch
    ) -> tuple[tuple[torch.Tensor, ...], Mapping[str, torch.Tensor]]:
        loss, parts = self._losses(batch)
        return torch.autograd.grad(loss, self._weights, materialize_grads=True), parts


def _with_bounds(padded: LossBatch, shape: Shape) -> LossBatch:
    """The tree by its bounds alone, which are tensors of the shape's size."""
    tree = padded.packed.tree
    assert tree is not None
    exact = bounds_of(tree, torch.device("cpu"))
    bounds = Bounds(
        stretches=_repeat_last(exact.stretches, shape.num_stretches + 1),
        prompts=_repeat_last(exact.prompts, shape.num_prompts + 1),
        continuations=_repeat_last(exact.continuations, shape.num_prompts + 1),
        longest_stretch=shape.longest,
        longest_prompt=shape.prompt_tokens,
        longest_continuations=shape.continuation_tokens,
    )
    sizes = (shape.prompt_tokens,), ((shape.continuation_tokens,),)
    return replace(padded, packed=replace(padded.packed, tree=Tree(*sizes, {"bounds": bounds})))


def _repeat_last(sums: torch.Tensor, size: int) -> torch.Tensor:
    """Running sums that end with stretches of no tokens."""
    return torch.cat([sums, sums[-1:].expand(size - len(sums))])


def _on_device(batch: LossBatch, device: torch.device) -> LossBatch:
    packed, tree = batch.packed, batch.packed.tree
    assert tree is not None
    bounds = tree.prepared["bounds"]
    on_device = replace(bounds, **{name: getattr(bounds, name).to(device) for name in SUMS})
    moved = {name: getattr(packed, name).to(device) for name in LINES}
    tree = Tree(tree.prompts, tree.continuations, {"bounds": on_device})
    streams = {name: tensor.to(device) for name, tensor in batch.streams().items()}
    return replace(batch, packed=replace(packed, **moved, tree=tree), **streams)


LINES = ("input_ids", "position_ids", "sources", "targets")
SUMS = ("stretches", "prompts", "continuations")


def _tensors(batch: LossBatch) -> Iterator[torch.Tensor]:
    packed: Packed = batch.packed
    assert packed.tree is not None
    yield from (getattr(packed, name) for name in LINES)
    yield from (getattr(packed.tree.prepared["bounds"], name) for name in SUMS)
    yield from batch.streams().values()
