"""Tensors that say what a forward pass over the slots of a cache computes, and what was drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moored.engine.base import Request, SamplingParams
from moored.engine.fast.slots import Job, Session

MAX_STOPS = 8
"""Most tokens that can end a reply."""


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


def rows_of(jobs: Sequence[Job], device: torch.device) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows, token ids (N,) and the index of each row's last token (R,)."""

    def column(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, dtype=np.int32, count=len(jobs))

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=device)

    counts = column(len(job.ids) for job in jobs)
    befores = column(job.before for job in jobs)
    slots = column(job.session.slot for job in jobs)
    prefix_lengths = column(job.session.prefix_length for job in jobs)
    ends = np.cumsum(counts, dtype=np.int32)
    starts = ends - counts
    cells = np.arange(ends[-1], dtype=np.int32) + np.repeat(befores - starts, counts)
    rows = Rows(
        slots=tensor(slots),
        starts=tensor(starts),
        counts=tensor(counts),
        befores=tensor(befores),
        prefix_slots=tensor(column(job.session.prefix for job in jobs)),
        prefix_lengths=tensor(prefix_lengths),
        max_count=int(counts.max()),
        token_slots=tensor(np.repeat(slots, counts)),
        cells=tensor(cells),
        offsets=tensor(np.repeat(prefix_lengths, counts)),
    )
    return rows, tensor(np.concatenate([job.ids for job in jobs])), tensor(ends - 1)


class State:
    """What decoding steps read and write in place; rows behind the live ones are idle."""

    def __init__(self, num_rows: int, max_tokens: int, idle_slot: int, device: torch.device):
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.requests, self.tokens, self.cells = (integers(num_rows) for _ in range(3))
        self.counts, self.running, self.slots = (integers(num_rows) for _ in range(3))
        self.prefix_slots, self.prefix_lengths = integers(num_rows), integers(num_rows)
        self.every_row = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.ones = torch.ones_like(self.counts)
        self.inverse_temperature = torch.ones(1, device=device)
        self.stops = torch.full((MAX_STOPS,), -1, dtype=torch.int32, device=device)
        self.out_tokens = integers(num_rows, max_tokens)
        self.out_logps = torch.zeros((num_rows, max_tokens), device=device)
        self.idle_slot = idle_slot

    def begin(
        self, requests: Sequence[Request], sessions: Sequence[Session], params: SamplingParams
    ) -> None:
        """Get ready for the first draw of one row a request."""
        num_rows, device = len(requests), self.slots.device
        pairs = list(zip(requests, sessions, strict=True))
        columns = {
            self.seeds: [r.seed for r, _ in pairs],
            self.slots: [s.slot for _, s in pairs],
            self.prefix_slots: [s.prefix for _, s in pairs],
            self.prefix_lengths: [s.prefix_length for _, s in pairs],
            # A draw moves a row on by one: to the cell of the token that is drawn.
            self.cells: [len(r.prompt.ids) - s.prefix_length - 1 for r, s in pairs],
        }
        for tensor, values in columns.items():
            tensor[:num_rows] = torch.tensor(values, device=device)
        self.requests[:num_rows] = self.every_row[:num_rows]
        self.counts[:num_rows] = 0
        self.running[:num_rows] = 1
        self._idle(num_rows)
        self.inverse_temperature.fill_(1.0 / params.temperature if params.temperature else 0.0)
        unused = MAX_STOPS - len(params.stop_ids)
        self.stops.copy_(torch.tensor([*params.stop_ids, *[-1] * unused], device=device))

    def drawn(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """What `draw` takes, in its order."""
        mine = self.seeds, self.requests, self.tokens, self.cells, self.counts, self.running
        return tuple(tensor[:num_rows] for tensor in mine)

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
        prefix = self.prefix_slots, self.prefix_lengths
        for tensor in (*self.drawn(len(self.slots)), self.slots, *prefix):
            tensor[: len(rows)] = tensor[rows]
        self._idle(num_live)

    def _idle(self, start: int) -> None:
        for tensor in (self.running, self.cells, self.prefix_slots, self.prefix_lengths):
            tensor[start:] = 0
        self.slots[start:] = self.idle_slot
