"""What a result was made with."""

from __future__ import annotations

import platform
import sys

import numpy as np

from moored import __version__
from moored.runlog.machine import describe_machine, installed_versions, own_command


def test_versions_name_what_is_installed_and_leave_out_what_is_not():
    assert installed_versions(["numpy", "no-such-package"]) == {
        "moored": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def test_the_machine_has_a_system_and_at_least_one_core():
    found = describe_machine()
    assert str(found["system"]).startswith(sys.platform)
    assert isinstance(found["cores"], int) and found["cores"] >= 1


def test_the_own_command_does_not_tell_where_the_program_lies(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/venv/bin/train.py", "a=1", "runs/x y"])
    assert own_command() == ["train.py", "a=1", "runs/x y"]
