"""Groups to training samples to packed tensors.

A sample is one prompt and what followed it: sampled tokens (trained) and observation tokens (not).
Samples with the same prompt are packed behind one copy of it, so a group's prompt is computed once,
forwards and backwards. Shape legend: T tokens of a continuation, L of a row, S scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moored.algo import token_shares
from moored.errors import MooredError
from moored.types import Group, Prompt, Trajectory

WIDTH_MULTIPLE = 16
"""Attention kernels copy masks whose rows are not aligned."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """One prompt and what followed it. Numbers are zero where `loss_mask_T` is not set."""

    prompt: Prompt
    images: tuple[object, ...] = ()
    """Those that observations of the continuation refer to, in order."""
    ids_T: np.ndarray
    loss_mask_T: np.ndarray
    """True exactly on sampled tokens."""
    old_logprobs_T: np.ndarray
    turn_ends_T: np.ndarray
    """True on the last sampled token of each turn."""
    rewards_T: np.ndarray
    """Turn rewards, on the last sampled token of their turn."""
    group: int
    """Index of the group in the batch."""
    trajectory: int
    """Index of the trajectory in the batch; several samples may share one."""

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossSample:
    """A sample as one update takes it: what the loss needs to know of each token."""

    sample: Sample
    advantages_T: np.ndarray
    weights_T: np.ndarray
    """Share of each token in the loss of its update."""
    returns_T: np.ndarray | None = None
    """What the critic should have predicted; None without a critic, like the next."""
    old_values_T: np.ndarray | None = None
    """What the critic predicted when the advantages were estimated."""


def build_samples(groups: Sequence[Group]) -> list[Sample]:
    """One sample per trajectory; several where the history of a trajectory was re-rendered."""
    samples, number = [], 0
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            samples += _trajectory_samples(trajectory, index, number)
            number += 1
    return samples


def _trajectory_samples(trajectory: Trajectory, group: int, number: int) -> list[Sample]:
    if trajectory.stop.is_error:
        return []
    samples: list[Sample] = []
    pieces: list[tuple[np.ndarray, bool, np.ndarray, float]] = []
    start: Prompt | None = None
    stream = Prompt(np.zeros(0, dtype=np.int64))
    for turn in trajectory.turns:
        if start is not None and turn.prompt.continues(stream):
            seen = turn.prompt.ids[len(stream.ids) :]
            pieces.append((seen, False, np.zeros(len(seen)), 0.0))
        else:
            if start is not None:
                samples.append(_sample(start, stream.images, pieces, group, number))
            start, pieces = turn.prompt, []
        pieces.append((turn.completion_ids, True, turn.logprobs, turn.reward))
        stream = turn.prompt.then(turn.completion_ids)
    if start is not None:
        samples.append(_sample(start, stream.images, pieces, group, number))
    return samples


def _sample(
    prompt: Prompt,
    images: tuple[object, ...],
    pieces: Sequence[tuple[np.ndarray, bool, np.ndarray, float]],
    group: int,
    number: int,
) -> Sample:
    lengths = [len(ids) for ids, *_ in pieces]
    ids = np.concatenate([ids for ids, *_ in pieces]).astype(np.int64)
    mask = np.repeat([sampled for _, sampled, *_ in pieces], lengths)
    ends, rewards = np.zeros(len(ids), dtype=bool), np.zeros(len(ids))
    for stop, (_, sampled, _, reward) in zip(np.cumsum(lengths), pieces, strict=True):
        if sampled:
            ends[stop - 1] = True
            rewards[stop - 1] = reward
    return Sample(
        prompt=prompt,
        images=images[len(prompt.images) :],
        ids_T=ids,
        loss_mask_T=mask,
        old_logprobs_T=np.concatenate([logprobs for *_, logprobs, _ in pieces]),
        turn_ends_T=ends,
        rewards_T=rewards,
        group=group,
        trajectory=number,
    )


def token_weights(
    samples: Sequence[Sample], how: str, *, max_length: int, scale: float = 1.0
) -> list[np.ndarray]:
    """The share of every loss token in the loss of one update, as `algo.aggregate` defines it.

    The denominators are of the whole update, so the result does not depend on how it is cut into
    micro-batches or spread over devices.
    """
    counts_B = np.array([sample.num_loss_tokens for sample in samples], dtype=np.int64)
    shares_B = token_shares(counts_B, how, max_length=max_length) * scale
    return [
        np.where(sample.loss_mask_T, share, 0.0)
        for sample, share in zip(samples, shares_B, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One prompt and some continuations in a line; a continuation sees the prompt and itself."""

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
    items: tuple[tuple[int, int], ...]
    """(index in the caller's list, number of tokens) in the order of S."""
    tree: Tree | None = None
    """Who sees whom where B is 1 and the tokens lie as in `to_line`."""

    def split(self, values_S: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Cut a flat result back into continuations."""
        start = 0
        for index, length in self.items:
            yield index, values_S[start : start + length]
            start += length


def to_tensors(
    rows: Sequence[Row], continuations: Sequence[np.ndarray], device: torch.device
) -> Packed:
    """Lay out rows as padded tensors."""
    width = max(row.num_tokens for row in rows)
    width += -width % WIDTH_MULTIPLE
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    segments = np.full((len(rows), width), -1, dtype=np.int64)
    sources, targets, items = [], [], []
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
            # The first token is predicted by the end of the prompt, the others by their forerunner.
            before = np.concatenate([[base - 1], np.arange(at, stop - 1)])[:length]
            sources.append(b * width + before)
            targets.append(continuations[item])
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
        tuple(items),
    )


def to_line(
    rows: Sequence[Row], continuations: Sequence[np.ndarray], device: torch.device
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
    # The first token is predicted by the end of the prompt, the others by their forerunner.
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
        tuple(zip(items, lengths, strict=True)),
        Tree(tuple(map(len, prompts)), tuple(row.lengths for row in rows)),
    )
