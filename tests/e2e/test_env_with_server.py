"""A user's own environment that talks to a server, in `moored train` by module:attr."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from moored.runlog.log import read_records
from tests.warm import WarmProcess

SERVED = '''
"""Everything a user adds lives in this one file."""
import random
import socket
import socketserver
import threading
from dataclasses import dataclass

from moored.envs import Resource, StepResult
from moored.types import Message


def note(what):
    with open("events.txt", "a") as events:
        print(what, file=events, flush=True)


@dataclass
class Judge(Resource):
    """A server on a socket that judges answers. Its `hang_at`-th request is never answered."""

    hang_at: int

    def open(self):
        note("open")
        self.num_requests, self.is_closing, lock = 0, threading.Event(), threading.Lock()
        judge = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                asked, answer = self.rfile.readline().decode().split(" ", 1)
                with lock:
                    judge.num_requests += 1
                    hangs = judge.num_requests == judge.hang_at
                if hangs:
                    note("hang")
                    judge.is_closing.wait()
                self.wfile.write(b"1" if asked in answer else b"0")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def judge(self, asked, answer):
        with socket.create_connection(self.server.server_address) as connection:
            connection.sendall(f"{asked} {answer!a}\\n".encode())
            return connection.recv(1) == b"1"

    def close(self):
        self.is_closing.set()
        self.server.shutdown()
        self.server.server_close()
        note("close")


class Served:
    """Say the letter that is shown."""

    name = "served"
    is_stochastic = False
    max_turns = 1

    def __init__(self, *, hang_at: int = 0):
        self.hang_at = hang_at

    def resources(self):
        return {"judge": Judge(self.hang_at)}

    def reset(self, task_seed, episode_seed=0):
        self._letter = random.Random(task_seed).choice("abcdefgh")
        return [Message("system", "Say the letter."), Message("user", self._letter)]

    def step(self, reply):
        is_right = self.judge.judge(self._letter, reply)
        return StepResult(observation="", reward=float(is_right), terminated=True)

    def oracle(self):
        return self._letter

    def close(self):
        pass
'''


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(SERVED)
    return tmp_path


def launch(here: Path, *options: str, hang_at: int = 0) -> WarmProcess:
    """`moored train smoke` in the folder of the user's module."""
    env = f"env={{name: 'mine:Served', options: {{hang_at: {hang_at}}}}}"
    small = ["rollout.max_response_tokens=8", "collapse.every=0"]
    words = ["train", "smoke", env, *small, *options, "--run", "run"]
    return WarmProcess(words, cwd=here, merge_stderr=True)


def events(here: Path) -> list[str]:
    file = here / "events.txt"
    return file.read_text().split() if file.exists() else []


def wait_for(what: str, here: Path, process: WarmProcess) -> None:
    while what not in events(here):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def interrupt(process: WarmProcess) -> None:
    process.send_signal(signal.SIGINT)


def test_the_server_starts_once_and_a_call_that_hangs_costs_one_episode(here):
    # 2 groups of 4 episodes of one turn in step 1, 8 in its evaluation, then those of step 2.
    process = launch(here, "rollout.env_workers=3", "rollout.env_timeout_s=5", hang_at=19)
    shown = process.communicate()[0]
    assert process.returncode == 0, shown
    assert "EnvTimeoutError: the call took over 5 s" in " ".join(shown.split())
    assert events(here) == ["open", "hang", "close"]
    assert [record["rollout/error_count"] for record in read_records(here / "run")] == [0, 1]


def test_the_server_is_closed_after_ctrl_c_while_a_call_hangs(here):
    process = launch(here, "rollout.env_timeout_s=100000", hang_at=3)
    wait_for("hang", here, process)
    assert process.stdout is not None
    interrupt(process)
    heard = ""
    while "again stops at once" not in " ".join(heard.split()):
        line = process.stdout.readline()
        assert line, heard
        heard += line
    interrupt(process)
    shown = process.communicate()[0]
    assert "stopped at once" in shown
    assert events(here) == ["open", "hang", "close"]
