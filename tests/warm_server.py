"""Imports what a training command needs, then forks a process per request; see `warm.py`."""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time

import pandas  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch

import moored.analysis.diagnosis
import moored.analysis.report
import moored.analysis.report_page
import moored.cli.diagnosing
import moored.cli.main
import moored.cli.profiling
import moored.cli.progress
import moored.engine.build
import moored.engine.local.engine
import moored.engine.workers.follow
import moored.envs.sokoban.env
import moored.evaluate
import moored.train  # noqa: F401
from moored.models.load import load_model

MAX_REQUEST_BYTES = 200_000
MAX_WAIT_S = 60.0


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


if __name__ == "__main__":
    # What transformers compiles for its first model is there for all of them.
    load_model("nano", torch.device("cpu"))
    os.fsync = os.fstat  # type: ignore[assignment]  # as in `conftest.py`
    # A collection in a fork would copy every page of what is imported.
    gc.freeze()
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
    exec(request["code"], {"__name__": "__main__"})
