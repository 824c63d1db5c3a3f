"""A command that has told its address is ended by Ctrl-C and SIGTERM, be they ever so quick."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.warm import MAIN, WarmProcess, run_warm

pytest.importorskip("starlette", reason="needs moored[serve]")
pytest.importorskip("uvicorn", reason="needs moored[serve]")
pytest.importorskip("websockets", reason="needs moored[serve]")

COMMANDS = {
    r"serving 6,000 passages with bm25 at http://127\.0\.0\.1:\d+/retrieve\n": ["serve-search"],
    r"serving bandit at http://127\.0\.0\.1:\d+ \(1024 sessions at a time\)\n": [
        "serve-env",
        "bandit",
    ],
    r"webshop is at http://127\.0\.0\.1:\d+ \(Ctrl-C closes it\)\n": [
        "play",
        "webshop",
        "--web",
        "--option=num_products=60",
    ],
}
"""What each tells -> its words."""
DROPS_SIGNALS = (
    "import signal; drop = lambda *_: None; "
    f"signal.signal(signal.SIGINT, drop); signal.signal(signal.SIGTERM, drop); {MAIN}"
)
"""A command that only its server's own handlers can end, as if Python were always importing."""
NOBODY_READS = f"import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1); {MAIN}"
NUM_TRIES = 2
each_command = pytest.mark.parametrize(
    ("told", "words"), COMMANDS.items(), ids=["serve-search", "serve-env", "play"]
)


@contextmanager
def serving(told: str, words: Sequence[str], code: str = MAIN) -> Iterator[WarmProcess]:
    """The command in a process that has told its address this moment."""
    process = WarmProcess([*words, "--port=0"], code=code, env={"MOORED_ENV_TOKEN": ""}, slim=True)
    try:
        line = process.stdout.readline()
        assert re.fullmatch(told, line), line
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(process: WarmProcess, number: int) -> tuple[int, str]:
    """Its exit code and what it printed on stderr."""
    assert process.stderr is not None
    process.send_signal(number)
    return process.wait(timeout_s=30), process.stderr.read()


@each_command
def test_ctrl_c_right_after_the_address_is_told_ends_the_server_without_an_error(told, words):
    for _ in range(NUM_TRIES):
        with serving(told, words) as process:
            assert stop(process, signal.SIGINT) == (0, "")


def test_sigterm_ends_the_server_as_it_ends_any_process():
    with serving(r"serving bandit at .*\n", ["serve-env", "bandit"]) as process:
        assert stop(process, signal.SIGTERM) == (-signal.SIGTERM, "")


@each_command
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_heeds_signals_once_its_address_is_told(told, words, number):
    with serving(told, words, DROPS_SIGNALS) as process:
        assert stop(process, number) == (0, "")


@each_command
def test_a_port_in_use_is_told_in_one_line(told, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_warm([*words, f"--port={port}"], slim=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"moored: cannot listen on 127.0.0.1:{port}: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "variable"),
    [(["serve-env", "bandit"], "MOORED_ENV_TOKEN"), (["serve-search"], "MOORED_SEARCH_TOKEN")],
)
def test_a_server_that_other_machines_reach_needs_a_token(words, variable):
    ended = run_warm([*words, "--port=0", "--host=0.0.0.0"], slim=True, env={variable: ""})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"set {variable}" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_server_whose_address_nobody_reads_ends_in_silence():
    ended = run_warm(["serve-env", "bandit", "--port=0"], code=NOBODY_READS, slim=True)
    assert (ended.returncode, ended.stderr) == (1, "")
