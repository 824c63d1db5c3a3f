"""`moored play` in a terminal: line editing, history, help, and leaving."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="needs a terminal")
pytest.importorskip("readline", reason="this Python was built without line editing")

ROOT = Path(__file__).parents[3]
ENTRY = "from moored.cli.main import main; main()"
LEFT, UP, CTRL_C, CTRL_D = "\x1b[D", "\x1b[A", "\x03", "\x04"


def play(*lines: str, block: str = "") -> str:
    """What a person who types these lines sees; each is typed after the next prompt."""
    controller, terminal = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "INPUTRC": os.devnull}
    words = [sys.executable, "-c", block + ENTRY, "play", "metamath", "-o", "max_turns=3"]
    process = subprocess.Popen(
        words, stdin=terminal, stdout=terminal, stderr=terminal, env=environ, start_new_session=True
    )
    os.close(terminal)
    seen, pending, last = "", list(lines), ""
    while True:
        # A Ctrl-C before the wait for input is only seen at the next key: press it again.
        while last == CTRL_C and not select.select([controller], [], [], 0.5)[0]:
            os.write(controller, last.encode())
        try:
            data = os.read(controller, 4096)
        except OSError:  # the other side was closed
            break
        if not data:
            break
        seen += data.decode(errors="replace")
        while pending and seen.count("answer> ") > len(lines) - len(pending):
            last = pending.pop(0)
            os.write(controller, last.encode())
    os.close(controller)
    assert process.wait() == 0, seen
    return seen


def test_the_arrow_keys_edit_the_line_and_bring_back_earlier_ones():
    seen = play(f"13{LEFT}2\n", f"{UP}4\n", "quit\n")
    assert "answer> 1234" in seen
    assert "Left after 2 turns" in seen


def test_help_says_what_can_be_typed_and_is_not_a_turn():
    seen = play("help\n", "quit\n")
    assert "the oracle's answer" in seen and "leave; so do Ctrl-C and Ctrl-D" in seen
    assert "Left after 0 turns, reward 0." in seen


@pytest.mark.parametrize("key", [CTRL_D, CTRL_C], ids=["Ctrl-D", "Ctrl-C"])
def test_keys_that_leave_do_so_without_a_traceback(key):
    block = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    seen = play(key, block=block)
    assert "Left after 0 turns, reward 0." in seen
    assert "Traceback" not in seen


def test_without_readline_one_can_still_play():
    seen = play("7\n", "quit\n", block="import sys; sys.modules['readline'] = None; ")
    assert "Left after 1 turn" in seen
