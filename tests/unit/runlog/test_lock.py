"""A run directory has one writer at a time."""

from __future__ import annotations

import errno
import gc
import os
import platform
import subprocess
import sys

import pytest

from moored.errors import RunLogError
from moored.runlog.lock import check_unlocked
from moored.runlog.log import RunLog

HOLD = """
import sys
from moored.runlog.log import RunLog
log = RunLog(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""
TAKE = """
import sys
from moored.errors import MooredError
from moored.runlog.log import RunLog
try:
    RunLog(sys.argv[1], resume=True)
except MooredError as error:
    print(error)
"""


def hold(folder) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def take_elsewhere(folder) -> str:
    """What another process is told that opens the run; empty when it may."""
    command = [sys.executable, "-c", TAKE, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_process_is_refused_until_the_first_was_killed(tmp_path):
    first = hold(tmp_path)
    who = f"another process (pid {first.pid} on {platform.node()}) writes to {str(tmp_path)!r}"
    for attempt in (RunLog, check_unlocked):
        with pytest.raises(RunLogError) as refused:
            attempt(tmp_path)
        assert str(refused.value).startswith(who)
    first.kill()  # the lock is freed even after a kill
    first.communicate()
    check_unlocked(tmp_path)
    RunLog(tmp_path)


def test_a_process_may_open_its_own_run_again_and_forgetting_one_keeps_the_lock(tmp_path):
    first = RunLog(tmp_path)
    second = RunLog(tmp_path, resume=True)
    assert first.path == second.path
    check_unlocked(tmp_path)
    del first
    gc.collect()
    assert take_elsewhere(tmp_path).startswith(f"another process (pid {os.getpid()} on ")
    del second
    gc.collect()
    assert take_elsewhere(tmp_path) == ""


def test_a_disk_without_locks_gives_one_warning_and_can_be_written_to(
    tmp_path, monkeypatch, caplog
):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    RunLog(tmp_path).append("metrics", 1, {"x": 1})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no file locks (No locks available)" in caplog.text
