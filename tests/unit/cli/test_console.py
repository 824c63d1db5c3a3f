"""Output in a pipe is the same for every terminal and every setting of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moored.analysis.compare import TaskReplies
from moored.cli.compare import _show_replies
from moored.cli.console import make_console, print_line


@pytest.mark.parametrize("stderr", [False, True])
def test_lines_in_a_pipe_are_never_broken(monkeypatch, capsys, stderr):
    monkeypatch.setenv("COLUMNS", "40")
    line = "word " * 100 + "/a/path" * 40
    make_console(stderr=stderr).print(line)
    shown = capsys.readouterr()
    assert (shown.err if stderr else shown.out) == line + "\n"


def test_lines_on_a_terminal_are_wrapped_at_its_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    make_console().print("word " * 20)
    assert len(capsys.readouterr().out.splitlines()) == 3  # 100 characters


def test_square_brackets_and_colons_are_text(capsys):
    line = "runs/[ablation]/[bold]x[/]/:warning:"
    make_console().print(line)
    print_line(make_console(), line)
    assert capsys.readouterr().out == f"{line}\n{line}\n"


def test_a_line_that_may_be_copied_is_not_broken_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    line = "go on with: moored train --resume " + "a long folder/" * 10
    print_line(make_console(), line)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize("on_terminal", [False, True], ids=["table", "list"])
def test_control_characters_of_a_reply_reach_no_terminal(monkeypatch, capsys, on_terminal):
    monkeypatch.setenv("TERM", "dumb")  # no styles, which are escapes too
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    reply = "left\x1b[2J\x1b]0;title\x07 \x9b31m\r\nnext\tline\rforged"
    _show_replies(make_console(), [Path("a"), Path("b")], [TaskReplies(1, reply, (reply, reply))])
    print_line(make_console(), reply)
    shown = capsys.readouterr().out
    assert shown.count("\\x1b[2J") == 4
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"}
