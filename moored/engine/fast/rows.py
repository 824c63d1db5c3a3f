"""Tensors that say what a forward pass over the slots of a cache computes, and what was drawn.

The integers of a pass are packed into one array on the host, so that one copy takes them to the
device; `Rows` and `Entries` are views of it there. What was drawn becomes completions at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moored.engine.base import Request, SamplingParams, check_params
from moored.engine.fast.buckets import power_bucket, tile_bucket
from moored.engine.fast.slots import Job, Session
from moored.errors import MooredError
from moored.types import Completion, FinishReason

MAX_STOPS = 8
"""Most tokens that can end a reply."""
MAX_RECORDED_TOKENS = 8192
"""Tokens of the largest entry of rows that is recorded: above, the host is fast enough."""
ALIGNMENT = 4
"""Integers of 16 bytes: kernels compiled for columns that begin there are the faster ones."""


@dataclass(slots=True, eq=False)
class Rows:
    """N new tokens, row after row. A row sees its prefix, which others may share, then its slot."""

    slots: torch.Tensor
    """(R,) slot of each row."""
    starts: torch.Tensor
    """(R,) index of its first new token in N."""
    counts: torch.Tensor
    """(R,) number of its new tokens."""
    befores: torch.Tensor
    """(R,) tokens its slot already holds."""
    prefix_slots: torch.Tensor
    """(R,) slot of its prefix."""
    prefix_lengths: torch.Tensor
    """(R,) tokens of its prefix; 0: it has none."""
    max_count: int
    token_slots: torch.Tensor
    """(N,) slot of each token."""
    cells: torch.Tensor
    """(N,) place of each token in its slot."""
    offsets: torch.Tensor
    """(N,) tokens of the prefix before it: its position is cell plus offset."""
    plan: Any = None
    """What the operations of a device prepare once for all layers."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """Sizes of a forward pass, padding included."""

    tokens: int
    rows: int
    max_count: int
    """Bound on the new tokens of a row."""

    @property
    def size(self) -> int:
        """Integers that `pack_jobs` makes."""
        return 4 * self.tokens + 6 * self.rows


def padded_shape(num_tokens: int, num_rows: int, max_count: int) -> PassShape:
    """One of few shapes with room for all of it and one token of padding.

    A pass that is too large to be recorded is not padded: there it would only cost time.
    """
    if num_tokens >= MAX_RECORDED_TOKENS:
        return PassShape(num_tokens + 1, num_rows, max_count)
    return PassShape(
        tile_bucket(num_tokens + 1, 128),
        power_bucket(num_rows, 8, 2),
        power_bucket(max_count, 64, 4),
    )


def pack_jobs(jobs: Sequence[Job], shape: PassShape, idle_slot: int = 0) -> np.ndarray:
    """Token ids and all columns of `Rows` in one array.

    Padding goes to the idle slot: tokens without a row, and rows of the first such token.
    """
    packed = np.zeros(shape.size, dtype=np.int32)
    by_token = packed[: 4 * shape.tokens].reshape(4, shape.tokens)
    by_row = packed[4 * shape.tokens :].reshape(6, shape.rows)
    columns = [
        (job.session.slot, len(job.ids), job.before, job.session.prefix, job.session.prefix_length)
        for job in jobs
    ]
    slots, counts, befores, prefixes, prefix_lengths = np.array(columns, dtype=np.int32).T
    ends = np.cumsum(counts, dtype=np.int32)
    starts, num_tokens = ends - counts, int(ends[-1])
    by_token[0, :num_tokens] = np.concatenate([job.ids for job in jobs])
    by_token[1, :num_tokens] = np.repeat(slots, counts)
    by_token[2, :num_tokens] = np.arange(num_tokens) + np.repeat(befores - starts, counts)
    by_token[3, :num_tokens] = np.repeat(prefix_lengths, counts)
    by_token[1, num_tokens:] = idle_slot
    by_row[:, : len(jobs)] = slots, starts, counts, befores, prefixes, prefix_lengths
    by_row[:3, len(jobs) :] = np.array([[idle_slot], [num_tokens], [1]])
    return packed


def unpack_rows(packed: torch.Tensor, shape: PassShape) -> tuple[Rows, torch.Tensor]:
    """Rows, and token ids (N,), as views of what `pack_jobs` made."""
    by_token = packed[: 4 * shape.tokens].view(4, shape.tokens)
    by_row = packed[4 * shape.tokens : shape.size].view(6, shape.rows)
    rows = Rows(
        slots=by_row[0],
        starts=by_row[1],
        counts=by_row[2],
        befores=by_row[3],
        prefix_slots=by_row[4],
        prefix_lengths=by_row[5],
        max_count=shape.max_count,
        token_slots=by_token[1],
        cells=by_token[2],
        offsets=by_token[3],
    )
    return rows, by_token[0]


def rows_of(jobs: Sequence[Job], device: torch.device) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows, token ids (N,) and the index of each row's last token (R,), without padding."""
    counts = [len(job.ids) for job in jobs]
    shape = PassShape(sum(counts), len(jobs), max(counts))
    packed = torch.from_numpy(pack_jobs(jobs, shape)).to(device)
    rows, ids = unpack_rows(packed, shape)
    return rows, ids, rows.starts + rows.counts - 1


NUM_COLUMNS = 8
"""Integers of a lane: request, token, cell, count, running, slot, prefix slot, prefix length."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows that enter lanes of a `State`: views of what `pack_entries` made, E with padding."""

    seeds: torch.Tensor
    columns: torch.Tensor
    """(NUM_COLUMNS, E)."""
    lanes: torch.Tensor
    """(E,) the lane each goes to."""
    lasts: torch.Tensor
    """(E,) the token, of those computed together, that its first draw follows."""

    @property
    def drawn(self) -> tuple[torch.Tensor, ...]:
        """What `draw` takes, in its order."""
        return self.seeds, *self.columns[:5]


def entries_size(num_entries: int) -> int:
    """Integers that `pack_entries` makes."""
    return (2 + NUM_COLUMNS + 2) * num_entries


def pack_entries(
    entries: Sequence[tuple[Request, Session, int, int]],
    num_entries: int,
    idle_slot: int,
    idle_lane: int,
) -> np.ndarray:
    """Requests, their sessions, lanes and last tokens in one array, filled up with idle ones."""
    packed = np.zeros(entries_size(num_entries), dtype=np.int32)
    seeds = packed[: 2 * num_entries].view(np.int64)
    columns = packed[2 * num_entries :].reshape(NUM_COLUMNS + 2, num_entries)
    columns[5], columns[8] = idle_slot, idle_lane
    seeds[: len(entries)] = [request.seed for request, _, _, _ in entries]
    # The output of a reply lies in the line of its slot, which no other reply has meanwhile. A draw
    # moves a row on by one: to the cell of the token that is drawn.
    filled = [
        (
            *(s.slot, 0, len(r.prompt.ids) - s.prefix_length - 1, 0, 1),
            *(s.slot, s.prefix, s.prefix_length, lane, last),
        )
        for r, s, lane, last in entries
    ]
    columns[:, : len(entries)] = np.array(filled, dtype=np.int32).T
    return packed


def unpack_entries(packed: torch.Tensor, num_entries: int) -> Entries:
    columns = packed[2 * num_entries : entries_size(num_entries)]
    columns = columns.view(NUM_COLUMNS + 2, num_entries)
    return Entries(
        seeds=packed[: 2 * num_entries].view(torch.int64),
        columns=columns[:NUM_COLUMNS],
        lanes=columns[NUM_COLUMNS],
        lasts=columns[NUM_COLUMNS + 1],
    )


class State:
    """What decoding steps read and write in place: lanes, in which rows run or are idle.

    Behind the `num_rows` lanes there is at least one more that is always idle.
    """

    def __init__(self, num_rows: int, max_tokens: int, idle_slot: int, device: torch.device):
        num_lanes = _aligned(num_rows + 1)
        self.columns = torch.zeros((NUM_COLUMNS, num_lanes), dtype=torch.int32, device=device)
        self.requests, self.tokens, self.cells, self.counts = self.columns[:4]
        self.running, self.slots, self.prefix_slots, self.prefix_lengths = self.columns[4:]
        self.seeds = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self.every_row = torch.arange(num_lanes, dtype=torch.int32, device=device)
        self.ones = torch.ones_like(self.every_row)
        self.inverse_temperature = torch.ones(1, device=device)
        self.stops = torch.full((MAX_STOPS,), -1, dtype=torch.int32, device=device)
        self.max_tokens = torch.ones(1, dtype=torch.int32, device=device)
        shape = (2, num_rows, _aligned(max_tokens))
        self.out = torch.zeros(shape, dtype=torch.int32, device=device)
        """Tokens, then log-probabilities (as the bits of a float): one copy fetches both."""
        self.out_tokens, self.out_logps = self.out[0], self.out[1].view(torch.float32)
        self.idle_slot = idle_slot
        self.idle_lane = num_rows
        self._idle(0)

    def replies(self, num_rows: int, longest: int) -> torch.Tensor:
        """(2, rows, 1 + longest) what the rows in the first lanes have written, up to a length.

        First their number of tokens, then these; first whether the row still runs, then the bits
        of log-probabilities.
        """
        written = self.out[:, :, :longest].index_select(1, self.requests[:num_rows])
        return torch.cat([self.columns[3:5, :num_rows, None], written], dim=2)

    def set_params(self, params: SamplingParams) -> None:
        self.inverse_temperature.fill_(1.0 / params.temperature if params.temperature else 0.0)
        self.max_tokens.fill_(params.max_tokens)
        stops = torch.full((MAX_STOPS,), -1, dtype=torch.int32)
        stops[: len(params.stop_ids)] = torch.tensor(params.stop_ids, dtype=torch.int32)
        self.stops.copy_(stops)

    def begin(self, requests: Sequence[Request], sessions: Sequence[Session]) -> None:
        """Get ready for the first draw of one row for each request, in the first lanes."""
        lanes = range(len(requests))
        rows = list(zip(requests, sessions, lanes, lanes, strict=True))
        packed = torch.from_numpy(pack_entries(rows, len(rows), self.idle_slot, self.idle_lane))
        self._idle(0)
        self.enter(unpack_entries(packed.to(self.slots.device), len(rows)))

    def enter(self, entries: Entries) -> None:
        """Put rows into their lanes."""
        lanes = entries.lanes.long()
        self.columns.index_copy_(1, lanes, entries.columns)
        self.seeds.index_copy_(0, lanes, entries.seeds)

    def drawn(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """What `draw` takes, in its order."""
        return self.seeds[:num_rows], *self.columns[:5, :num_rows]

    def one_token_each(self, num_rows: int) -> Rows:
        """A forward pass over the last token of every row."""
        slots, cells = self.slots[:num_rows], self.cells[:num_rows]
        prefix_lengths = self.prefix_lengths[:num_rows]
        return Rows(
            slots=slots,
            starts=self.every_row[:num_rows],
            counts=self.ones[:num_rows],
            befores=cells,
            prefix_slots=self.prefix_slots[:num_rows],
            prefix_lengths=prefix_lengths,
            max_count=1,
            token_slots=slots,
            cells=cells,
            offsets=prefix_lengths,
        )

    def order(self, rows: torch.Tensor, num_live: int) -> None:
        """Put rows into a new order; those from `num_live` on become idle."""
        self.columns[:, : len(rows)] = self.columns[:, rows]
        self.seeds[: len(rows)] = self.seeds[rows]
        self._idle(num_live)

    def retire(self) -> None:
        """Send rows that stopped to the idle slot: theirs may be given to others."""
        stopped = self.running == 0
        self.slots.masked_fill_(stopped, self.idle_slot)
        for column in (self.cells, self.prefix_slots, self.prefix_lengths):
            column.masked_fill_(stopped, 0)

    def stop_all(self) -> None:
        self._idle(0)

    def _idle(self, start: int) -> None:
        for column in (self.running, self.cells, self.prefix_slots, self.prefix_lengths):
            column[start:] = 0
        self.slots[start:] = self.idle_slot


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_fast_params(params: SamplingParams) -> None:
    """Raise for what cannot be drawn on the device."""
    check_params(params)
    if len(params.stop_ids) > MAX_STOPS:
        raise MooredError(
            f"replies may end at {MAX_STOPS} tokens at most, got {len(params.stop_ids)}; name "
            f"fewer in the model's generation_config.json, or set engine.sampler=plain"
        )


def reply_lengths(tokens: np.ndarray, params: SamplingParams) -> list[int]:
    """Tokens of each reply of `tokens` (rows, max_tokens): up to the first stop, or all."""
    is_stop = np.isin(tokens, np.array(params.stop_ids, dtype=np.int64))
    lengths = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, params.max_tokens)
    return lengths.tolist()


def make_completions(
    tokens: np.ndarray,
    logps: np.ndarray,
    lengths: Sequence[int],
    rows: Sequence[tuple[Request, Session]],
    params: SamplingParams,
    version: int,
) -> list[Completion]:
    """One completion for each row of `tokens` and `logps`; sessions then hold the replies too.

    Completions are views of `logps`, and of a copy of `tokens`.
    """
    ends = np.asarray(lengths)
    # Behind a reply there may be anything: look there only when there is something to find.
    if not np.isfinite(logps).all() and any(
        not np.isfinite(logps[row, :length]).all() for row, length in enumerate(lengths)
    ):
        raise MooredError(
            "the model's log-probabilities are not finite: its weights are damaged; go back to "
            "an earlier checkpoint"
        )
    tokens = tokens.astype(np.int64)
    lasts = tokens[np.arange(len(ends)), ends - 1].tolist()
    completions = []
    for row, (request, session) in enumerate(rows):
        ids = tokens[row, : lengths[row]]
        # The last token was drawn, but not yet run through the model.
        session.ids = np.concatenate((request.prompt.ids, ids[:-1]))
        is_stopped = lasts[row] in params.stop_ids
        completions.append(
            Completion(
                token_ids=ids,
                logprobs=logps[row, : lengths[row]],
                finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
                policy_version=version,
            )
        )
    return completions
