"""Which slot of the cache belongs to which episode, or to a prompt that several episodes share.

Plain bookkeeping; `SlotSampler` moves the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from moored.engine.base import Request

MIN_SHARERS = 4
"""Episodes that a common first prompt needs to get a slot of its own."""


@dataclass(slots=True, eq=False)
class Session:
    """Where an episode's keys and values are, and for which tokens."""

    slot: int
    prefix: int
    """Slot of the shared first prompt, or the episode's own."""
    prefix_length: int
    ids: np.ndarray
    """All tokens that are held, those of the prefix included."""
    is_writing: bool = False
    """True while a stream writes its reply: its slot cannot be given to others."""

    @property
    def num_held(self) -> int:
        """Tokens in the episode's own slot."""
        return len(self.ids) - self.prefix_length

    def move(self, slot: int) -> None:
        if self.prefix == self.slot:
            self.prefix = slot
        self.slot = slot


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens to run through the model for one slot."""

    session: Session
    before: int
    """Tokens the slot already holds."""
    ids: np.ndarray


class Slots:
    """`num_rows` slots of episodes, then those of shared prompts, then one for idle rows."""

    def __init__(self, num_rows: int) -> None:
        num_shared = num_rows // MIN_SHARERS
        self.num_rows = num_rows
        self.idle = num_rows + num_shared
        self.sessions: dict[int, Session] = {}
        self._free = list(range(num_rows))[::-1]
        self._free_shared = list(range(num_rows, self.idle))[::-1]
        self._users: Counter[int] = Counter()
        self._prompts: dict[bytes, int] = {}
        """Slot of each shared prompt, by its key."""

    @property
    def num_free(self) -> tuple[int, int]:
        """Unused slots of episodes and of shared prompts."""
        return len(self._free), len(self._free_shared)

    def knows(self, request: Request) -> bool:
        """True where the episode has a slot, and the request goes on from what it holds."""
        session = self.sessions.get(request.session)
        if session is None or len(session.ids) >= len(request.prompt.ids):
            return False
        return bool((request.prompt.ids[: len(session.ids)] == session.ids).all())

    def end(self, keys: Iterable[int], waiting: Collection[Request] = ()) -> None:
        """Free the slots of episodes, and of prompts that no other and no `waiting` one has."""
        for key in keys:
            session = self.sessions.pop(key, None)
            if session is None:
                continue
            self._free.append(session.slot)
            if session.prefix != session.slot:
                self._users[session.prefix] -= 1
        unused = [slot for slot, count in self._users.items() if not count]
        if not unused:
            return
        wanted = {self._prompts.get(request.prompt.key) for request in waiting}
        for slot in unused:
            if slot not in wanted:
                del self._users[slot]
                self._free_shared.append(slot)
        self._prompts = {key: slot for key, slot in self._prompts.items() if slot in self._users}

    def place(
        self,
        requests: Sequence[Request],
        kept: Collection[int] = (),
        waiting: Collection[Request] = (),
    ) -> tuple[list[Job], list[int]]:
        """Give every request a slot; what is to be computed, and whose output each takes.

        Where too few are free, episodes lose theirs, except the `kept` ones. A prompt that
        `waiting` requests have too is shared with them.
        """
        known = {r.session for r in requests if self.knows(r)}
        keys = {r.session: r.prompt.key for r in requests if r.session not in known}
        wanted = [*requests, *waiting]
        self.end(keys, wanted)
        num_missing = len(keys) - len(self._free)
        if num_missing > 0:
            here = known.union(keys, kept)
            others = (k for k, s in self.sessions.items() if k not in here and not s.is_writing)
            self.end(list(islice(others, num_missing)), wanted)
        sharers = Counter(keys.values())
        if sharers:
            sharers.update(r.prompt.key for r in waiting if r.prompt.key in sharers)
        jobs: list[Job] = []
        owners: list[int] = []
        first: dict[bytes, int] = {}
        for request in requests:
            key = keys.get(request.session)
            if key in first:
                owners.append(first[key])
                self._open(request, jobs[first[key]].session.slot, len(request.prompt.ids))
                continue
            owners.append(len(jobs))
            if key is None:
                session = self.sessions[request.session]
                new = request.prompt.ids[len(session.ids) :]
                jobs.append(Job(session, session.num_held, new))
            elif key in self._prompts:
                # Computed before; the last token once more, for the output behind it.
                shared = len(request.prompt.ids) - 1
                session = self._open(request, self._prompts[key], shared)
                jobs.append(Job(session, 0, request.prompt.ids[shared:]))
            elif sharers[key] >= MIN_SHARERS and self._free_shared:
                first[key] = len(jobs)
                slot = self._free_shared.pop()
                self._open(request, slot, len(request.prompt.ids))
                jobs.append(Job(Session(slot, slot, 0, request.prompt.ids), 0, request.prompt.ids))
                if len(request.prompt.ids) > 1:
                    self._prompts[key] = slot
            else:
                jobs.append(Job(self._open(request, None, 0), 0, request.prompt.ids))
        return jobs, owners

    def line_up(self, sessions: Sequence[Session]) -> tuple[dict[int, int], int]:
        """Give row i slot i; which slot each moved one is to be filled from, and how far."""
        at = {session.slot: session for session in self.sessions.values()}
        held, source = 0, {}
        for row, session in enumerate(sessions):
            old, other = session.slot, at.get(row)
            if old == row:
                continue
            source[row], source[old] = source.get(old, old), source.get(row, row)
            held = max(held, session.num_held, other.num_held if other else 0)
            at[row] = at.pop(old)
            session.move(row)
            if other is None:
                self._free[self._free.index(row)] = old
            else:
                at[old] = other
                other.move(old)
        return source, held

    def swap(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Exchange the slots of episodes, pair by pair."""
        at = {session.slot: session for session in self.sessions.values()}
        for here, there in zip(a, b, strict=True):
            at[here].move(there)
            at[there].move(here)

    def _open(self, request: Request, prefix: int | None, prefix_length: int) -> Session:
        slot = self._free.pop()
        if prefix is not None:
            self._users[prefix] += 1
        held_in = slot if prefix is None else prefix
        session = Session(slot, held_in, prefix_length, request.prompt.ids)
        self.sessions[request.session] = session
        return session


def split_jobs(jobs: Sequence[Job], max_tokens: int, is_padded: bool) -> Iterator[Sequence[Job]]:
    """Jobs in order, at most `max_tokens` at a time, perhaps with padding (one job at least)."""
    start, used = 0, 0
    for stop, job in enumerate(jobs):
        size = len(job.ids)
        used = size * (stop - start + 1) if is_padded else used + size
        if stop > start and used > max_tokens:
            yield jobs[start:stop]
            start, used = stop, size
    yield jobs[start:]
