"""One micro-batch of an update: what the trunk reads, and what the losses want of each loss token.

`pad` brings it to one of few shapes by tokens without weight, which change neither loss nor
gradient: what is recorded for a shape serves all batches of it. S counts loss tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch.nn.functional import pad as pad_tensor

from moored.batch import Packed, Sample, Tree
from moored.engine.buckets import bucket

MIN_PROMPTS, MIN_CONTINUATIONS, MIN_LONGEST, MIN_STRETCHES = 256, 1024, 128, 16
"""Sizes of the smallest shape: tokens of all prompts, of all continuations, of a stretch; count."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossBatch:
    """All tensors but those of `packed` are (S,)."""

    packed: Packed
    """Its sources and targets are those of loss tokens alone."""
    sequence: torch.Tensor
    """Number of the sequence of each token."""
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    returns: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    """Log-probabilities under the reference model."""

    def streams(self) -> dict[str, torch.Tensor]:
        """What there is a number of for every loss token, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "packed"}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def loss_batch(
    packed: Packed,
    samples: Sequence[Sample],
    reference: Sequence[np.ndarray] | None,
    *,
    with_values: bool,
) -> LossBatch:
    """The loss tokens of `packed`, which holds continuations of `samples`."""
    order = [index for index, _ in packed.items]
    masks = [samples[index].loss_mask_T for index in order]
    counts = [count for count in (int(mask.sum()) for mask in masks) if count]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(packed.targets.device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        chosen = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return tensor(np.concatenate(chosen).astype(np.float32))

    def of(name: str) -> torch.Tensor:
        return flat([getattr(samples[index], name) for index in order])

    chosen = tensor(np.flatnonzero(np.concatenate(masks)))
    return LossBatch(
        packed=replace(packed, sources=packed.sources[chosen], targets=packed.targets[chosen]),
        sequence=tensor(np.repeat(np.arange(len(counts)), counts)),
        old_logprobs=of("old_logprobs_T"),
        advantages=of("advantages_T"),
        weights=of("weights_T"),
        returns=of("returns_T") if with_values else None,
        old_values=of("old_values_T") if with_values else None,
        reference=None if reference is None else flat([reference[index] for index in order]),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a padded batch. Equal shapes can use one recording."""

    prompt_tokens: int
    continuation_tokens: int
    loss_tokens: int
    num_prompts: int
    num_stretches: int
    longest: int
    """Bound on the tokens of a stretch, be it a prompt or a continuation."""


def pad(batch: LossBatch) -> tuple[LossBatch, Shape]:
    """Fill up a line (`batch.to_line`) with prompts and continuations that have no weight."""
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
        loss_tokens=-(-len(batch.weights) // quarter) * quarter,
        num_prompts=_power(len(tree.prompts), MIN_STRETCHES, 4),
        num_stretches=_power(sum(1 for _ in _stretches(tree)), MIN_STRETCHES, 4),
        longest=longest,
    )
    shift, more = prompt_tokens - first, shape.loss_tokens - len(batch.weights)

    def line(tensor: torch.Tensor) -> torch.Tensor:
        prompts, rest = tensor[:, :first], tensor[:, first:]
        parts = [(prompts, shift), (rest, continuation_tokens - rest.shape[1])]
        return torch.cat([pad_tensor(part, (0, size)) for part, size in parts], dim=1)

    sources = torch.where(packed.sources < first, packed.sources, packed.sources + shift)
    streams = {name: pad_tensor(tensor, (0, more)) for name, tensor in batch.streams().items()}
    # Those that are added are a sequence of their own; there are fewer others than tokens.
    streams["sequence"][len(batch.weights) :] = shape.loss_tokens - 1
    filled = replace(
        packed,
        input_ids=line(packed.input_ids),
        position_ids=line(packed.position_ids),
        sources=pad_tensor(sources, (0, more)),
        targets=pad_tensor(packed.targets, (0, more)),
        tree=tree,
    )
    return replace(batch, packed=filled, **streams), shape


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
