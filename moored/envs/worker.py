"""A child process that can be killed: it answers requests, and is replaced when it is lost.

Code that may never end, crash, or use up the memory belongs in one. `Worker` starts a child that
imports the handler once and forks a process to call it. A request beyond its limit kills that
process, even in the middle of a long call into C, and the next one is ready within milliseconds.
Without fork (Windows) the child calls the handler itself and is started again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from moored.errors import EnvError
from moored.names import import_object

START_LIMIT_S = 120.0
"""Time for the child to import its handler, and for the first message of a watched call."""
GRACE_S = 5.0
"""How much later than the child's own timer this process kills it."""
NO_MORE_REQUESTS = 64
"""Exit code of a process whose requests have ended; no other end has it by accident."""
READY, ITEM, RESULT, ERROR, LOST, END = "ready", "item", "result", "error", "lost", "end"
"""Messages of a child: ready for requests; an item before the result; the result; what the
handler raised; how the process that called it ended; the end."""
NO_REQUEST = 0
"""Number of a message that belongs to no request; requests count from 1."""


class WorkerLost(Exception):
    """The process ended, or was killed, over a request."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__("no answer in time" if exit_code is None else f"exit code {exit_code}")
        self.exit_code = exit_code
        """None when it was killed from outside, because it was silent for too long."""

    @property
    def is_late(self) -> bool:
        """True when a time limit ended it."""
        return self.exit_code is None or -self.exit_code in _TIMER_SIGNALS


_TIMER_SIGNALS = {getattr(signal, name, None) for name in ("SIGALRM", "SIGPROF")}


class Worker:
    """A child process: started at first use, restarted when it was lost; safe in threads.

    `handler` is `"module:function"`, called with the arguments of a request; `prepare` has the same
    form and is called once before the first. Arguments and results are pickled. `environ` adds to
    the environment, e.g. PYTHONHASHSEED. Unless `is_quiet`, what the child prints goes to stderr.
    """

    def __init__(
        self,
        handler: str,
        *,
        prepare: str = "",
        memory_bytes: int = 0,
        environ: Mapping[str, str] | None = None,
        is_quiet: bool = True,
    ) -> None:
        self._serve_arguments = handler, prepare, memory_bytes
        self._environ = dict(environ or {})
        self._is_quiet = is_quiet
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._heard: queue.SimpleQueue[tuple[str, Any, int]] = queue.SimpleQueue()
        self._number = NO_REQUEST
        self._owner_pid = 0
        self._kill: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the child unless it runs, so that no request waits for its imports."""
        with self._lock:
            self._living_process()

    def ask(
        self, *arguments: object, cpu_s: float | None = None, wall_s: float | None = None
    ) -> Any:
        """What the handler returns. Raises what it raises, and WorkerLost beyond a limit.

        `cpu_s` limits computing: time in which the machine does other things does not count.
        """
        limit_s = None if wall_s is None else wall_s + GRACE_S
        said = self._converse(arguments, (cpu_s, wall_s), limit_s, limit_s)
        while True:
            try:
                next(said)
            except StopIteration as end:
                return end.value

    def watch(self, *arguments: object, limit_s: float) -> Iterator[Any]:
        """What the handler hands to `emit`, as it comes; WorkerLost when silent for `limit_s`."""
        return self._converse(arguments, (None, None), START_LIMIT_S, limit_s)

    def stop(self) -> None:
        """Kill the child and all it started; after a fork it belongs to the other process.

        Any thread may call it; a request that another one waits for ends with WorkerLost, or with
        EnvError while the child starts.
        """
        self._process = None
        self._kill()

    def _converse(
        self,
        arguments: tuple[object, ...],
        limits: tuple[float | None, float | None],
        first_limit_s: float | None,
        limit_s: float | None,
    ) -> Iterator[Any]:
        """Send a request, yield its items, return its result."""
        with self._lock:
            process = self._living_process()
            self._number += 1
            data = pickle.dumps((self._number, arguments, *limits))
            stdin = process.stdin
            assert stdin is not None
            is_answered = False
            try:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(data)
                    stdin.flush()
                kind, what = self._next(first_limit_s)
                while kind == ITEM:
                    yield what
                    kind, what = self._next(limit_s)
                if kind == END:
                    raise WorkerLost(_exit_code(process))
                is_answered = True
            finally:
                # Late, interrupted or gone: the next request must not read this one's answer.
                if not is_answered:
                    self.stop()
        if kind == RESULT:
            return what
        raise what if kind == ERROR else WorkerLost(what)

    def _next(self, limit_s: float | None) -> tuple[str, Any]:
        """The next message, but no answer to an earlier request."""
        while True:
            try:
                kind, what, number = self._heard.get(timeout=limit_s)
            except queue.Empty:
                raise WorkerLost(None) from None
            if number in (NO_REQUEST, self._number):
                return kind, what

    def _has_ended(self) -> bool:
        """Drop what was said between requests: one that was killed while idle is replaced."""
        while not self._heard.empty():
            if self._heard.get()[0] == END:
                return True
        return False

    def _living_process(self) -> subprocess.Popen[bytes]:
        process = self._process
        is_own = process and self._owner_pid == os.getpid()
        if process and is_own and process.poll() is None and not self._has_ended():
            return process
        self.stop()
        # A new queue: messages of an earlier child must not be read as this one's.
        process, self._heard = _spawn(self._serve_arguments, self._environ, self._is_quiet)
        self._owner_pid = os.getpid()
        # Also called when this object is gone, and at exit.
        self._kill = weakref.finalize(self, _kill_group, process, self._owner_pid)
        self._process = process
        with contextlib.suppress(WorkerLost):
            if self._next(START_LIMIT_S)[0] == READY:
                return process
        self.stop()
        handler = self._serve_arguments[0]
        raise EnvError(
            f"the child process for {handler} did not start; try `python -c 'import "
            f"{handler.partition(':')[0]}'`"
        )


def _spawn(
    serve_arguments: tuple[object, ...], environ: Mapping[str, str], is_quiet: bool
) -> tuple[subprocess.Popen[bytes], queue.SimpleQueue[tuple[str, Any, int]]]:
    """A child that runs `serve` with this process's import path, and what is heard from it."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        # -P: without it, files in the current folder would come before all others.
        [sys.executable, "-P", "-c", f"from {__name__} import serve; serve(*{serve_arguments!r})"],
        env=os.environ | {"PYTHONPATH": path} | dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if is_quiet else None,
        # A group of its own: Ctrl-C is for this process, which then kills the whole group. What a
        # worker starts stays in the worker's group, and ends with it.
        start_new_session=not _is_child,
    )
    heard: queue.SimpleQueue[tuple[str, Any, int]] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=_listen, args=(process.stdout, heard), daemon=True).start()
    return process, heard


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return None


def _listen(stream: BinaryIO, heard: queue.SimpleQueue[tuple[str, Any, int]]) -> None:
    try:
        with stream:
            while True:
                heard.put(pickle.load(stream))
    except Exception:  # its end, or bytes cut off by a kill: nothing more can be read
        heard.put((END, None, NO_REQUEST))


def _kill_group(process: subprocess.Popen[bytes], owner_pid: int) -> None:
    if owner_pid != os.getpid():
        return
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()


_is_child = False
_request = NO_REQUEST
"""In a child: the number of the request that is answered."""
_tell: Callable[[str, object], None]


def emit(item: object) -> None:
    """In a handler: hand something to `Worker.watch` before the result is ready."""
    _tell(ITEM, item)


def serve(handler: str, prepare: str, memory_bytes: int) -> None:
    """The child: fork a process that answers, and another one whenever one is lost."""
    global _is_child, _tell
    _is_child = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the handler prints must not get between the answers.
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(kind: str, what: object) -> None:
        try:
            stream.write(pickle.dumps((kind, what, _request)))
            stream.flush()
        except BrokenPipeError:  # the process that asked was killed: nobody is left to tell
            os._exit(1)

    _tell = tell
    call: Any = import_object(handler)
    if prepare:
        import_object(prepare)()  # pyright: ignore[reportCallIssue]
    tell(READY, None)
    if not hasattr(os, "fork"):
        return _answer_requests(call, memory_bytes)
    while True:
        pid = os.fork()
        if pid == 0:
            _answer_and_exit(call, memory_bytes)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if exit_code == NO_MORE_REQUESTS:
            return
        tell(LOST, exit_code)


def _answer_and_exit(call: Callable[..., object], memory_bytes: int) -> None:
    code = 1
    try:
        _answer_requests(call, memory_bytes)
        code = NO_MORE_REQUESTS
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        os._exit(code)


def _answer_requests(call: Callable[..., object], memory_bytes: int) -> None:
    if memory_bytes:
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    global _request
    while True:
        try:
            _request, arguments, cpu_s, wall_s = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        die_after(cpu_s=cpu_s, wall_s=wall_s)
        try:
            kind, what = RESULT, call(*arguments)
        except Exception as error:
            kind, what = ERROR, _portable(error)
        die_after(cpu_s=cpu_s and 0.0, wall_s=wall_s and 0.0)
        _tell(kind, what)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return EnvError(f"{type(error).__name__}: {error}")


def die_after(*, cpu_s: float | None = None, wall_s: float | None = None) -> None:
    """Have the system kill this process after a time; 0 cancels that, None changes nothing.

    A handler may call it too, to give a part of its work a shorter limit than the request has.

    A timer's signal without a handler ends a process even within one long call into C, which
    neither an exception nor a thread could. Windows has no such timers.
    """
    if not hasattr(signal, "setitimer"):
        return
    if cpu_s is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
    if wall_s is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
