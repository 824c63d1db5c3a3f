"""The parts of a simulation: a clock with events, queues, samplers and distributions.

Everything happens at some second of simulated time. `Clock` calls what is due in order; a `Queue`
serves one after the other; a `Replica` writes replies together, each token of all rows in one step,
as samplers with continuous batching do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Action = Callable[[], None]


class Clock:
    """Simulated time; equal times go in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, second: float, action: Action) -> None:
        heapq.heappush(self._due, (second, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()


class Queue:
    """Serves in the order of arrival, `servers` at a time: a driver, or a link."""

    def __init__(self, clock: Clock, servers: int = 1) -> None:
        self._clock = clock
        self._free = [0.0] * servers
        self.busy_s = 0.0
        self.waited_s = 0.0

    def serve(self, seconds: float, done: Action) -> None:
        """Take `seconds` of a server as soon as one is free, then call `done`."""
        now = self._clock.now
        begin = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + seconds)
        self.busy_s += seconds
        self.waited_s += begin - now
        self._clock.at(begin + seconds, done)


class Replica:
    """A sampler whose decoding step takes `step_s + row_s * rows`; every row gains a token.

    At most `max_rows` are written at a time, others wait. Between two events all rows advance
    equally, so that it is enough to know when the next one ends.
    """

    def __init__(self, clock: Clock, step_s: float, row_s: float, max_rows: int) -> None:
        self._clock = clock
        self._step_s, self._row_s, self._max_rows = step_s, row_s, max_rows
        self._rows: list[tuple[float, int, Action]] = []
        """Level at which each row ends, in tokens since the beginning."""
        self._waiting: deque[tuple[float, Action]] = deque()
        self._numbers = itertools.count()
        self._level, self._since, self._turn = 0.0, 0.0, 0
        self.sessions = 0
        """Episodes that have their cache here."""
        self.written_tokens = 0.0
        self.busy_s = 0.0

    def write(self, tokens: float, done: Action) -> None:
        """Write a reply of `tokens`, then call `done`."""
        self._advance()
        self.written_tokens += tokens
        if len(self._rows) < self._max_rows:
            self._enter(tokens, done)
        else:
            self._waiting.append((tokens, done))
        self._plan_next()

    def _enter(self, tokens: float, done: Action) -> None:
        heapq.heappush(self._rows, (self._level + tokens, next(self._numbers), done))

    def _advance(self) -> None:
        """Bring all rows to the present."""
        elapsed = self._clock.now - self._since
        self._since = self._clock.now
        # Where a token takes no time rows end at once, and nothing elapses.
        if self._rows and elapsed > 0.0:
            self._level += elapsed / self._token_s()
            self.busy_s += elapsed

    def _token_s(self) -> float:
        return self._step_s + self._row_s * len(self._rows)

    def _plan_next(self) -> None:
        """Ask for the end of the next row; what was asked before no longer counts."""
        self._turn += 1
        if self._rows:
            turn, left = self._turn, self._rows[0][0] - self._level
            self._clock.after(max(left, 0.0) * self._token_s(), lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        self._level = max(self._level, self._rows[0][0])
        ended = []
        while self._rows and self._rows[0][0] <= self._level + 1e-9:
            ended.append(heapq.heappop(self._rows)[2])
        while self._waiting and len(self._rows) < self._max_rows:
            self._enter(*self._waiting.popleft())
        self._plan_next()
        for done in ended:
            done()


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution by its quantiles, from the least to the greatest value, or a log-normal one.

    Between quantiles the logarithm of values is interpolated, so that measured latencies, whose
    tails are long, can be drawn from.
    """

    shares: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    median: float = 0.0
    sigma: float = 0.0
    """Of the logarithm; 0 is a constant."""
    most: float = field(default=float("inf"))
    """Greater values are cut off here: a time limit, or a longest reply."""

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        if self.shares:
            drawn = np.exp(np.interp(rng.random(num), self.shares, np.log(self.values)))
        else:
            drawn = self.median * np.exp(self.sigma * rng.standard_normal(num))
        return np.minimum(drawn, self.most)


QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)


def spread_of(values: Sequence[float]) -> Spread:
    """The distribution that was measured; values are above 0."""
    found = np.quantile(values, QUANTILES)
    return Spread(shares=QUANTILES, values=tuple(float(value) for value in found))
