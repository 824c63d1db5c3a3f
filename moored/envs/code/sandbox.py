"""Runs programs: a pool of guests that were started in advance, each used for one program.

`SandboxPool` is a resource of the environment `code`. `run(job)` gives one `Outcome` per test. A
test that hangs, crashes or floods costs its guest; the tests after it get a new one, except after a
time-out, which ends the job. Tests that assert have a guest of their own, and calls and results go
through here.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import math
import os
import queue
import secrets
import selectors
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from moored.cores import num_cores
from moored.envs.base import Resource
from moored.envs.code.guest import CALL, DONE, FAILED, READY
from moored.envs.code.isolation import Guest, Isolation, Kind, Limits, make_isolation
from moored.errors import EnvError

logger = logging.getLogger(__name__)

START_LIMIT_S = 30.0
"""Time for a guest to be ready: a new interpreter on a busy machine."""
TOTAL_LIMIT_S = 30.0
"""Time for all tests of a program, so that a call of the environment stays below its limit."""
GRACE_S = 1.0
"""How long an ended guest may take to be gone."""
MAX_LOST = 3
"""Guests one program may cost; the tests after that fail."""
CHECK_EVERY_S = 0.05
"""How often the files in /tmp are counted: bwrap can limit their bytes, not their number."""
HEADER_BYTES = 5
Status = Literal["done", "failed", "timed out", "lost", "flooded", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and what to run it on."""

    kind: Literal["stdin", "call", "answer", "assert", "beside"]
    source: str
    tests: tuple[object, ...]
    """Input text; argument lists; or code that asserts."""
    entry: str = ""
    """The function under test, for calls and asserts."""
    preamble: str = ""
    """Code that runs before the program in its namespace: imports that a data set takes for
    granted."""
    wall_s: float = 2.0
    """Time for one test."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one test."""

    status: Status
    content: bytes = b""
    """Output of the program, or the value of a call in JSON; the name of an exception."""


NOT_RUN = Outcome("not run")


@dataclass
class SandboxPool(Resource):
    """Guests ready to run a program. Safe in threads."""

    kind: Kind = "bubblewrap"
    limits: Limits = field(default_factory=Limits)
    image: str = "python:3.11-slim"

    def __post_init__(self) -> None:
        # Time limits count the clock: two programs on one core would take each other's time.
        self.max_concurrency = num_cores()

    def open(self) -> None:
        """Start the first guests; refuses where the sandbox cannot be used."""
        self._isolation: Isolation = make_isolation(self.kind, self.limits, image=self.image)
        self._warm: queue.SimpleQueue[Guest | EnvError] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._retired: list[Guest] = []
        self._lock = threading.Lock()
        if self.kind == "none":
            logger.warning(
                "code: sandbox=none runs programs that a model wrote as plain processes of this "
                "user: they can read, write and delete your files and use the network"
            )
        # A guest dies with the thread that started it: that must not be a caller's.
        self._starter = threading.Thread(target=self._start_guests, daemon=True, name="moored-code")
        self._starter.start()
        for _ in range(num_cores() + 1):
            self._orders.put(True)

    def close(self) -> None:
        """Kill every guest."""
        self._orders.put(False)
        self._starter.join()

    def run(self, job: Job) -> list[Outcome]:
        """One outcome per test; a broken sandbox raises EnvError."""
        outcomes: list[Outcome] = []
        end_s = time.monotonic() + TOTAL_LIMIT_S
        num_lost = 0
        while len(outcomes) < len(job.tests) and num_lost < MAX_LOST:
            rest = replace(job, tests=job.tests[len(outcomes) :])
            found = self._run_to_a_loss(rest, end_s)
            outcomes += found
            num_lost += 1
            if found[-1].status == "timed out":
                break
        return outcomes + [NOT_RUN] * (len(job.tests) - len(outcomes))

    def _run_to_a_loss(self, job: Job, end_s: float) -> list[Outcome]:
        """Outcomes up to the first test that costs the guest, that one included."""
        token = secrets.token_bytes(16)
        with contextlib.ExitStack() as stack:
            program = None
            if job.kind == "assert":
                unseen = replace(job, kind="answer", tests=(None,) * len(job.tests))
                program = stack.enter_context(self._hand_over(unseen))
                job = replace(job, source="")
            talk = stack.enter_context(self._hand_over(job, token))
            outcomes: list[Outcome] = []
            while len(outcomes) < len(job.tests):
                limit_s = min(job.wall_s, end_s - time.monotonic())
                outcome = talk.next_outcome(limit_s, program)
                if job.kind == "beside" and outcome.status == "done" and outcome.content != token:
                    outcome = Outcome("lost")
                outcomes.append(outcome)
                if outcome.status in ("timed out", "lost", "flooded"):
                    break
            return outcomes

    @contextlib.contextmanager
    def _hand_over(self, job: Job, token: bytes = b"") -> Iterator[_Talk]:
        """A guest that has begun with the job."""
        guest = self._take()
        try:
            talk = _Talk(guest, self.limits)
            talk.expect_ready()
            talk.send(_job_bytes(job, self.limits, token), START_LIMIT_S)
            yield talk
        finally:
            self._retire(guest)

    def _take(self) -> Guest:
        """A guest that was started in advance; another one is ordered in its place."""
        self._orders.put(True)
        try:
            guest = self._warm.get(timeout=START_LIMIT_S)
        except queue.Empty:
            raise EnvError(
                f"code: no sandbox could be started within {START_LIMIT_S:g} s"
            ) from None
        if isinstance(guest, EnvError):
            raise guest
        return guest

    def _start_guests(self) -> None:
        while self._orders.get():
            try:
                self._warm.put(self._isolation.start())
            except OSError as error:
                self._warm.put(EnvError(f"code: a sandbox could not be started: {error}"))
        while not self._warm.empty():
            guest = self._warm.get()
            if isinstance(guest, Guest):
                self._retire(guest)
        for guest in self._retired:
            if not guest.is_gone(GRACE_S):  # it was still starting when it was to be killed
                guest.is_gone(GRACE_S)

    def _retire(self, guest: Guest) -> None:
        guest.kill()
        with self._lock:
            self._retired = [other for other in self._retired if not other.is_gone()]
            self._retired.append(guest)


def _job_bytes(job: Job, limits: Limits, token: bytes) -> bytes:
    fields = {
        "kind": job.kind,
        "source": job.source,
        "tests": list(job.tests),
        "entry": job.entry,
        "preamble": job.preamble,
        # A backstop: what the time limit should have ended.
        "cpu_s": int(min(job.wall_s * len(job.tests), TOTAL_LIMIT_S)) + 2,
        "output_bytes": limits.output_kb * 1024,
        "token": token,
    }
    return marshal.dumps(fields, 4)


class _FloodedError(Exception):
    """A program made too many files."""


class _Talk:
    """Messages with one guest, each under a time limit; what a guest says is never trusted."""

    def __init__(self, guest: Guest, limits: Limits) -> None:
        process = guest.process
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        self._guest, self._limits = guest, limits
        self._max_bytes = limits.output_kb * 1024
        self._unread = bytearray()
        self._check_s = math.inf

    def expect_ready(self) -> None:
        outcome = self._next(START_LIMIT_S)
        if outcome is None or outcome[0] != READY:
            raise EnvError(
                f"code: the sandbox was not ready after {START_LIMIT_S:g} s, or ended; the machine "
                f"may be out of memory or of processes"
            )

    def send(self, data: bytes, limit_s: float) -> None:
        """A program that does not read what it is sent has the time of one that hangs."""
        data = len(data).to_bytes(4, "big") + data
        end_s = time.monotonic() + limit_s
        self._check_s = min(self._check_s, time.monotonic())
        os.set_blocking(self._stdin, False)
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while data and selector.select(end_s - time.monotonic()):
                data = data[os.write(self._stdin, data) :]

    def next_outcome(self, limit_s: float, program: _Talk | None = None) -> Outcome:
        """The next test's outcome; "timed out" after `limit_s`. `program` answers its calls."""
        end_s = time.monotonic() + limit_s
        while True:
            try:
                message = self._next(end_s - time.monotonic())
            except _FloodedError:
                return Outcome("flooded")
            if message is None:
                return Outcome("timed out")
            status, content = message
            if status == DONE and len(content) <= self._max_bytes:
                return Outcome("done", content)
            if status == FAILED:
                return Outcome("failed", content)
            if status != CALL or program is None:
                return Outcome("flooded" if status == DONE else "lost")
            program.send(content, end_s - time.monotonic())
            answer = program.next_outcome(end_s - time.monotonic())
            if answer.status not in ("done", "failed"):
                return answer
            sign = DONE if answer.status == "done" else FAILED
            self.send(sign + answer.content, end_s - time.monotonic())

    def _next(self, limit_s: float) -> tuple[bytes, bytes] | None:
        """Status and content of a message, (b"", b"") at the end of the stream, None when late."""
        end_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while True:
                message = self._parse()
                if message is not None:
                    return message
                now_s = time.monotonic()
                if now_s >= end_s:
                    return None
                if now_s >= self._check_s:
                    self._check_files()
                    self._check_s = now_s + CHECK_EVERY_S
                if not selector.select(min(end_s, self._check_s) - now_s):
                    continue
                data = os.read(self._stdout, 1 << 16)
                if not data:
                    return b"", b""
                self._unread += data

    def _check_files(self) -> None:
        if self._guest.num_tmp_files() > self._limits.num_tmp_files:
            raise _FloodedError

    def _parse(self) -> tuple[bytes, bytes] | None:
        if len(self._unread) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._unread[:4], "big")
        status = bytes(self._unread[4:5])
        if length > self._max_bytes + 1:
            return b"", b""
        if len(self._unread) < HEADER_BYTES + length:
            return None
        content = bytes(self._unread[HEADER_BYTES : HEADER_BYTES + length])
        del self._unread[: HEADER_BYTES + length]
        return status, content
