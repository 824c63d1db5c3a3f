"""Replies under way on all replicas: requests go to the least busy one, and stay with the one that
keeps their session. What a dead replica was writing is written again by another: a reply is a
function of weights, prompt and seed, so nothing changes but the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moored.engine.base import Request, SamplingParams, Stream, check_params, check_text_prompt
from moored.engine.ray.replica import Order, to_completion, to_packet
from moored.errors import MooredError
from moored.types import Completion

if TYPE_CHECKING:
    from moored.engine.ray.replicas import ReplicaSampler, Seat

Finished = list[tuple[int, Completion]]
LOOK_UP_S = 1.0
"""Longest wait before replicas that were lost are looked after again."""


class ReplicaStream(Stream):
    """One call per replica is under way; what comes in meanwhile goes with the next."""

    def __init__(
        self, sampler: ReplicaSampler, ray: Any, params: SamplingParams, number: int
    ) -> None:
        check_params(params)
        self._sampler, self._ray = sampler, ray
        self._params, self._number = params, number
        self._homes: dict[int, Seat] = {}
        self._homeless: list[Request] = []
        self.is_lockstep = sampler.is_lockstep

    def submit(self, request: Request) -> None:
        check_text_prompt(request.prompt)
        seat = self._homes.get(request.session)
        if seat is not None and request.session in seat.under_way:
            raise MooredError(f"session {request.session} already has a request under way")
        self._place(request)

    def _place(self, request: Request) -> None:
        seat = self._homes.get(request.session)
        if seat is None or not seat.is_up:
            seat = min(self._sampler.up, key=lambda seat: seat.load, default=None)
        if seat is None:
            self._homeless.append(request)
            return
        self._homes[request.session] = seat
        seat.outbox.append(request)

    def poll(self, wait_s: float | None = None) -> Finished:
        deadline_s = None if wait_s is None or self.is_lockstep else time.monotonic() + wait_s
        while True:
            self._house()
            if not self._homeless and not any(seat.load for seat in self._sampler.seats):
                return []
            self._send()
            finished = self._collect(deadline_s)
            if finished or (deadline_s is not None and time.monotonic() >= deadline_s):
                return finished

    def _house(self) -> None:
        """Look after lost replicas, and place what waits for one."""
        self._sampler.look_after()
        if self._homeless and not self._sampler.up:
            self._sampler.wait_for_one()
        waiting, self._homeless = self._homeless, []
        for request in waiting:
            self._place(request)

    def _send(self) -> None:
        for seat in self._sampler.up:
            if seat.call is not None or not seat.load:
                continue
            order = Order(
                stream=self._number,
                params=self._params,
                version=self._sampler.version,
                requests=tuple(map(to_packet, seat.outbox)),
                ended=tuple(seat.ended),
            )
            seat.under_way |= {request.session: request for request in seat.outbox}
            seat.outbox, seat.ended = [], []
            seat.call, seat.called_at_s = seat.actor.work.remote(order), time.monotonic()

    def _collect(self, deadline_s: float | None) -> Finished:
        """Wait for calls until one brings replies."""
        calls = {seat.call: seat for seat in self._sampler.seats if seat.call is not None}
        if not calls:
            return []
        wait_s = LOOK_UP_S
        if deadline_s is not None:
            wait_s = min(wait_s, max(0.0, deadline_s - time.monotonic()))
        done, _ = self._ray.wait(list(calls), timeout=wait_s)
        if done:
            # Whatever else is there by now comes along.
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        if len(done) < len(calls):
            self._sampler.end_hung()
        return [reply for call in done for reply in self._take(calls[call], call)]

    def _take(self, seat: Seat, call: Any) -> Finished:
        exceptions = self._ray.exceptions
        seat.call = None
        try:
            found = self._sampler.result(call)
        except (exceptions.RayActorError, exceptions.ObjectLostError):
            found = None
        if found is None:
            # Dead, or restarted since: then it has forgotten the weights.
            for request in self._sampler.lose(seat):
                self._place(request)
            return []
        finished = [to_completion(reply) for reply in found]
        if finished:
            self._sampler.note_replies()
        for session, _ in finished:
            seat.under_way.pop(session, None)
        return finished

    def end(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            if seat := self._homes.pop(session, None):
                seat.ended.append(session)

    def close(self) -> None:
        self._homeless.clear()
        self._sampler.end_stream(self._number, self._sampler.seats)
