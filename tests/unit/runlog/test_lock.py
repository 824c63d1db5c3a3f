"""A run directory has one writer at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moored.errors import RunLogError
from moored.runlog.log import RunLog

HOLD = """
import sys
from moored.runlog.log import RunLog
log = RunLog(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "locked\n"
    with pytest.raises(RunLogError, match=rf"another process \(pid {first.pid}\) writes to"):
        RunLog(tmp_path)
    first.kill()  # the lock is freed even after a kill
    first.communicate()
    RunLog(tmp_path)


def test_a_process_may_open_its_own_run_again(tmp_path):
    first = RunLog(tmp_path)
    second = RunLog(tmp_path, resume=True)
    assert first.path == second.path
