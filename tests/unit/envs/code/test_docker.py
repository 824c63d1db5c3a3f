"""The sandbox of docker, tried on a real daemon when MOORED_DOCKER_IMAGE names an image."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moored.envs.code.isolation import Limits, make_isolation
from moored.envs.code.sandbox import Job, Outcome, SandboxPool
from moored.envs.mix import open_env
from moored.errors import EnvError
from moored.reply import format_reply
from tests.unit.envs.code.host import LIMIT_S, MARGIN_S, Host, run_one
from tests.unit.envs.code.hostile_programs import HANGS, HOSTILE

OF_THE_IMAGE = {"read the users"}
"""Programs that may read what they ask for: the image has a file of that name."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained_by_docker(
    name: str, docker_pool: SandboxPool, host: Host
) -> None:
    source = host.aim(HOSTILE[name])
    took_s = float("inf")
    for _ in range(5):  # a slow one again: the time includes the start of a container
        start = time.monotonic()
        outcome = run_one(docker_pool, source)
        took_s = min(took_s, time.monotonic() - start)
        if took_s <= LIMIT_S + MARGIN_S:
            break
        time.sleep(2.0)
    assert b"ESCAPED" not in outcome.content or name in OF_THE_IMAGE
    assert b"treasure" not in outcome.content
    assert took_s <= LIMIT_S + MARGIN_S
    assert host.is_unharmed()
    assert outcome.status == "timed out" or name not in HANGS


def test_docker_runs_programs_and_each_starts_afresh(docker_pool: SandboxPool) -> None:
    # The other tests would also pass if no program ever ran.
    source = "import sys\nprint(input())\nprint(sys.stdin.read().split())\n"
    job = Job(kind="stdin", source=source, tests=("a\nb c\n", "d\n", ""), wall_s=10.0)
    assert docker_pool.run(job) == [
        Outcome("done", b"a\n['b', 'c']\n"),
        Outcome("done", b"d\n[]\n"),
        Outcome("failed", b"EOFError"),
    ]
    run_one(docker_pool, "open('/tmp/note', 'w').write('hello')\n", 10.0)
    outcome = run_one(docker_pool, "import os\nprint(os.listdir('/tmp'), os.getuid())\n", 10.0)
    assert outcome == Outcome("done", b"[] 65534\n")


def test_a_program_in_docker_sees_two_processes_and_no_network(docker_pool: SandboxPool) -> None:
    source = (
        "import os\nprint(sum(x.isdigit() for x in os.listdir('/proc')))\n"
        "print(os.listdir('/sys/class/net'))\n"
    )
    assert run_one(docker_pool, source, 10.0) == Outcome("done", b"2\n['lo']\n")


def test_the_oracle_solves_problems_in_docker(docker_image: str) -> None:
    with open_env("code", sandbox="docker", image=docker_image, time_limit_s=10.0) as env:
        for task_seed in range(3):
            env.reset(task_seed)
            assert env.step(format_reply("", env.oracle())).success


def test_no_container_is_left_when_the_pool_closes(docker_image: str) -> None:
    own = SandboxPool("docker", Limits(memory_mb=256), docker_image)
    with NewContainers() as ours:
        own.open()
        run_one(own, "import time\ntime.sleep(1000)\n")
        assert ours.names()
        own.close()
        assert ours.left() == set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_containers_end_with_a_process_that_is_stopped(number: int, docker_image: str) -> None:
    # A program sleeps in one container, deaf to signals; others wait for a program.
    sleeper = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(1000)\n"
    script = (
        "import threading, time; from moored.envs.code.sandbox import SandboxPool, Job\n"
        f"pool = SandboxPool('docker', image={docker_image!r}); pool.open()\n"
        f"job = Job(kind='stdin', source={sleeper!r}, tests=('',), wall_s=30.0)\n"
        "threading.Thread(target=pool.run, args=(job,), daemon=True).start()\n"
        "pool.run(Job(kind='stdin', source='print(1)', tests=('',), wall_s=10.0))\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    with NewContainers() as ours:
        command = [sys.executable, "-c", script]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with owner:
            assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
            assert len(ours.names()) >= 2
            owner.send_signal(number)
        assert ours.left() == set()


class NewContainers:
    """Containers that were not there at the beginning of a block."""

    def __enter__(self) -> NewContainers:
        self._before = _containers()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names():
            subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)

    def names(self) -> set[str]:
        return _containers() - self._before

    def left(self, wait_s: float = 20.0) -> set[str]:
        """Those that are still there after a while."""
        end_s = time.monotonic() + wait_s
        while self.names() and time.monotonic() < end_s:
            time.sleep(0.1)
        return self.names()


def _containers() -> set[str]:
    command = ["docker", "ps", "--all", "--format", "{{.Names}}", "--filter", "name=moored-"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_an_image_that_is_not_there_is_refused(docker_image: str) -> None:
    with pytest.raises(EnvError, match="docker pull moored/none:1"):
        make_isolation("docker", Limits(), image="moored/none:1")


def test_an_image_without_python_is_refused(docker_image: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.tar"
    subprocess.run(["tar", "-cf", empty, "-T", "/dev/null"], check=True)
    subprocess.run(["docker", "import", empty, "moored-empty"], capture_output=True, check=True)
    try:
        with pytest.raises(EnvError, match=r"'moored-empty' \(.*python3"):
            make_isolation("docker", Limits(), image="moored-empty")
    finally:
        subprocess.run(["docker", "rmi", "moored-empty"], capture_output=True, check=True)
