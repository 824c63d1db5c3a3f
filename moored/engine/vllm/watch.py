"""A server that ends with the process that started it, even when that is killed.

    python -m moored.engine.vllm.watch COMMAND …

Runs the command in a process group of its own and waits until it ends, or until standard input
closes, which it does when the other end is gone; then the whole group is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 15.0
"""How long the command may take to end by itself."""
POLL_S = 0.05


def main(command: list[str]) -> int:
    # Ctrl-C is for the process that started this one: it closes standard input when it is done.
    # A function, because the command would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    is_left = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(is_left,), daemon=True).start()
    while process.poll() is None and not is_left.wait(POLL_S):
        pass
    _end_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    # Also what the command left behind.
    _end_group(process, signal.SIGKILL)
    return process.wait()


def _wait_for_end_of_input(is_left: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    is_left.set()


def _end_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
