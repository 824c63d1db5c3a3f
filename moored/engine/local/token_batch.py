"""One micro-batch: what the trunk reads, and what is known of each of its S tokens.

`pad` brings it to one of few shapes by tokens that nobody asks for: what is recorded for a shape
serves all batches of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor

from moored.engine.fast.buckets import bucket, power_bucket
from moored.training.batch import LossSample, Packed, Tree

MIN_PROMPT_TOKENS, MIN_CONTINUATION_TOKENS, MIN_LONGEST_TOKENS = 256, 1024, 128
MIN_STRETCHES = 16
"""The smallest shape."""
MOST_PADDING = 1.5
"""A padded batch has no more than so many times the tokens, but for the smallest shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A packed micro-batch, and streams: tensors (S,) with a number for each of its targets."""

    packed: Packed
    streams: Mapping[str, torch.Tensor] = field(default_factory=dict)


def loss_batch(
    packed: Packed,
    samples: Sequence[LossSample],
    reference: Sequence[np.ndarray] | None,
    *,
    with_values: bool,
) -> TokenBatch:
    """The loss tokens of `packed`, which holds continuations of `samples`, and what losses want."""
    order = [index for index, _ in packed.items]
    masks = [samples[index].sample.loss_mask_T for index in order]
    counts = [count for count in (int(mask.sum()) for mask in masks) if count]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(packed.targets.device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        chosen = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return tensor(np.concatenate(chosen).astype(np.float32))

    names = ["advantages", "weights"]
    names += ["returns", "old_values"] if with_values else []
    streams = {
        name: flat([getattr(samples[index], f"{name}_T") for index in order]) for name in names
    }
    streams["old_logprobs"] = flat([samples[index].sample.old_logprobs_T for index in order])
    streams["sequence"] = tensor(np.repeat(np.arange(len(counts)), counts))
    if reference is not None:
        streams["reference"] = flat([reference[index] for index in order])
    chosen = tensor(np.flatnonzero(np.concatenate(masks)))
    packed = replace(packed, sources=packed.sources[chosen], targets=packed.targets[chosen])
    return TokenBatch(packed, streams)


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


def pad(batch: TokenBatch) -> tuple[TokenBatch, Shape]:
    """Fill up a line (`batch.to_line`) with prompts, continuations and targets without weight."""
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
        # With what is there, since nought times the infinite would not be nought.
        return (
            torch.cat([tensor, tensor[:1].expand(more)]) if len(tensor) else tensor.new_zeros(more)
        )

    sources = torch.where(packed.sources < first, packed.sources, packed.sources + shift)
    streams = {name: fill(tensor) for name, tensor in batch.streams.items()}
    if more and "weights" in streams:
        streams["weights"][-more:] = 0.0
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
