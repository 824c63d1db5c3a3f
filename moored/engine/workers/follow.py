"""What ranks other than 0 do: wait for calls of the driver, compute, and leave when it ends.

They print nothing. What one raises is told to the driver, which prints it and ends all ranks.
"""

from __future__ import annotations

import signal
import time
import traceback
from typing import NoReturn

from moored.engine.workers.lines import Lines, leave, meet, part
from moored.engine.workers.ranks import Rank
from moored.engine.workers.torchrun import END, GRACE_S, STOP_SIGNALS, Worker
from moored.errors import MooredError

TURN_S = 1.0
"""How long ranks with less to say wait for those with more."""


def follow(rank: Rank) -> NoReturn:
    """Serve the driver; the process ends here."""
    if not meet(rank):
        leave(0)
    lines = Lines(rank)
    watchers = lines.watch(_end_soon)
    stop = _StopWish()
    worker = Worker(rank)
    while True:
        try:
            method, args = lines.hand_out()
        except RuntimeError:
            leave(1)  # the driver has gone
        if method == END:
            part(lines, watchers)
            leave(0)
        try:
            result = worker.run(method, args)
            lines.collect((result, stop.is_made))
        except Exception as error:
            _tell(lines, error)
            leave(1)


def _tell(lines: Lines, error: Exception) -> None:
    """Why this rank ends, unless the driver has gone first."""
    is_known = isinstance(error, MooredError)
    if not is_known:
        # It may come of another rank's end, which the driver hears of by itself.
        time.sleep(TURN_S)
    try:
        lines.tell(str(error) if is_known else f"{type(error).__name__}: {error}")
    except RuntimeError:
        return
    if not isinstance(error, MooredError | RuntimeError):
        traceback.print_exception(error)
    # An error that all ranks have is the driver's to print; let it end first.
    time.sleep(TURN_S)


def _end_soon(driver: int, why: str) -> None:
    """The driver is lost; a pass that waits for it never ends by itself."""
    time.sleep(GRACE_S)
    leave(1)


class _StopWish:
    """Notes the first SIGINT or SIGTERM, for the driver to act on; the second ends the rank."""

    def __init__(self) -> None:
        self.is_made = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        if self.is_made and number == signal.SIGTERM:
            leave(128 + number)
        self.is_made = True
