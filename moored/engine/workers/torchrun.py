"""`engine.kind=torchrun`: all ranks start the same command; rank 0 drives, the others follow.

Rank 0 is the driver and the worker of rank 0. The others (`follow`) compute what it calls for.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from moored.config import Config
from moored.engine.local.engine import LocalEngine
from moored.engine.vllm.support import check_vllm
from moored.engine.workers.engine import TeamEngine
from moored.engine.workers.lines import LEAVE, Lines, has_met, leave, meet, part
from moored.engine.workers.ranks import (
    HOW,
    Rank,
    check_gpus,
    check_ranks,
    rank_from,
    ranks_text,
    started_rank,
)
from moored.engine.workers.team import WorkerLost
from moored.engine.workers.worker import RankWorker
from moored.errors import MooredError

GRACE_S = 5.0
"""How long a rank may go on by itself after another was lost."""
END = "end"
"""The call after which followers leave."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_S = 3.0
"""Ctrl-C reaches a rank twice: from the terminal and from torchrun."""


def make_engine(config: Config, *, trains: bool = True) -> TeamEngine | LocalEngine:
    """The engine of rank 0; the other ranks are in `follow`.

    A single rank has nobody to share with: it is the engine of one process.
    """
    rank = rank_from()
    if rank.rank != 0:
        raise MooredError(f"only rank 0 drives; start all ranks with {HOW}")
    if rank.size == 1:
        return OnlyRank(config, trains=trains)
    check_ranks(config, rank.size, trains=trains)
    check_gpus(rank, config.engine.device, torch.cuda.device_count())
    if config.engine.sampler == "vllm":
        check_vllm(config, in_ranks=True)
    meet(rank)
    team = TorchrunTeam(Lines(rank))
    team.call("build", None, config, trains)
    return TeamEngine(config, team)


class OnlyRank(LocalEngine):
    """One process as torchrun starts it: Ctrl-C comes twice."""

    def __init__(self, config: Config, *, trains: bool) -> None:
        self._signals = DriverSignals()
        super().__init__(config, trains=trains)

    def describe(self) -> str:
        return f"{super().describe()}, {ranks_text(1)}"

    def close(self) -> None:
        super().close()
        self._signals.close()


def end_driver(code: object) -> None:
    """What is left to do when the command of rank 0 ends with an exit code."""
    if not code:
        _dismiss_followers()
    elif has_met() and isinstance(code, int):
        atexit._run_exitfuncs()
        leave(code)


def _dismiss_followers() -> None:
    """Let the other ranks go when a command that needs no engine has ended."""
    rank = started_rank()
    if rank is not None and rank.size > 1 and not has_met():
        meet(rank, LEAVE)


class TorchrunTeam:
    """The driver's end of the lines; it has a worker of its own."""

    def __init__(self, lines: Lines) -> None:
        self.size = lines.rank.size
        self._lines = lines
        self._worker = Worker(lines.rank)
        self._failure: BaseException | None = None
        self._lost: tuple[int, str] | None = None
        self._is_closed = False
        self._signals = DriverSignals()
        self._watchers = lines.watch(self._on_loss)
        # Followers are let go whatever way the command ends.
        atexit.register(self.close)

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, /, *args: Any
    ) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        parts = [()] * self.size if per_rank is None else per_rank
        try:
            own = self._lines.hand_out([(method, (*part, *args)) for part in parts])
            result = self._worker.run(*own)
            found = self._lines.collect()[1:]
        except BaseException as error:
            # The others may be anywhere inside the call, so the run cannot go on with them.
            self._failure = self._explained(error)
            raise self._failure from (None if self._failure is error else error)
        if any(wants_stop for _, wants_stop in found):
            self._signals.raise_once()
        return [result, *(part for part, _ in found)]

    def _explained(self, error: BaseException) -> BaseException:
        """A connection that broke is a rank that was lost; all else is what it is."""
        if isinstance(error, MooredError) or not isinstance(error, RuntimeError):
            return error
        if self._lost is None:
            time.sleep(0.5)  # the alarm may be a moment behind
        return error if self._lost is None else loss_of(*self._lost)

    def _on_loss(self, rank: int, why: str) -> None:
        self._lost = self._lost or (rank, why)
        # By then the driver has found out by itself, unless it waits for a device.
        time.sleep(GRACE_S)
        if not self._is_closed:
            os.write(2, f"moored: {loss_of(*self._lost)}\n".encode())
            os._exit(2)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._signals.close()
        if self._failure is None:
            self._lines.hand_out([(END, ())] * self.size)
            part(self._lines, self._watchers)


class Worker:
    """The worker of a rank, which the first call makes."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._worker: RankWorker | None = None

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "build":
            config, trains = args
            self._worker = RankWorker(config, self._rank, trains=trains)
            return None
        return getattr(self._worker, method)(*args)


def loss_of(rank: int, why: str) -> WorkerLost:
    return WorkerLost(
        f"rank {rank} failed: {why}; all ranks have ended, go on from the last checkpoint with "
        f"--resume RUN"
    )


class DriverSignals:
    """Hands signals on to the handlers that were there before, one request once."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS
            }

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._last_s is not None and now - self._last_s < SAME_REQUEST_S:
            return
        self._last_s = now
        handler = self._before[number]
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def raise_once(self) -> None:
        """A follower was asked to stop; the driver too, unless it was already."""
        if self._last_s is None and self._before:
            signal.raise_signal(signal.SIGTERM)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
