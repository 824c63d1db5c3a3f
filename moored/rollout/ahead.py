"""The groups of the next step, rolled out beside the update of this one (`rollout.max_lag`).

They are written with the weights from before that update, whose version every turn records. At a
lag of 0 nothing runs beside anything: `take` rolls out, and the other methods do nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from moored.runlog.rollouts import read_groups, write_groups
from moored.types import Group

RollOut = Callable[[int, Callable[[int, int], None]], list[Group]]
"""(step, called now and then) -> its groups."""
FILE = "next_groups.parquet"
"""In a checkpoint: the groups that the step after it will use."""


class _Dropped(Exception):
    """Ends a rollout that is no longer wanted."""


class _Rollout(threading.Thread):
    """One rollout beside the update, with a result of its own."""

    def __init__(self, roll_out: RollOut, step: int) -> None:
        super().__init__(daemon=True)
        self._roll_out, self.step = roll_out, step
        self.groups: list[Group] | None = None
        self.error: BaseException | None = None
        self.is_dropped = False
        self.seconds = 0.0

    def run(self) -> None:
        start_s = time.perf_counter()
        try:
            self.groups = self._roll_out(self.step, self._check)
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - start_s

    def _check(self, num_replies: int, num_live: int) -> None:
        if self.is_dropped:
            raise _Dropped


class Ahead:
    """Groups by step; `roll_out` is called in a thread that works while nothing else samples."""

    def __init__(self, roll_out: RollOut, *, max_lag: int) -> None:
        self._roll_out, self._max_lag = roll_out, max_lag
        self._ready: tuple[int, list[Group]] | None = None
        self._under_way: _Rollout | None = None

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
        self._under_way = _Rollout(self._roll_out, step)
        self._under_way.start()

    def wait(self) -> float:
        """Return once nothing samples any more; seconds that the rollout took beside the update."""
        if self._under_way is None:
            return 0.0
        done = self._under_way
        done.join()
        self._under_way = None
        if done.error is not None:
            raise done.error
        assert done.groups is not None
        self._ready = (done.step, done.groups)
        return done.seconds

    def drop(self) -> None:
        """Forget what is ready or under way; returns once nothing samples any more.

        A rollout notices within a second or so, or when an environment has answered.
        """
        if self._under_way is not None:
            self._under_way.is_dropped = True
            self._under_way.join()
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
