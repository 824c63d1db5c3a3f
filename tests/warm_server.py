"""Imports what commands need, then forks a process per request; see `warm.py`."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
from typing import NoReturn

MAX_REQUEST_BYTES = 200_000
MAX_WAIT_S = 60.0


SLIM = (
    "httpx2",
    "moored.analysis.advice",
    "moored.analysis.rewards",
    "moored.cli.episode",
    "moored.cli.progress",
    "moored.engine.endpoint.engine",
    "moored.envs.sokoban.env",
    "moored.evaluate",
    "moored.files.tables",
    "rich.table",
    "yaml",
)
"""What commands import that need no extra."""
WHOLE = (
    "pandas",
    "pyarrow.parquet",
    "torch",
    "moored.analysis.diagnosis",
    "moored.analysis.report",
    "moored.analysis.report_page",
    "moored.analysis.diagnose",
    "moored.cli.main",
    "moored.cli.profiling",
    "moored.cli.progress",
    "moored.engine.build",
    "moored.engine.local.engine",
    "moored.engine.workers.follow",
    "moored.envs.sokoban.env",
    "moored.evaluate",
    "moored.train",
)
"""What training commands import."""
HEAVY = {"torch", "transformers", "pyarrow", "pandas", "plotly", "PIL"}


def import_what_commands_need(*, is_slim: bool) -> None:
    for name in SLIM if is_slim else WHOLE:
        importlib.import_module(name)
    if is_slim:
        assert not HEAVY & set(sys.modules), HEAVY & set(sys.modules)
        return
    import torch

    from moored.models.load import load_model

    # What transformers compiles for its first model is there for all of them.
    load_model("nano", torch.device("cpu"))


def wait_for_threads() -> None:
    """Be alone: a fork would lose other threads.

    transformers loads with threads that may take a moment to end. pyarrow, for one, starts a thread
    for good when it is imported, unless it is told not to (`warm.py`).
    """
    deadline = time.monotonic() + MAX_WAIT_S
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < deadline, "a fork would lose the other threads"
        time.sleep(0.01)


def serve(channel: socket.socket) -> tuple[dict, list[int]]:
    """Answer requests until the other end is closed; returns, in a child, what it is to do."""
    wait_for_threads()
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                channel.close()
                return request, files
            for file in files:
                os.close(file)
        channel.send(json.dumps(answer).encode())


def run_and_leave(code: str) -> NoReturn:
    """Run a program and end without taking the interpreter apart.

    That would write to every object that was imported, and so copy every page of the server, for
    half a second. What others see of an end stays: threads are waited for, exit handlers run,
    output is flushed. What the program raises ends it as ever.
    """
    status: object = None
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as left:
        status = left.code
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    gc.disable()
    import_what_commands_need(is_slim=sys.argv[2] == "slim")
    os.fsync = os.fstat  # type: ignore[assignment]  # as in `conftest.py`
    # A collection in a fork would copy every page of what is imported.
    gc.freeze()
    gc.enable()
    request, files = serve(socket.socket(fileno=int(sys.argv[1])))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["words"]]
    sys.path.insert(0, "")
    importlib.invalidate_caches()
    run_and_leave(request["code"])
