"""The sampler of a driver: requests go to the ranks of a team, each with a sampler of its own.

A session stays with the rank that has its cache. Sessions that begin with the same prompt go to one
rank, which computes the prompt once; groups are dealt out evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moored.engine.base import LockstepStream, Request, SamplingParams, Stream, check_requests
from moored.engine.workers.split import deal, gather
from moored.engine.workers.team import Team
from moored.types import Completion

POLL_S = 0.02
"""How long a rank goes on writing before it looks for new requests: no rank may wait for a reply of
its own while others have finished theirs."""
_stream_numbers = itertools.count()


class Places:
    """The rank of every session that is under way."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rank_of: dict[int, int] = {}

    def place(self, requests: Sequence[Request]) -> list[int]:
        """The rank of each request; a session that is new comes where fewest are."""
        loads = [0] * self._size
        for rank in self._rank_of.values():
            loads[rank] += 1
        groups: dict[bytes, list[int]] = {}
        for request in requests:
            if request.session not in self._rank_of:
                groups.setdefault(request.prompt.key, []).append(request.session)
        for sessions in sorted(groups.values(), key=len, reverse=True):
            rank = loads.index(min(loads))
            self._rank_of |= dict.fromkeys(sessions, rank)
            loads[rank] += len(sessions)
        return [self._rank_of[request.session] for request in requests]

    def forget(self, sessions: Sequence[int]) -> list[list[int]]:
        """The sessions of each rank; one that never got a reply is on none."""
        known = [session for session in dict.fromkeys(sessions) if session in self._rank_of]
        return deal(known, [self._rank_of.pop(session) for session in known], self._size)


class TeamSampler:
    """Writes replies on all ranks of a team; `streams` where the workers' samplers overlap them."""

    def __init__(self, team: Team, *, streams: bool) -> None:
        self.team = team
        self._streams = streams
        self._places = Places(team.size)

    def stream(self, params: SamplingParams) -> Stream:
        return TeamStream(self.team, params) if self._streams else LockstepStream(self, params)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """One completion for each request, in order; sessions are kept."""
        check_requests(requests, params)
        ranks = self._places.place(requests)
        parts = deal(requests, ranks, self.team.size)
        return gather(self.team.call("generate", [(part,) for part in parts], params), ranks)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.team.call("end_sessions", [(part,) for part in self._places.forget(sessions)])


class TeamStream(Stream):
    """Replies under way on all ranks: each poll hands over what is new and asks every rank."""

    is_lockstep = False

    def __init__(self, team: Team, params: SamplingParams) -> None:
        self._team = team
        self._number = next(_stream_numbers)
        self._places = Places(team.size)
        self._waiting: list[Request] = []
        self._ended: list[int] = []
        self._num_writing = 0
        self._team.call("open_stream", None, self._number, params)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self._num_writing += 1

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        while self._num_writing:
            ended, self._ended = self._places.forget(self._ended), []
            requests, self._waiting = self._waiting, []
            parts = deal(requests, self._places.place(requests), self._team.size)
            per_rank = list(zip(parts, ended, strict=True))
            found = self._team.call("poll_stream", per_rank, self._number, POLL_S)
            finished = [each for part in found for each in part]
            self._num_writing -= len(finished)
            if finished or wait_s is not None:
                return finished
        return []

    def end(self, sessions: Sequence[int]) -> None:
        self._ended += sessions

    def close(self) -> None:
        self._team.call("close_stream", None, self._number)
