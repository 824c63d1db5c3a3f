"""Passes over micro-batches as CUDA graphs: one launch in place of thousands.

The first batch of a shape is computed as it is: many shapes never come back. The second is
recorded, and replayed like all later ones, which are copied to where the recording reads. So a pass
may read its batch and tensors that stay where they are, and write to such tensors. Where a pass
cannot be recorded it is computed every time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad as pad_tensor

from moored.engine.fast.buckets import bucket, power_bucket
from moored.engine.fast.capture import capture, run_aside
from moored.engine.fast.tree_attention import Bounds, bounds_of
from moored.engine.packing import TokenBatch, Tree

Outputs = Mapping[str, torch.Tensor]
Pass = Callable[[TokenBatch], Outputs]
LINES = ("input_ids", "position_ids", "sources", "targets")
SUMS = ("stretches", "prompts", "continuations")
HOST = torch.device("cpu")
MIN_PROMPT_TOKENS, MIN_CONTINUATION_TOKENS, MIN_LONGEST_TOKENS = 256, 1024, 128
MIN_STRETCHES = 16
"""The smallest shape."""
MOST_PADDING = 1.5
"""A padded batch has at most this many times the tokens, except in the smallest shapes."""
MAX_RECORDINGS = 128
"""Shapes beyond these are computed without a recording."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a padded batch. Equal shapes can use one recording."""

    prompt_tokens: int
    continuation_tokens: int
    num_targets: int
    num_prompts: int
    num_stretches: int
    longest: int
    """Bound on the tokens of a stretch, be it a prompt or a continuation."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: TokenBatch
    """What it reads, on the device."""
    outputs: Outputs
    """What it writes; the next replay of any recording may overwrite it."""


class Graphs:
    """Runs passes over batches that lie on the host; a pass is known by the name it is given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings: dict[tuple[str, Shape], _Recording | None] = {}
        """None: cannot be recorded."""
        self._seen: set[tuple[str, Shape]] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, name: str, compute: Pass, batch: TokenBatch) -> Outputs:
        """The outputs are of the padded batch, and hold until the next run."""
        padded, shape = pad(batch)
        padded = _with_bounds(padded, shape)
        found = self._recordings.get((name, shape))
        if found is None:
            return self._compute((name, shape), compute, _on_device(padded, self._device))
        for into, given in zip(_tensors(found.batch), _tensors(padded), strict=True):
            into.copy_(given)
        found.graph.replay()
        return found.outputs

    def _compute(self, key: tuple[str, Shape], compute: Pass, batch: TokenBatch) -> Outputs:
        """Without a recording; the second batch of a shape makes one."""
        is_new = key not in self._seen
        self._seen.add(key)
        is_full = len(self._recordings) >= MAX_RECORDINGS
        with torch.cuda.device(self._device):
            if is_new or is_full or key in self._recordings:
                return run_aside(lambda: compute(batch))
            self._recordings[key] = None
            try:
                graph, outputs = capture(lambda: compute(batch), self._pool)
            except RuntimeError as error:  # out of memory, or something that a graph cannot hold
                logger.warning("a pass runs slower because it cannot be recorded: %s", error)
                return run_aside(lambda: compute(batch))
            self._recordings[key] = _Recording(graph, batch, outputs)
            graph.replay()
        return outputs


def _with_bounds(padded: TokenBatch, shape: Shape) -> TokenBatch:
    """The tree by its bounds alone, which are tensors of the shape's size."""
    tree = padded.packed.tree
    assert tree is not None
    exact = bounds_of(tree, HOST)
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


def _on_device(batch: TokenBatch, device: torch.device) -> TokenBatch:
    packed, tree = batch.packed, batch.packed.tree
    assert tree is not None
    bounds = tree.prepared["bounds"]
    bounds = replace(bounds, **{name: getattr(bounds, name).to(device) for name in SUMS})
    lines = {name: getattr(packed, name).to(device) for name in LINES}
    tree = Tree(tree.prompts, tree.continuations, {"bounds": bounds})
    streams = {name: tensor.to(device) for name, tensor in batch.streams.items()}
    return TokenBatch(replace(packed, **lines, tree=tree), streams)


def _tensors(batch: TokenBatch) -> Iterator[torch.Tensor]:
    tree = batch.packed.tree
    assert tree is not None
    yield from (getattr(batch.packed, name) for name in LINES)
    yield from (getattr(tree.prepared["bounds"], name) for name in SUMS)
    yield from batch.streams.values()


def pad(batch: TokenBatch) -> tuple[TokenBatch, Shape]:
    """Pad a line (`packing.to_line`) with prompts, continuations and targets of weight 0."""
    packed, tree = batch.packed, batch.packed.tree
    assert tree is not None
    first, whole = tree.num_prompt_tokens, packed.input_ids.shape[1]
    longest = power_bucket(max(_stretches(tree)), MIN_LONGEST_TOKENS, 2)
    # One more prompt at least, for the continuations that are added: all hang on the last one.
    prompt_tokens = bucket(first + 1, MIN_PROMPT_TOKENS)
    continuation_tokens = bucket(whole - first, MIN_CONTINUATION_TOKENS)
    prompts = _pieces(prompt_tokens - first, longest)
    continuations = _pieces(continuation_tokens - (whole - first), longest)
    tree = Tree(
        (*tree.prompts, *prompts),
        (*tree.continuations, *[()] * (len(prompts) - 1), continuations),
    )
    quarter = continuation_tokens // 4
    shape = Shape(
        prompt_tokens=prompt_tokens,
        continuation_tokens=continuation_tokens,
        num_targets=max(1, -(-len(packed.targets) // quarter)) * quarter,
        num_prompts=power_bucket(len(tree.prompts), MIN_STRETCHES, 4),
        num_stretches=power_bucket(sum(1 for _ in _stretches(tree)), MIN_STRETCHES, 4),
        longest=longest,
    )
    shift, more = prompt_tokens - first, shape.num_targets - len(packed.targets)

    def line(tensor: torch.Tensor) -> torch.Tensor:
        parts = [(tensor[:, :first], prompt_tokens), (tensor[:, first:], continuation_tokens)]
        return torch.cat([pad_tensor(p, (0, size - p.shape[1])) for p, size in parts], dim=1)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        # Repeat a real entry; with other filling, 0 · inf could give nan.
        return (
            torch.cat([tensor, tensor[:1].expand(more)]) if len(tensor) else tensor.new_zeros(more)
        )

    sources = torch.where(packed.sources < first, packed.sources, packed.sources + shift)
    streams = {name: fill(tensor) for name, tensor in batch.streams.items()}
    if more and "weights" in streams:
        for name in ("weights", "mean_weights"):
            streams[name][-more:] = 0.0
    if more and "sequence" in streams:
        # A sequence of their own; there are fewer others than tokens.
        streams["sequence"][-more:] = shape.num_targets - 1
    filled = replace(
        packed,
        input_ids=line(packed.input_ids),
        position_ids=line(packed.position_ids),
        sources=fill(sources),
        targets=fill(packed.targets),
        tree=tree,
    )
    return TokenBatch(filled, streams), shape


def _stretches(tree: Tree) -> Iterator[int]:
    yield from tree.prompts
    for members in tree.continuations:
        yield from members


def _pieces(size: int, longest: int) -> tuple[int, ...]:
    """`size` in pieces of at most `longest`."""
    whole, rest = divmod(size, longest)
    return (longest,) * whole + ((rest,) if rest else ())
