"""Replies of a batch written together on a CPU, in the first slots of the cache.

Row i lies in slot i, so that the rows are one slice of the cache, which is read without copying.
When rows stop, running rows move into their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moored.engine.base import Request, SamplingParams
from moored.engine.fast.rows import reply_lengths, rows_of
from moored.engine.fast.slots import Job, split_jobs
from moored.types import Completion

if TYPE_CHECKING:
    from moored.engine.fast.sampler import SlotSampler

PREFILL_TOKENS = 4096
"""Bound on the tokens of one forward pass, padding included."""
STEPS_BETWEEN_CHECKS = 4
"""Tokens between checks which rows still run."""


def write_batch(
    sampler: SlotSampler, requests: Sequence[Request], params: SamplingParams
) -> list[Completion]:
    """One completion for each request, in order; as many at a time as there are slots."""
    if not requests:
        return []
    sampler.claim(None, params)
    longest = max(len(request.prompt.ids) for request in requests) + params.max_tokens
    sampler.reserve(len(requests), longest, params)
    at_a_time = sampler.slots.num_rows
    completions: list[Completion] = []
    for start in range(0, len(requests), at_a_time):
        completions += _write(sampler, requests[start : start + at_a_time], params)
    return completions


def _write(
    sampler: SlotSampler, requests: Sequence[Request], params: SamplingParams
) -> list[Completion]:
    jobs, owners = sampler.slots.place(requests)
    sessions = [sampler.slots.sessions[request.session] for request in requests]
    _shift(sampler.cache, *sampler.slots.line_up(sessions))
    hidden = _prefill(sampler, jobs)[torch.tensor(owners)]
    sampler.state.begin(requests, sessions)
    num_rows = len(requests)
    sampler.draw(hidden, sampler.state.drawn(num_rows))
    for t in range(1, params.max_tokens):
        if t % STEPS_BETWEEN_CHECKS == 0:
            num_rows = _compact(sampler, num_rows)
            if num_rows == 0:
                break
        sampler.decode(num_rows)
    # Lanes that kept their slots would go on writing to them in a stream.
    sampler.state.stop_all()
    tokens, logps = (
        tensor[: len(requests), : params.max_tokens].numpy()
        for tensor in (sampler.state.out_tokens, sampler.state.out_logps)
    )
    lengths = reply_lengths(tokens, params)
    rows = list(zip(requests, sessions, strict=True))
    return sampler.complete(tokens, logps.copy(), lengths, rows, params)


def _shift(cache: torch.Tensor, source: dict[int, int], held: int) -> None:
    """Fill the first `held` cells of slots from those of others, all at once."""
    if not source:
        return
    into, given = torch.tensor(list(source)), torch.tensor(list(source.values()))
    for part in cache.flatten(0, 1):
        part[into, :, :held] = part[given, :, :held]


def _prefill(sampler: SlotSampler, jobs: Sequence[Job]) -> torch.Tensor:
    """(jobs, width) output at the last token of each."""
    # The rows of a pass are padded to the longest: rows of similar length together.
    order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].ids))
    parts = []
    for part in split_jobs([jobs[i] for i in order], PREFILL_TOKENS, is_padded=True):
        rows, ids, last = rows_of(part, sampler.device)
        parts.append(sampler.decoder.forward(sampler.cache, ids, rows)[last])
    hidden = torch.cat(parts)
    back = torch.empty_like(hidden)
    back[torch.tensor(order)] = hidden
    return back


def _compact(sampler: SlotSampler, num_rows: int) -> int:
    """Go on with the running rows alone once clearly fewer rows than now would do."""
    running = sampler.state.running[:num_rows].bool()
    num_live = int(running.sum())
    if 4 * num_live > 3 * num_rows:
        return num_rows
    if num_live:
        _close_ranks(sampler, running, num_live)
    return num_live


def _close_ranks(sampler: SlotSampler, running: torch.Tensor, num_live: int) -> None:
    """Exchange running rows behind `num_live` with stopped ones before it, slots included."""
    state = sampler.state
    holes = (~running[:num_live]).nonzero().squeeze(-1)
    movers = running[num_live:].nonzero().squeeze(-1) + num_live
    order = torch.arange(len(running))
    order[holes], order[movers] = movers, holes
    pairs = list(zip(holes.tolist(), movers.tolist(), strict=True))
    held = int(state.cells[: len(running)].max()) + 1
    swapped = {**dict(pairs), **{mover: hole for hole, mover in pairs}}
    _shift(sampler.cache, swapped, held)
    sampler.slots.swap(holes.tolist(), movers.tolist())
    state.order(order, num_live)
    state.slots[:num_live] = state.every_row[:num_live]
