"""The groups of the next step, rolled out beside the update of this one (`rollout.max_lag`).

They are written with the weights from before that update, whose version every turn records. At a
lag of 0 nothing runs beside anything: `take` rolls out, and the other methods do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from moored.runlog.rollouts import read_groups, write_groups
from moored.types import Group

RollOut = Callable[[int, Callable[[int, int], None]], list[Group]]
"""(step, called now and then) -> its groups."""
FILE = "next_groups.parquet"
"""In a checkpoint: the groups that the step after it will use."""


class _Dropped(Exception):
    """Ends a rollout that is no longer wanted."""


class Ahead:
    """Groups by step; `roll_out` is called in a thread that works while nothing else samples."""

    def __init__(self, roll_out: RollOut, *, max_lag: int) -> None:
        self._roll_out, self._max_lag = roll_out, max_lag
        self._ready: tuple[int, list[Group]] | None = None
        self._under_way: Future[tuple[int, list[Group], float]] | None = None
        self._is_dropped = threading.Event()

    def take(self, step: int) -> list[Group]:
        """The groups of a step: those that are ready, or rolled out now."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == step:
            return ready[1]
        return self._roll_out(step, lambda num_replies, num_live: None)

    def begin(self, step: int) -> None:
        """Roll out the groups of a later step from now on, where the lag allows it."""
        if self._max_lag == 0:
            return
        assert self._under_way is None, "one step ahead at a time"
        self._is_dropped.clear()
        threads = ThreadPoolExecutor(1)
        self._under_way = threads.submit(self._timed, step)
        threads.shutdown(wait=False)

    def wait(self) -> float:
        """Return once nothing samples any more; seconds that the rollout took beside the update."""
        if self._under_way is None:
            return 0.0
        futures.wait([self._under_way])
        done, self._under_way = self._under_way, None
        step, groups, seconds = done.result()
        self._ready = (step, groups)
        return seconds

    def drop(self) -> None:
        """Forget what is ready or under way; returns once nothing samples any more.

        A rollout notices within a second or so, or when an environment has answered.
        """
        if self._under_way is not None:
            self._is_dropped.set()
            futures.wait([self._under_way])
        self._under_way, self._ready = None, None

    def save(self, folder: Path) -> None:
        """Write the groups that wait, if there are any."""
        if self._ready is not None:
            step, groups = self._ready
            write_groups(folder / FILE, groups, step=step, kept=[True] * len(groups))

    def load(self, folder: Path, step: int) -> None:
        """Go back to what `save` wrote before this step."""
        self.drop()
        if (folder / FILE).exists():
            self._ready = (step, read_groups(folder / FILE))

    def _timed(self, step: int) -> tuple[int, list[Group], float]:
        start_s = time.perf_counter()
        groups = self._roll_out(step, self._check)
        return step, groups, time.perf_counter() - start_s

    def _check(self, num_replies: int, num_live: int) -> None:
        if self._is_dropped.is_set():
            raise _Dropped
