"""Passes over micro-batches as CUDA graphs: one launch in place of thousands.

The first batch of a shape is computed as it is: many shapes never come back. The second is
recorded, and replayed like all later ones, which are copied to where the recording reads. So a pass
may read its batch and tensors that stay where they are, and write to such tensors. Where a pass
cannot be recorded it is computed every time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.functional import pad as pad_tensor

from moored.engine.fast.buckets import bucket, power_bucket
from moored.engine.fast.capture import HostBuffers, capture, run_aside
from moored.engine.fast.tree_attention import Bounds, bounds_of
from moored.engine.packing import TokenBatch, Tree
from moored.engine.passes import is_plain_head
from moored.models.fast_shape import has_fixed_angles

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
MAX_RECORDED = 300_000_000
"""Parameters of the largest model whose passes are recorded: larger ones keep the GPU busy by
themselves, and recordings would hold their memory."""
BUSY_WORK = 4e12
"""Tokens times parameters from which on a pass without gradients keeps the GPU busy unrecorded."""
MAX_RECORDINGS = 128
"""Shapes beyond these are computed without a recording."""
ALIGNMENT_BYTES = 256
"""Kernels are the faster ones where tensors begin at a multiple of 16 bytes or more."""

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
    longest_continuations: int
    """Bound on the tokens of all continuations of a prompt."""


class DeviceBatch:
    """A batch whose tensors are views of one piece of the device's memory: one copy fills it."""

    def __init__(self, like: TokenBatch, device: torch.device) -> None:
        size = sum(_aligned(tensor.nbytes) for tensor in _tensors(like))
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.batch = _with_tensors(like, _views(self._bytes, _tensors(like)))

    def fill(self, batch: TokenBatch, buffers: HostBuffers) -> None:
        """Copy a batch of the same shape from the host, without waiting."""
        host = buffers.take(self._bytes.shape, torch.uint8)
        for part, tensor in zip(_views(host, _tensors(self.batch)), _tensors(batch), strict=True):
            part.copy_(tensor)
        buffers.copy(self._bytes, host)


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: DeviceBatch
    """What it reads."""
    outputs: Outputs
    """What it writes; the next replay of any recording may overwrite it."""


def can_record(model: nn.Module) -> bool:
    """True for a model whose passes are bound by launches, and read no number back to the host."""
    size = sum(weight.numel() for weight in model.parameters())
    return size <= MAX_RECORDED and has_fixed_angles(model.config) and is_plain_head(model)


class Graphs:
    """Runs passes over batches that lie on the host; a pass is known by the name it is given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings: dict[tuple[str, Shape], _Recording | None] = {}
        """None: cannot be recorded."""
        self._seen: set[tuple[str, Shape]] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._uploads = HostBuffers(device)

    def run(self, name: str, compute: Pass, batch: TokenBatch) -> Outputs:
        """The outputs are of the padded batch, and hold until the next run."""
        padded, shape = pad(batch)
        padded = _with_bounds(padded, shape)
        found = self._recordings.get((name, shape))
        if found is None:
            return self._compute((name, shape), compute, padded)
        found.inputs.fill(padded, self._uploads)
        found.graph.replay()
        return found.outputs

    def _compute(self, key: tuple[str, Shape], compute: Pass, padded: TokenBatch) -> Outputs:
        """Without a recording; the second batch of a shape makes one."""
        inputs = DeviceBatch(padded, self._device)
        inputs.fill(padded, self._uploads)
        batch = inputs.batch
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
            self._recordings[key] = _Recording(graph, inputs, outputs)
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
        longest_prompt=shape.longest,
        longest_continuations=shape.longest_continuations,
    )
    sizes = (shape.prompt_tokens,), ((shape.continuation_tokens,),)
    return replace(padded, packed=replace(padded.packed, tree=Tree(*sizes, {"bounds": bounds})))


def _repeat_last(sums: torch.Tensor, size: int) -> torch.Tensor:
    """Running sums that end with stretches of no tokens."""
    return torch.cat([sums, sums[-1:].expand(size - len(sums))])


def _views(whole: torch.Tensor, like: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors of the given types and shapes, one after another, in `whole` (bytes,)."""
    at = 0
    for tensor in like:
        yield whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        at += _aligned(tensor.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _tensors(batch: TokenBatch) -> Iterator[torch.Tensor]:
    tree = batch.packed.tree
    assert tree is not None
    yield from (getattr(batch.packed, name) for name in LINES)
    yield from (getattr(tree.prepared["bounds"], name) for name in SUMS)
    yield from batch.streams.values()


def _with_tensors(batch: TokenBatch, tensors: Iterator[torch.Tensor]) -> TokenBatch:
    """The batch with others in place of its tensors, in the order of `_tensors`."""
    tree = batch.packed.tree
    assert tree is not None
    lines = {name: next(tensors) for name in LINES}
    bounds = replace(tree.prepared["bounds"], **{name: next(tensors) for name in SUMS})
    streams = {name: next(tensors) for name in batch.streams}
    tree = Tree(tree.prompts, tree.continuations, {"bounds": bounds})
    return TokenBatch(replace(batch.packed, **lines, tree=tree), streams)


def pad(batch: TokenBatch) -> tuple[TokenBatch, Shape]:
    """Pad a line (`packing.to_line`) with prompts, continuations and targets of weight 0."""
    packed, tree = batch.packed, batch.packed.tree
    assert tree is not None
    first, whole = tree.num_prompt_tokens, packed.input_ids.shape[1]
    longest = power_bucket(max(_stretches(tree)), MIN_LONGEST_TOKENS, 2)
    # One more prompt at least, for the continuations that are added.
    prompt_tokens = bucket(first + 1, MIN_PROMPT_TOKENS)
    continuation_tokens = bucket(whole - first, MIN_CONTINUATION_TOKENS)
    added = prompt_tokens - first, continuation_tokens - (whole - first)
    most = _most_continuations(tree, *added)
    tree = _fill(tree, *added, longest=longest, most=most)
    quarter = continuation_tokens // 4
    shape = Shape(
        prompt_tokens=prompt_tokens,
        continuation_tokens=continuation_tokens,
        num_targets=max(1, -(-len(packed.targets) // quarter)) * quarter,
        num_prompts=power_bucket(len(tree.prompts), MIN_STRETCHES, 4),
        num_stretches=power_bucket(sum(1 for _ in _stretches(tree)), MIN_STRETCHES, 4),
        longest=longest,
        longest_continuations=most,
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


def _most_continuations(tree: Tree, prompt_tokens: int, continuation_tokens: int) -> int:
    """Bound on the tokens after one prompt, with so many added to each part.

    Attention starts programs for as many after every prompt, most of which find nothing. Each piece
    of what is added hangs on a prompt, so that there are no more pieces than prompt tokens.
    """
    sums = [sum(members) for members in tree.continuations]
    whole = sum(sums) + continuation_tokens
    most = min(power_bucket(max(sums), MIN_CONTINUATION_TOKENS, 4), whole)
    while -(-continuation_tokens // most) > prompt_tokens:
        most = min(4 * most, whole)
    return most


def _fill(
    tree: Tree, prompt_tokens: int, continuation_tokens: int, *, longest: int, most: int
) -> Tree:
    """The tree with more prompts, and continuations of these, in pieces within the bounds."""
    continuations = [_pieces(piece, longest) for piece in _pieces(continuation_tokens, most)]
    spare = max(0, len(continuations) - 1)
    prompts = (*[1] * spare, *_pieces(prompt_tokens - spare, longest))
    continuations += [()] * (len(prompts) - len(continuations))
    return Tree((*tree.prompts, *prompts), (*tree.continuations, *continuations))


def _stretches(tree: Tree) -> Iterator[int]:
    yield from tree.prompts
    for members in tree.continuations:
        yield from members


def _pieces(size: int, longest: int) -> tuple[int, ...]:
    """`size` in pieces of at most `longest`."""
    whole, rest = divmod(size, longest)
    return (longest,) * whole + ((rest,) if rest else ())
