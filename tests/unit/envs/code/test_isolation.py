"""A sandbox that cannot be used is refused with a remedy; what each kind is started with."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from moored.envs.code import isolation
from moored.envs.code.isolation import Bubblewrap, Docker, Limits, make_isolation
from moored.envs.code.sandbox import SandboxPool
from moored.envs.code.seccomp import CLONE_THREAD, FORBIDDEN, seccomp_filter
from moored.errors import EnvError


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def add_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap exists for Linux")
def test_without_bubblewrap_the_sandbox_is_refused(empty_path: Path) -> None:
    with pytest.raises(EnvError, match="apt-get install bubblewrap"):
        make_isolation("bubblewrap", Limits())


def test_without_docker_it_is_refused(empty_path: Path) -> None:
    with pytest.raises(EnvError, match="docker is not installed"):
        make_isolation("docker", Limits())


def test_docker_without_its_daemon_is_refused(empty_path: Path) -> None:
    add_program(empty_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    with pytest.raises(EnvError, match="Cannot connect to the Docker"):
        make_isolation("docker", Limits())


def test_docker_whose_daemon_is_stuck_is_refused(empty_path: Path, monkeypatch) -> None:
    add_program(empty_path, "docker", "exec /bin/sleep 3600")
    monkeypatch.setattr(isolation, "TRY_LIMIT_S", 0.2)
    with pytest.raises(EnvError, match="no answer within"):
        make_isolation("docker", Limits())


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap exists for Linux")
def test_bubblewrap_that_cannot_start_is_refused(empty_path: Path) -> None:
    add_program(empty_path, "bwrap", "echo 'No permissions to create new namespace' >&2; exit 1")
    with pytest.raises(EnvError, match="No permissions to create"):
        make_isolation("bubblewrap", Limits())


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "Connection refused"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 1)", "Network is unreachable"),
        ("open('/usr/lib/here', 'w')", "Read-only file system"),
        ("open('/etc/passwd')", "No such file or directory"),
        ("import os; os.kill(OURS, 0)", "No such process"),
    ],
)
def test_the_namespaces_hold_without_the_filter(attempt: str, error: str, bubblewrap: None) -> None:
    isolation = make_isolation("bubblewrap", Limits())
    assert isinstance(isolation, Bubblewrap)
    command = [isolation.program, *isolation.options(), "--", "/python/bin/python3", "-S"]
    attempt = attempt.replace("OURS", str(os.getpid()))
    tried = subprocess.run([*command, "-c", attempt], capture_output=True, text=True, check=False)
    assert error in tried.stderr


def test_docker_runs_without_network_and_with_limits() -> None:
    words = Docker("docker", "python:3.12", Limits(memory_mb=100, tmp_mb=10)).command("box")
    command = " ".join(words)
    for option in (
        "--network none --ipc none --log-driver none --read-only",
        "--tmpfs /tmp:size=10m,mode=1777",
        "--memory 110m --memory-swap 110m",
        "--pids-limit 64 --security-opt no-new-privileges",
        "--cap-drop ALL --cap-add SETUID --cap-add SETGID",
        "--entrypoint python3 python:3.12 -s -S -P -c",
    ):
        assert option in command
    # The guest becomes a user that owns nothing, and loads the filter of its machine.
    assert words[-7] == "65534"
    assert [word.partition("=")[0] for word in words[-2:]] == ["x86_64", "aarch64"]
    assert bytes.fromhex(words[-2].partition("=")[2]) == seccomp_filter("x86_64")


DOCKER = """
[ "$1" = rm ] && {{ echo "$3" >> {folder}/removed; exit; }}
for word; do last=$word; done
[ "$last" = "import ctypes" ] && {{ echo 'no such option: -P' >&2; exit {no_python}; }}
{run}
"""
"""A stand-in for docker."""


def test_an_image_that_cannot_run_the_guest_is_refused(empty_path: Path) -> None:
    script = DOCKER.format(folder=empty_path, no_python=2, run="exit")
    add_program(empty_path, "docker", script)
    with pytest.raises(EnvError, match=r"'python:3.8' \(no such option: -P\)"):
        make_isolation("docker", Limits(), image="python:3.8")


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_a_container_ends_with_its_input_and_is_removed_if_it_does_not(
    ends_by_itself: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `run` starts the guest on this machine: without a filter it is no supervisor.
    start = (
        "shift $(($# - 7))\n"
        f'cd {tmp_path}; {sys.executable} -I -S {guest_file()} 0 "$2" "$3" "$4" "$5"\n'
        f"{'' if ends_by_itself else 'exec sleep 600'}"
    )
    script = DOCKER.format(folder=tmp_path, no_python=0, run=start)
    add_program(tmp_path, "docker", script)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    pool = SandboxPool("docker")
    pool.open()
    pool.close()  # guests that were given no program end when their input does
    removed = tmp_path / "removed"
    if ends_by_itself:
        assert not removed.exists()
        return
    names = removed.read_text().split()
    assert len(names) >= 2 and all(name.startswith("moored-") for name in names)


def guest_file() -> str:
    from moored.envs.code import guest

    return guest.__file__


@pytest.mark.parametrize(
    ("machine", "column", "clone", "prctl"), [("x86_64", 0, 56, 157), ("aarch64", 1, 220, 167)]
)
def test_the_filter_refuses_what_it_lists_and_allows_the_rest(
    machine: str, column: int, clone: int, prctl: int
) -> None:
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    for numbers in FORBIDDEN.values():
        number = numbers[column]
        assert number is None or judge(machine, arch, number) == 0x00050001
    assert judge(machine, arch, 435) == 0x00050026  # clone3: there is no such call
    assert judge(machine, arch, clone, 0x01200011) == 0x00050001  # fork
    assert judge(machine, arch, clone, CLONE_THREAD | 0xF00) == 0x7FFF0000
    assert judge(machine, arch, prctl, 1) == 0x00050001  # not to die with bwrap
    assert judge(machine, arch, prctl, 15) == 0x7FFF0000  # the name of a thread
    assert judge(machine, arch, 1 if machine == "x86_64" else 64) == 0x7FFF0000  # write
    assert judge(machine, 0x40000003, 1) == 0x80000000  # 32-bit calls have other numbers


def judge(machine: str, arch: int, number: int, argument: int = 0) -> int:
    """What the kernel's interpreter makes of the filter for one call."""
    data = struct.pack("<IIQQ", number, arch, 0, argument)
    lines = list(struct.iter_unpack("HBBI", seccomp_filter(machine)))
    place, value = 0, 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x06:
            return operand
        else:
            tests = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}
            place += if_true if tests[code] else if_false


def test_a_machine_whose_calls_are_not_known_is_refused() -> None:
    with pytest.raises(EnvError, match="not of sparc64; set sandbox=docker"):
        seccomp_filter("sparc64")
