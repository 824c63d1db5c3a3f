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

from moored.batch import Packed, Sample, Tree
from moored.engine.buckets import bucket

MIN_PROMPTS, MIN_CONTINUATIONS, MIN_LONGEST, MIN_STRETCHES = 256, 1024, 128, 16
"""Sizes of the smallest shape: tokens of all prompts, of all continuations, of a stretch; count."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A packed micro-batch, and streams: tensors (S,) with a number for each of its targets."""

    packed: Packed
    streams: Mapping[str, torch.Tensor] = field(default_factory=dict)


def loss_batch(
    packed: Packed,
    samples: Sequence[Sample],
    reference: Sequence[np.ndarray] | None,
    *,
    with_values: bool,
) -> TokenBatch:
    """The loss tokens of `packed`, which holds continuations of `samples`, and what losses want."""
    order = [index for index, _ in packed.items]
    masks = [samples[index].loss_mask_T for index in order]
    counts = [count for count in (int(mask.sum()) for mask in masks) if count]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(packed.targets.device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        chosen = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return tensor(np.concatenate(chosen).astype(np.float32))

    names = ["old_logprobs", "advantages", "weights"]
    names += ["returns", "old_values"] if with_values else []
    streams = {
        name: flat([getattr(samples[index], f"{name}_T") for index in order]) for name in names
    }
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
    """Fill up a line (`batch.to_line`) with prompts and continuations; streams with zeros."""
    packed, tree = batch.packed, batch.packed.tree
    assert tree is not None
    first, whole = tree.num_prompt_tokens, packed.input_ids.shape[1]
    # Coarse where more costs little. One more prompt at least, for the continuations added.
    longest = _power(max(_stretches(tree)), MIN_LONGEST, 2)
    prompt_tokens = _power(first + 1, MIN_PROMPTS, 2)
    continuation_tokens = bucket(whole - first, MIN_CONTINUATIONS)
    quarter = continuation_tokens // 4
    tree = Tree(
        (*tree.prompts, *_pieces(prompt_tokens - first, longest)),
        (*tree.continuations, *_added(tree, prompt_tokens, continuation_tokens, longest)),
    )
    shape = Shape(
        prompt_tokens=prompt_tokens,
        continuation_tokens=continuation_tokens,
        num_targets=max(1, -(-len(packed.targets) // quarter)) * quarter,
        num_prompts=_power(len(tree.prompts), MIN_STRETCHES, 4),
        num_stretches=_power(sum(1 for _ in _stretches(tree)), MIN_STRETCHES, 4),
        longest=longest,
    )
    shift, more = prompt_tokens - first, shape.num_targets - len(packed.targets)

    def line(tensor: torch.Tensor) -> torch.Tensor:
        prompts, rest = tensor[:, :first], tensor[:, first:]
        parts = [(prompts, shift), (rest, continuation_tokens - rest.shape[1])]
        return torch.cat([pad_tensor(part, (0, size)) for part, size in parts], dim=1)

    sources = torch.where(packed.sources < first, packed.sources, packed.sources + shift)
    streams = {name: pad_tensor(tensor, (0, more)) for name, tensor in batch.streams.items()}
    if more and "sequence" in streams:
        # What is added is a sequence of its own; there are fewer others than tokens.
        streams["sequence"][-more:] = shape.num_targets - 1
    filled = replace(
        packed,
        input_ids=line(packed.input_ids),
        position_ids=line(packed.position_ids),
        sources=pad_tensor(sources, (0, more)),
        targets=pad_tensor(packed.targets, (0, more)),
        tree=tree,
    )
    return TokenBatch(filled, streams), shape


def _power(size: int, least: int, base: int) -> int:
    """The next of `least` times powers of `base`."""
    while least < size:
        least *= base
    return least


def _stretches(tree: Tree) -> Iterator[int]:
    yield from tree.prompts
    for members in tree.continuations:
        yield from members


def _pieces(size: int, longest: int) -> tuple[int, ...]:
    """`size` in pieces of at most `longest`."""
    whole, rest = divmod(size, longest)
    return (longest,) * whole + ((rest,) if rest else ())


def _added(
    tree: Tree, prompt_tokens: int, continuation_tokens: int, longest: int
) -> list[tuple[int, ...]]:
    """The continuations of the prompts that are added: all hang on the last of them."""
    have = sum(map(sum, tree.continuations))
    num_prompts = len(_pieces(prompt_tokens - tree.num_prompt_tokens, longest))
    return [()] * (num_prompts - 1) + [_pieces(continuation_tokens - have, longest)]
