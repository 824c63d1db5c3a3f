"""How a driver talks to a replica in another process, simulated: the calls of `engine.kind=ray`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulation.events import Action, Clock, Queue

from moored.errors import MooredError

Write = Callable[[Action], None]
"""Begins to write a reply; what it is given is called when the reply has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of replicas: one at a time to each, with all requests that came in meanwhile.

    A call comes back with the replies that have ended, or after `poll_s` without any.
    """

    call_s: float
    """What a call costs the driver."""
    request_s: float
    """What each request and its reply add, half of it on the way there and half on the way back."""
    poll_s: float

    def __post_init__(self) -> None:
        if min(self.call_s, self.request_s) < 0.0 or not self.poll_s > 0.0:
            raise MooredError(
                f"calls take 0 or more seconds and wait for more than 0, or time would stand "
                f"still; got {self}"
            )


class Line:
    """The calls between the driver and one replica."""

    def __init__(self, clock: Clock, driver: Queue, given: Calls, network_s: float) -> None:
        self._clock, self._driver, self._given = clock, driver, given
        self._network_s = network_s
        self._outbox: list[tuple[Write, Action]] = []
        self._ended: list[Action] = []
        self._num_writing = 0
        self._is_calling = False
        self._waiting = 0
        """Number of the call that waits at the replica; 0 where none does."""
        self._num_calls = 0

    def submit(self, write: Write, take: Action) -> None:
        """Have a reply written; `take` is called on the driver once a call has brought it."""
        self._outbox.append((write, take))
        if not self._is_calling:
            self._call()

    def _call(self) -> None:
        self._is_calling = True
        requests, self._outbox = self._outbox, []
        self._num_writing += len(requests)
        cost = self._given.call_s + self._given.request_s / 2 * len(requests)
        self._driver.serve(
            cost, lambda: self._clock.after(self._network_s, lambda: self._arrive(requests))
        )

    def _arrive(self, requests: list[tuple[Write, Action]]) -> None:
        self._num_calls += 1
        number = self._waiting = self._num_calls
        for write, take in requests:
            write(lambda take=take: self._end(take))
        if self._ended and self._waiting:
            self._come_back()
        elif self._waiting:
            self._clock.after(self._given.poll_s, lambda: self._give_up(number))

    def _end(self, take: Action) -> None:
        self._ended.append(take)
        if self._waiting:
            self._come_back()

    def _give_up(self, number: int) -> None:
        if self._waiting == number:
            self._come_back()

    def _come_back(self) -> None:
        """Replies that end at the same moment come along; later ones wait for the next call."""
        self._waiting = 0

        def leave() -> None:
            ended, self._ended = self._ended, []
            self._clock.after(self._network_s, lambda: self._land(ended))

        self._clock.after(0.0, leave)

    def _land(self, ended: list[Action]) -> None:
        self._num_writing -= len(ended)

        def handled() -> None:
            for take in ended:
                take()
            self._is_calling = False
            if self._outbox or self._num_writing:
                self._call()

        self._driver.serve(self._given.request_s / 2 * len(ended), handled)
