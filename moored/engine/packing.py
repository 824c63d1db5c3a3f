"""Prompts and continuations as the tensors of one forward pass, and what is known of each token.

Continuations with the same prompt lie behind one copy of it, so a group's prompt is computed once,
forwards and backwards. Shape legend: B rows of L tokens; S continuation tokens that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from moored.errors import MooredError
from moored.training.samples import LossSample, Sample
from moored.types import Prompt

WIDTH_MULTIPLE = 16
"""Attention kernels copy masks whose rows are not aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One prompt and some continuations end to end; a continuation sees the prompt and itself."""

    prompt: Prompt
    items: tuple[int, ...]
    """Indices of the continuations in the caller's list."""
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.ids) + sum(self.lengths)


def pack(prompts: Sequence[Prompt], lengths: Sequence[int], *, max_tokens: int) -> list[Row]:
    """Put continuations with equal prompts into rows of at most `max_tokens`, longest first.

    A single continuation that is longer than the limit gets a row of its own.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt.key, []).append(index)
    rows = []
    for items in by_prompt.values():
        prompt = prompts[items[0]]
        row: list[int] = []
        size = len(prompt.ids)
        for index in sorted(items, key=lambda i: -lengths[i]):
            if row and size + lengths[index] > max_tokens:
                rows.append(Row(prompt, tuple(row), tuple(lengths[i] for i in row)))
                row, size = [], len(prompt.ids)
            row.append(index)
            size += lengths[index]
        rows.append(Row(prompt, tuple(row), tuple(lengths[i] for i in row)))
    return sorted(rows, key=lambda row: -row.num_tokens)


def num_tokens(prompts: Sequence[Prompt], continuations: Sequence[np.ndarray]) -> int:
    """Of all continuations, and of each prompt once."""
    shared = {prompt.key: len(prompt.ids) for prompt in prompts}
    return sum(shared.values()) + sum(map(len, continuations))


def micro_batches(
    rows: Sequence[Row], *, max_tokens: int, padded: bool = True
) -> Iterator[list[Row]]:
    """Rows of similar length together, at most `max_tokens`, with padding (one row at least)."""
    batch: list[Row] = []
    used = 0
    for row in rows:
        used = batch[0].num_tokens * (len(batch) + 1) if padded and batch else used + row.num_tokens
        if batch and used > max_tokens:
            yield batch
            batch, used = [], row.num_tokens
        batch.append(row)
    if batch:
        yield batch


@dataclass(slots=True, eq=False)  # not frozen: torch.compile would guard on what is in it
class Tree:
    """A line of tokens: all prompts, then all continuations, those of a prompt side by side."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    continuations: tuple[tuple[int, ...], ...]
    """Tokens of each continuation of each prompt."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What attention finds out once for all layers."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompts)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Tensors of one micro-batch. S counts every continuation token, row by row, item by item."""

    input_ids: torch.Tensor
    """(B, L), padded with 0."""
    position_ids: torch.Tensor
    """(B, L): each continuation counts on from the end of the prompt."""
    segments: torch.Tensor | None
    """(B, L): 0 prompt, 1, 2, … its continuations, -1 padding; None: see `tree`."""
    sources: torch.Tensor
    """(S,) flat index into B * L of the position whose output predicts the token."""
    targets: torch.Tensor
    """(S,) the token."""
    ends: torch.Tensor
    """Flat index of the last token of each continuation."""
    items: tuple[tuple[int, int], ...]
    """(index in the caller's list, number of targets) in the order of S."""
    tree: Tree | None = None
    """Who sees whom where B is 1 and the tokens lie as in `to_line`."""
    images: tuple[object, ...] = ()
    """In the order in which their places stand in `input_ids`."""

    def split(self, values_S: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Cut a flat result back into continuations, each with its end where there are ends."""
        start, whole = 0, sum(length for _, length in self.items)
        ends = values_S[whole:]
        for number, (index, length) in enumerate(self.items):
            own = values_S[start : start + length]
            yield index, np.append(own, ends[number]) if len(ends) else own
            start += length


def with_ends(packed: Packed) -> Packed:
    """The same tokens, and behind all targets one for what comes after each continuation."""
    return replace(
        packed,
        sources=torch.cat([packed.sources, packed.ends]),
        targets=torch.cat([packed.targets, torch.zeros_like(packed.ends)]),
    )


def to_tensors(
    rows: Sequence[Row],
    continuations: Sequence[np.ndarray],
    device: torch.device,
    images: Sequence[tuple[object, ...]] | None = None,
) -> Packed:
    """Lay out rows as padded tensors; `images` are those of each continuation."""
    width = max(row.num_tokens for row in rows)
    width += -width % WIDTH_MULTIPLE
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    segments = np.full((len(rows), width), -1, dtype=np.int64)
    sources, targets, ends, items = [], [], [], []
    for b, row in enumerate(rows):
        base = len(row.prompt.ids)
        if base == 0:
            raise MooredError("a prompt needs at least one token to predict the next from")
        ids[b, :base], positions[b, :base], segments[b, :base] = row.prompt.ids, np.arange(base), 0
        at = base
        for segment, (item, length) in enumerate(zip(row.items, row.lengths, strict=True), start=1):
            stop = at + length
            ids[b, at:stop] = continuations[item]
            positions[b, at:stop] = base + np.arange(length)
            segments[b, at:stop] = segment
            # The first token is predicted by the end of the prompt, the others by the token before.
            before = np.concatenate([[base - 1], np.arange(at, stop - 1)])[:length]
            sources.append(b * width + before)
            targets.append(continuations[item])
            ends.append(b * width + (stop if length else base) - 1)
            items.append((item, length))
            at = stop

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Packed(
        tensor(ids),
        tensor(positions),
        tensor(segments),
        tensor(np.concatenate(sources)),
        tensor(np.concatenate(targets).astype(np.int64)),
        tensor(np.array(ends)),
        tuple(items),
        images=tuple(image for row in rows for image in _row_images(row, images)),
    )


def _row_images(row: Row, images: Sequence[tuple[object, ...]] | None) -> Iterator[object]:
    yield from row.prompt.images
    if images is not None:
        for item in row.items:
            yield from images[item]


def to_line(
    rows: Sequence[Row],
    continuations: Sequence[np.ndarray],
    device: torch.device,
    images: Sequence[tuple[object, ...]] | None = None,
) -> Packed:
    """Lay out rows as one line without padding: all prompts, then all continuations."""
    prompts = [row.prompt.ids for row in rows]
    items = [item for row in rows for item in row.items]
    replies = [continuations[item] for item in items]
    if min(map(len, prompts)) == 0:
        raise MooredError("a prompt needs at least one token to predict the next from")
    lengths = [len(ids) for ids in replies]
    bases = np.repeat([len(ids) for ids in prompts], [len(row.items) for row in rows])
    last = np.repeat(np.cumsum([len(ids) for ids in prompts]) - 1, [len(r.items) for r in rows])
    stops = sum(map(len, prompts)) + np.cumsum(lengths)
    # The first token is predicted by the end of the prompt, the others by the token before.
    sources = [
        np.concatenate([[end], np.arange(stop - length, stop - 1)])[:length]
        for end, stop, length in zip(last, stops, lengths, strict=True)
    ]
    positions = [np.arange(len(ids)) for ids in prompts]
    positions += [base + np.arange(length) for base, length in zip(bases, lengths, strict=True)]

    def tensor(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)

    return Packed(
        tensor([*prompts, *replies])[None],
        tensor(positions)[None],
        None,
        tensor(sources),
        tensor(replies),
        tensor([np.where(np.array(lengths) > 0, stops - 1, last)]),
        tuple(zip(items, lengths, strict=True)),
        Tree(tuple(map(len, prompts)), tuple(row.lengths for row in rows)),
        (
            *(image for row in rows for image in row.prompt.images),
            *(image for item in items if images is not None for image in images[item]),
        ),
    )


def columns(
    samples: Sequence[Sample],
) -> tuple[list[Prompt], list[np.ndarray], list[tuple[object, ...]]]:
    """Prompts, continuations, and the images of the latter."""
    return [s.prompt for s in samples], [s.ids_T for s in samples], [s.images for s in samples]


def filler(lay_out: Callable[..., Packed], device: torch.device) -> Packed:
    """The shortest pass there is, of no item: for a rank that has fewer batches than others."""
    row = Row(Prompt(np.zeros(1, dtype=np.int64)), (0,), (1,))
    packed = lay_out([row], [np.zeros(1, dtype=np.int64)], device)
    return replace(packed, ends=packed.ends[:0], items=())


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
    if not packed.items:
        return _zero_loss(packed, with_reference=reference is not None, with_values=with_values)
    order = [index for index, _ in packed.items]
    masks = [samples[index].sample.loss_mask_T for index in order]
    counts = [count for count in (int(mask.sum()) for mask in masks) if count]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(packed.targets.device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        chosen = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return tensor(np.concatenate(chosen).astype(np.float32))

    names = ["advantages", "weights", "mean_weights"]
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


def _zero_loss(packed: Packed, *, with_reference: bool, with_values: bool) -> TokenBatch:
    """A filler with tokens of weight 0: every weight gets a gradient, and all are 0."""
    names = ["advantages", "weights", "mean_weights", "old_logprobs"]
    names += ["reference"] if with_reference else []
    names += ["returns", "old_values"] if with_values else []
    zeros = torch.zeros(packed.targets.shape, device=packed.targets.device)
    streams = dict.fromkeys(names, zeros)
    return TokenBatch(packed, {**streams, "sequence": torch.zeros_like(packed.targets)})
