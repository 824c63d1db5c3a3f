"""Hostile programs are contained and end in time; without the sandbox they would not."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import moored.cores
from moored.envs.code.sandbox import Job, Outcome, SandboxPool
from tests.unit.envs.code.host import LIMIT_S, MARGIN_S, Host, run_one
from tests.unit.envs.code.hostile_programs import FILES, HANGS, HOSTILE, NETWORK, PROCESSES

OF_ROOT = "change a kernel setting"
"""Root, who may be behind `users_pool`, may change the host name of a sandbox in there."""


def test_there_are_at_least_sixty_hostile_programs() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(name: str, pool: SandboxPool, host: Host) -> None:
    check_contained(name, pool, host)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != OF_ROOT])
def test_a_hostile_program_is_contained_for_an_ordinary_user(
    name: str, users_pool: SandboxPool, host: Host
) -> None:
    check_contained(name, users_pool, host)


def check_contained(name: str, pool: SandboxPool, host: Host) -> None:
    source = host.aim(HOSTILE[name])
    took_s = float("inf")
    for _ in range(3):  # a slow one again: the machine may have been busy
        start = time.monotonic()
        outcome = run_one(pool, source)
        took_s = min(took_s, time.monotonic() - start)
        if took_s <= LIMIT_S + MARGIN_S:
            break
    assert b"ESCAPED" not in outcome.content
    assert b"treasure" not in outcome.content
    assert took_s <= LIMIT_S + MARGIN_S
    assert host.is_unharmed()
    assert outcome.status == "timed out" or name not in HANGS


def test_what_a_program_reaches_for_an_ordinary_user_has_its_limits(
    users_pool: SandboxPool,
) -> None:
    source = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    lines = open(f"/proc/{pid}/limits").read().splitlines()
    print(*(line.split()[-3] for line in lines if line.startswith("Max address space")))
"""
    assert run_one(users_pool, source, 5.0) == Outcome("done", b"%d\n" % (512 << 20))


HIDDEN = "number or ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); os.mkdir(name)"
"""A process that may not be dumped hides its files from others of its user."""


@pytest.mark.parametrize("whose", ["pool", "users_pool"])
@pytest.mark.parametrize("make", ["os.symlink('x', name)", "os.mkdir(name)", HIDDEN])
def test_a_program_that_makes_many_files_is_ended(
    whose: str, make: str, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue(whose)
    source = """
import ctypes, os
for number in range(int(input())):
    name = f"/tmp/{number}"
    MAKE
print("made")
while number > 10_000: pass
""".replace("MAKE", make)
    job = Job(kind="stdin", source=source, tests=("9000",), wall_s=10.0)
    assert pool.run(job) == [Outcome("done", b"made\n")]
    assert pool.run(replace(job, tests=("20000",))) == [Outcome("flooded")]


def test_no_process_of_a_program_is_left(pool: SandboxPool) -> None:
    own = SandboxPool()
    own.open()
    run_one(own, "import time\ntime.sleep(1000)\n")
    guests = [pid for pid in descendants(os.getpid()) if is_guest(pid)]
    own.close()
    others = [pid for pid in descendants(os.getpid()) if is_guest(pid)]
    assert len(guests) > len(others)
    end_s = time.monotonic() + 5.0
    while any(is_guest(pid) for pid in set(guests) - set(others)) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(is_guest(pid) for pid in set(guests) - set(others))


def test_sandboxes_die_with_a_process_that_is_killed(pool: SandboxPool) -> None:
    script = (
        "import threading, time; from moored.envs.code.sandbox import SandboxPool, Job\n"
        "pool = SandboxPool(); pool.open()\n"
        "pool.run(Job(kind='stdin', source='print(1)', tests=('',)))\n"
        "job = Job(kind='stdin', source='import time; time.sleep(600)', tests=('',), wall_s=600)\n"
        "threading.Thread(target=pool.run, args=(job,)).start()\n"
        "time.sleep(1); print('ready', flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        guests = [pid for pid in descendants(owner.pid) if is_guest(pid)]
        owner.kill()
    assert guests
    end_s = time.monotonic() + 5.0
    while any(map(is_guest, guests)) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(map(is_guest, guests))


def descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def is_guest(pid: int) -> bool:
    try:
        return b"/guest.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    "name",
    ["read a file outside", "connect to this machine", "see processes outside", "fork", "a shell"],
)
def test_without_the_sandbox_these_programs_escape(name: str, host: Host) -> None:
    bare = SandboxPool("none")
    bare.open()
    try:
        source = host.aim({**FILES, **NETWORK, **PROCESSES}[name])
        assert b"ESCAPED" in run_one(bare, source, 10.0).content
        assert host.has_caller() == (name == "connect to this machine")
    finally:
        bare.close()


def test_without_the_sandbox_a_file_outside_is_written(host: Host) -> None:
    bare = SandboxPool("none")
    bare.open()
    run_one(bare, host.aim(FILES["write a file outside"]), 10.0)
    bare.close()
    assert host.marker.read_text() == "here"
    assert not host.is_unharmed()
    host.marker.unlink()


def test_running_without_a_sandbox_warns(caplog: pytest.LogCaptureFixture) -> None:
    bare = SandboxPool("none")
    bare.open()
    bare.close()
    assert "sandbox=none runs programs that a model wrote as plain processes" in caplog.text


def test_nothing_is_left_for_the_next_program(pool: SandboxPool) -> None:
    run_one(pool, "open('/tmp/note', 'w').write('hello')\nimport math\nmath.pi = 3\n")
    outcome = run_one(pool, "import math, os\nprint(math.pi > 3.1, os.listdir('/tmp'))\n")
    assert outcome.content == b"True []\n"


@pytest.mark.parametrize(
    ("files", "cores", "num_programs"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5, 1),
        ({"cpu.max": "max 100000\n"}, math.inf, 64),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf, 64),
        ({}, math.inf, 64),
    ],
)
def test_programs_share_no_core_where_a_container_has_few_of_many(
    tmp_path: Path, monkeypatch, files: dict[str, str], cores: float, num_programs: int
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert moored.cores.container_cores(tmp_path) == cores
    monkeypatch.setattr(moored.cores, "container_cores", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert SandboxPool().max_concurrency == num_programs


def test_installed_packages_are_not_there(pool: SandboxPool) -> None:
    source = """
import glob, os, sys
roots = ("/python/lib", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib")
folders = {f for root in roots for f in glob.glob(root + "/python3*/*-packages")}
print(sorted(name for folder in folders for name in os.listdir(folder)))
sys.path += sorted(folders)
for folder in folders:
    try:
        open(folder + "/a", "w")
        print("written")
    except OSError:
        pass
try:
    import pip
    print("imported")
except ImportError:
    print("none")
"""
    assert run_one(pool, source) == Outcome("done", b"[]\nnone\n")


def test_the_order_of_a_set_is_the_same_in_every_run(pool: SandboxPool) -> None:
    source = "print(*{str(x) for x in range(100)})\n"
    assert len({run_one(pool, source, 5.0) for _ in range(5)}) == 1


def test_each_test_of_a_program_has_its_own_input_and_output(pool: SandboxPool) -> None:
    source = "import sys\nprint(input())\nprint(sys.stdin.read().split())\n"
    job = Job(kind="stdin", source=source, tests=("a\nb c\n", "d\n", ""))
    assert pool.run(job) == [
        Outcome("done", b"a\n['b', 'c']\n"),
        Outcome("done", b"d\n[]\n"),
        Outcome("failed", b"EOFError"),
    ]


def test_output_before_a_failure_does_not_reach_the_next_test(pool: SandboxPool) -> None:
    source = "x = input()\nprint('begun', x)\nassert x != 'bad'\n"
    job = Job(kind="stdin", source=source, tests=("bad", "good"))
    assert pool.run(job) == [Outcome("failed", b"AssertionError"), Outcome("done", b"begun good\n")]


def test_a_crash_costs_one_test_and_a_time_out_the_rest(pool: SandboxPool) -> None:
    source = (
        "import os\nx = input()\nif x == 'crash': os._exit(0)\nwhile x == 'hang': pass\nprint(x)\n"
    )
    job = Job(kind="stdin", source=source, tests=("a", "crash", "b", "hang", "c"), wall_s=LIMIT_S)
    statuses = [outcome.status for outcome in pool.run(job)]
    assert statuses == ["done", "lost", "done", "timed out", "not run"]


def test_the_way_a_script_ends_is_kept(pool: SandboxPool) -> None:
    ends = {
        "import sys\nprint(1)\nsys.exit()\n": Outcome("done", b"1\n"),
        "import sys\nprint(1)\nsys.exit(2)\n": Outcome("failed", b"SystemExit"),
        "import atexit\natexit.register(print, 2)\n": Outcome("done", b"2\n"),
        "import threading\nthreading.Thread(target=print, args=(3,)).start()\n": Outcome(
            "done", b"3\n"
        ),
        "import os\nos.write(1, b'4')\n": Outcome("done", b"4"),
        "if __name__ == '__main__': print(5)\n": Outcome("done", b"5\n"),
        "open(1, 'w').write('6')\n": Outcome("done", b"6"),
    }
    assert {source: run_one(pool, source, 5.0) for source in ends} == ends


def test_calls_return_values_and_forged_messages_prove_nothing(pool: SandboxPool) -> None:
    source = "def f(x):\n    return [x, (x, None), {'k': {x}}, 1.5, True, 1e999, 'ü\"', b'a', 1j]\n"
    job = Job(kind="call", source=source, entry="f", tests=([7],))
    expected = (
        b'[7, {"tuple": [7, null]}, {"dict": [["k", {"set": [7]}]]}, 1.5, true, Infinity, '
        b'"\\u00fc\\"", {"bytes": "61"}, {"complex": [0.0, 1.0]}]'
    )
    assert pool.run(job) == [Outcome("done", expected)]
    forged = "import os\nos.write(60, (0).to_bytes(4, 'big') + b'D')\ndef f(x): return 1\n"
    job = Job(kind="beside", source=forged, entry="f", tests=("assert f(1) == 2",))
    assert pool.run(job) == [Outcome("lost")]


def test_a_result_that_equals_everything_fails_an_assert_beside_the_program(
    pool: SandboxPool,
) -> None:
    source = "class X(int):\n    def __eq__(self, other): return True\ndef f(x): return [X()]\n"
    job = Job(kind="beside", source=source, entry="f", tests=("assert f(1) == [2]",))
    assert pool.run(job) == [Outcome("failed", b"AssertionError")]


def test_threads_that_end_do_not_take_sandboxes_with_them(pool: SandboxPool) -> None:
    # The kernel kills a child of bwrap when the thread that started it ends.
    outcomes: list[Outcome] = []
    for _ in range(8):
        caller = threading.Thread(target=lambda: outcomes.append(run_one(pool, "print(1)\n", 5.0)))
        caller.start()
        caller.join()
    assert outcomes == [Outcome("done", b"1\n")] * 8
