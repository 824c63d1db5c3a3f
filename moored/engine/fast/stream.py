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

from moored.engine.base import Request, SamplingParams, Stream, check_text_prompt
from moored.engine.fast.capture import Fetch
from moored.engine.fast.rows import (
    check_fast_params,
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

FEWEST_STEPS, MOST_STEPS = 8, 32
"""Decoding steps of a chunk. A row that ended idles until the end of the chunk after its own."""
LONG_S, SHORT_S = 0.02, 0.004
"""While the host waits longer for a chunk, the next may have fewer than `FEWEST_STEPS`; it has more
again when the host waits less than the second."""
PREFILL_TOKENS = 32768
"""Bound on the tokens of one forward pass."""
PATIENCE_S = 1.0
"""How long nothing is written before episodes whose environments are busy lose their slots."""


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
    replies: Fetch
    """`State.replies` of these lanes after the steps."""


class SlotStream(Stream):
    """Replies under way on the slots of a `SlotSampler`. One stream writes at a time."""

    is_lockstep = False

    def __init__(
        self, sampler: SlotSampler, params: SamplingParams, *, come_back: bool = True
    ) -> None:
        """`come_back`: sessions may go on with another request."""
        check_fast_params(params)
        self._sampler = sampler
        self._params = params
        self._queue: deque[Request] = deque()
        self._under_way: set[int] = set()
        self._lanes: list[_Row | None] = []
        self._chunk: _Chunk | None = None
        self._num_steps = FEWEST_STEPS
        self._sessions: set[int] = set()
        """Submitted, and not ended since; they may come back."""
        self._come_back = come_back
        self._stuck_since_s: float | None = None

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
            has_entered = self._admit(may_wait=wait_s is not None)
            previous, self._chunk = self._chunk, self._launch(has_entered)
            if previous is None and self._chunk is None:
                assert wait_s is not None, "replies are under way, but nothing is computed"
                time.sleep(min(wait_s, PATIENCE_S))
                return []
            finished = self._finish(previous)
            if finished or (wait_s is not None and time.monotonic() - start >= wait_s):
                return finished

    def end(self, sessions: Sequence[int]) -> None:
        if not self._under_way.isdisjoint(sessions):
            raise MooredError("a session whose reply is under way cannot end; poll first")
        self._sessions.difference_update(sessions)
        self._sampler.end_sessions(sessions, self._queue)

    def close(self) -> None:
        if any(self._lanes) and self._sampler.slots.num_rows:
            self._sampler.state.stop_all()
        self._queue.clear()
        self._under_way.clear()
        self._lanes, self._chunk = [], None
        self._sampler.end_sessions(sorted(self._sessions))
        self._sessions.clear()
        self._sampler.let_go(self)

    def _admit(self, *, may_wait: bool) -> bool:
        """Enqueue the entry of rows that wait, as many as there are slots for."""
        if not self._queue:
            return False
        slots = self._sampler.slots
        longest = max(len(r.prompt.ids) for r in self._queue) + self._params.max_tokens
        if self._sampler.reserve(len(self._sessions), longest, self._params):
            slots = self._sampler.slots
            self._start_over()
        requests, kept = self._choose(may_wait=may_wait)
        if not requests:
            return False
        jobs, owners = slots.place(requests, kept, self._queue)
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

    def _choose(self, *, may_wait: bool) -> tuple[list[Request], set[int]]:
        """Who of the queue enters now, and which sessions keep their slots.

        Sessions that go on from what their slot holds are first. Others get slots that no session
        of this stream needs: to take that of one whose environment is still busy costs its whole
        dialogue, computed again. They get such slots too when nothing has been written for so long
        that waiting costs more, or at once where nobody could submit anything meanwhile.
        """
        slots = self._sampler.slots
        known, new = [], deque[Request]()
        for request in self._queue:
            (known if slots.knows(request) else new).append(request)
        kept = (slots.sessions.keys() & self._sessions) - {request.session for request in new}
        is_stuck = not known and not any(self._lanes) and len(kept) == slots.num_rows
        if is_stuck and (not may_wait or self._is_out_of_patience()):
            is_stuck, kept = False, set()
        if not is_stuck:
            self._stuck_since_s = None
        num_new = min(len(new), slots.num_rows - len(kept))
        chosen = known + [new.popleft() for _ in range(num_new)]
        self._queue = new
        return chosen, kept

    def _is_out_of_patience(self) -> bool:
        now_s = time.monotonic()
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        return now_s - self._stuck_since_s >= PATIENCE_S

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
        max_tokens = self._params.max_tokens
        missing = max_tokens - min((row.num_drawn for row in rows), default=max_tokens)
        num_steps = max(0, min(self._num_steps, missing))
        if not num_steps and not has_entered:
            return None
        self._close_gaps(rows)
        self._sampler.advance(self._sampler.padded(rows[-1].lane + 1), num_steps)
        for row in rows:
            row.num_drawn += num_steps
        longest = min(max_tokens, max(row.num_drawn for row in rows))
        lanes = self._lanes[: rows[-1].lane + 1]
        return _Chunk(lanes, self._sampler.fetch(len(lanes), longest))

    def _close_gaps(self, rows: list[_Row]) -> None:
        """Move rows to the first lanes once steps of fewer lanes would do."""
        if self._sampler.padded(len(rows)) == self._sampler.padded(rows[-1].lane + 1):
            return
        lanes = self._sampler.uploads.send(np.array([row.lane for row in rows]))
        self._sampler.state.order(lanes, len(rows))
        for lane, row in enumerate(rows):
            row.lane = lane
        self._lanes = [*rows]

    def _finish(self, chunk: _Chunk | None) -> list[tuple[int, Completion]]:
        """Wait for a chunk; the replies that ended in it."""
        if chunk is None:
            return []
        was_done, start = chunk.replies.is_done, time.monotonic()
        found = chunk.replies.wait()
        self._adapt(was_done=was_done, waited_s=time.monotonic() - start)
        (counts, running), written = found[..., 0], found[..., 1:]
        stopped = [(lane, chunk.lanes[lane]) for lane in np.flatnonzero(running == 0).tolist()]
        ended = [(lane, row) for lane, row in stopped if row is not None and not row.is_done]
        if not ended:
            return []
        for _, row in ended:
            row.is_done, row.session.is_writing = True, False
            self._lanes[row.lane] = None
            self._under_way.discard(row.request.session)
            if not self._come_back:
                self._sessions.discard(row.request.session)
        lanes = [lane for lane, _ in ended]
        lengths = counts[lanes].tolist()
        # Copied: the memory of the fetch is used again.
        tokens, logps = written[:, lanes, : max(lengths)]
        rows = [(row.request, row.session) for _, row in ended]
        completions = self._sampler.complete(
            tokens, logps.view(np.float32), lengths, rows, self._params
        )
        sessions = (row.request.session for _, row in ended)
        return list(zip(sessions, completions, strict=True))

    def _adapt(self, *, was_done: bool, waited_s: float) -> None:
        """Longer chunks when the device was done before the host asked, else shorter ones.

        A short chunk lets rows leave and enter soon; a long one costs the host less. Chunks are of
        few steps only while even these keep the device busy for long.
        """
        if was_done:
            self._num_steps = min(2 * self._num_steps, MOST_STEPS)
        elif self._num_steps > FEWEST_STEPS:
            self._num_steps = max(self._num_steps // 2, FEWEST_STEPS)
        elif waited_s > LONG_S:
            self._num_steps = max(self._num_steps // 2, 1)
        elif waited_s < SHORT_S:
            self._num_steps = min(2 * self._num_steps, FEWEST_STEPS)
