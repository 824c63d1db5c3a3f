"""`moored serve-env` in a process of its own, for tests that stop or kill it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.warm import WarmProcess


@contextmanager
def serve_env(*arguments: str, port: int = 0, token: str = "") -> Iterator[tuple[str, WarmProcess]]:
    """The server's address, and its process; port 0 takes a free one."""
    words = ["serve-env", *arguments, f"--port={port}"]
    process = WarmProcess(words, env={"MOORED_ENV_TOKEN": token}, slim=True)
    try:
        yield process.stdout.readline().split(" at ")[1].split()[0], process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()
