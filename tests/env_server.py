"""`moored serve-env` in a process of its own, for tests that stop or kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def serve_env(
    *arguments: str, port: int = 0, token: str = ""
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The server's address, and its process; port 0 takes a free one."""
    command = [sys.executable, "-c", "from moored.cli.main import main; main()", "serve-env"]
    process = subprocess.Popen(
        [*command, *arguments, f"--port={port}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MOORED_ENV_TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split(" at ")[1].split()[0], process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()
