"""Continuous batching: rows enter and leave while the others are written.

A row runs in a lane of the sampler's state. A poll enqueues the entry of new rows and a chunk of
decoding steps behind the chunk that is under way, and only then waits for that one: the device
always has work, and the caller handles finished replies while the next chunk is computed. R rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from moored.engine.base import Request, SamplingParams, check_text_prompt
from moored.engine.fast.capture import Fetch, to_device
from moored.engine.fast.rows import (
    check_fast_params,
    make_completions,
    pack_entries,
    pack_jobs,
    padded_shape,
)
from moored.engine.fast.slots import Job, Session, split_jobs
from moored.engine.passes import says_out_of_memory
from moored.errors import MooredError
from moored.types import Completion

if TYPE_CHECKING:
    from moored.engine.fast.sampler import SlotSampler

STEPS_PER_CHUNK = 8
"""Decoding steps between checks which rows still run: a row that ended idles for at most 15."""
PREFILL_TOKENS = 32768
"""Bound on the tokens of one forward pass."""


@dataclass(slots=True, eq=False)
class _Row:
    """A reply that is being written."""

    request: Request
    session: Session
    lane: int
    num_drawn: int = 1
    """Tokens it has, if it still runs, once all that is enqueued is done."""
    is_done: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Decoding steps under way."""

    lanes: list[_Row | None]
    flags: Fetch
    """(2, lanes) tokens written, and whether the row still runs, after the steps."""


class SlotStream:
    """Replies under way on the slots of a `SlotSampler`. One stream writes at a time."""

    is_lockstep = False

    def __init__(self, sampler: SlotSampler, params: SamplingParams) -> None:
        check_fast_params(params)
        self._sampler = sampler
        self._params = params
        self._queue: deque[Request] = deque()
        self._under_way: set[int] = set()
        self._lanes: list[_Row | None] = []
        self._chunk: _Chunk | None = None
        self._sessions: set[int] = set()

    @property
    def is_writing(self) -> bool:
        """True while a reply is under way."""
        return bool(self._under_way)

    def submit(self, request: Request) -> None:
        check_text_prompt(request.prompt)
        if request.session in self._under_way:
            raise MooredError(f"session {request.session} already has a request under way")
        self._queue.append(request)
        self._under_way.add(request.session)
        self._sessions.add(request.session)

    @says_out_of_memory("sampling")
    @torch.no_grad()
    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        if not self._under_way:
            return []
        self._sampler.claim(self, self._params)
        start = time.monotonic()
        while True:
            has_entered = self._admit()
            previous, self._chunk = self._chunk, self._launch(has_entered)
            assert previous or self._chunk, "replies are under way, but nothing is left to compute"
            finished = self._finish(previous)
            if finished or (wait_s is not None and time.monotonic() - start >= wait_s):
                return finished

    def close(self) -> None:
        if any(self._lanes):
            self._sampler.state.stop_all()
        self._queue.clear()
        self._under_way.clear()
        self._lanes, self._chunk = [], None
        self._sampler.end_sessions(sorted(self._sessions))

    def _admit(self) -> bool:
        """Enqueue the entry of rows that wait, as many as there are slots for."""
        if not self._queue:
            return False
        slots = self._sampler.slots
        longest = max(len(r.prompt.ids) for r in self._queue) + self._params.max_tokens
        if self._sampler.reserve(len(self._under_way), longest, self._params):
            slots = self._sampler.slots
            self._start_over()
        num_free = slots.num_rows - sum(row is not None for row in self._lanes)
        requests = [self._queue.popleft() for _ in range(min(num_free, len(self._queue)))]
        if not requests:
            return False
        jobs, owners = slots.place(requests)
        rows = self._take_lanes(requests)
        first = 0
        for part in split_jobs(jobs, PREFILL_TOKENS, is_padded=False):
            members = [
                (row, owner - first)
                for row, owner in zip(rows, owners, strict=True)
                if first <= owner < first + len(part)
            ]
            self._enter(part, members)
            first += len(part)
        return True

    def _start_over(self) -> None:
        """The slots were made anew: what was being written is written again, from its prompt."""
        self._queue.extendleft(row.request for row in reversed(self._lanes) if row is not None)
        self._lanes, self._chunk = [], None

    def _take_lanes(self, requests: Sequence[Request]) -> list[_Row]:
        """Rows for requests that have slots, in the first free lanes."""
        free = [lane for lane, row in enumerate(self._lanes) if row is None]
        more = range(len(self._lanes), len(self._lanes) + len(requests) - len(free))
        self._lanes += [None] * len(more)
        sessions = self._sampler.slots.sessions
        rows = [
            _Row(request, sessions[request.session], lane)
            for request, lane in zip(requests, [*free, *more], strict=False)
        ]
        for row in rows:
            row.session.is_writing = True
            self._lanes[row.lane] = row
        return rows

    def _enter(self, jobs: Sequence[Job], members: Sequence[tuple[_Row, int]]) -> None:
        """Compute jobs, and put the rows that take their outputs into their lanes."""
        counts = [len(job.ids) for job in jobs]
        lasts = np.cumsum(counts) - 1
        shape = padded_shape(int(lasts[-1]) + 1, max(len(jobs), len(members)), max(counts))
        state = self._sampler.state
        entries = [(row.request, row.session, row.lane, lasts[job]) for row, job in members]
        idle = state.idle_slot, state.idle_lane
        packed = [pack_entries(entries, shape.rows, *idle), pack_jobs(jobs, shape, idle[0])]
        self._sampler.enter(np.concatenate(packed), shape)

    def _launch(self, has_entered: bool) -> _Chunk | None:
        """Enqueue decoding steps; None when they could draw nothing."""
        rows = [row for row in self._lanes if row is not None]
        missing = max((self._params.max_tokens - row.num_drawn for row in rows), default=0)
        num_steps = min(STEPS_PER_CHUNK, missing)
        if num_steps <= 0 and not has_entered:
            return None
        num_rows = self._close_gaps()
        for _ in range(num_steps):
            self._sampler.step(num_rows)
        for row in rows:
            row.num_drawn += num_steps
        self._sampler.state.retire()
        return _Chunk(list(self._lanes), Fetch(self._sampler.state.flags))

    def _close_gaps(self) -> int:
        """Rows of the next step; once half as many would do, move rows to the first lanes."""
        used = [row for row in self._lanes if row is not None]
        num_rows = self._sampler.padded(used[-1].lane + 1)
        if 2 * self._sampler.padded(len(used)) > num_rows:
            return num_rows
        lanes = np.array([row.lane for row in used])
        self._sampler.state.order(to_device(lanes, self._sampler.device), len(used))
        for lane, row in enumerate(used):
            row.lane = lane
        self._lanes = [*used]
        return self._sampler.padded(len(used))

    def _finish(self, chunk: _Chunk | None) -> list[tuple[int, Completion]]:
        """Wait for a chunk; the replies that ended in it."""
        if chunk is None:
            return []
        counts, running = chunk.flags.wait()
        ended = [
            (row, length)
            for row, length, is_running in zip(
                chunk.lanes, counts.tolist(), running.tolist(), strict=False
            )
            if row is not None and not row.is_done and not is_running
        ]
        if not ended:
            return []
        for row, _ in ended:
            row.is_done, row.session.is_writing = True, False
            self._lanes[row.lane] = None
            self._under_way.discard(row.request.session)
        lengths = [length for _, length in ended]
        tokens, logps = self._sampler.fetch([row.session.slot for row, _ in ended], max(lengths))
        completions = make_completions(
            tokens,
            logps,
            lengths,
            [(row.request, row.session) for row, _ in ended],
            self._params,
            self._sampler.version,
        )
        sessions = (row.request.session for row, _ in ended)
        return list(zip(sessions, completions, strict=True))
