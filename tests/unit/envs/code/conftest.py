"""Sandboxes for the tests of a session, and what hostile programs aim at.

Tests that need bubblewrap or docker are skipped where it cannot be used.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moored.envs.code import sandbox
from moored.envs.code.isolation import Bubblewrap, Isolation, Kind, Limits, make_isolation
from moored.envs.code.sandbox import SandboxPool
from moored.errors import EnvError
from tests.unit.envs.code.host import Host

DOCKER_IMAGE = "MOORED_DOCKER_IMAGE"
"""The variable that names an image with Python 3.11 or newer."""


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    try:
        make_isolation("bubblewrap", Limits())
    except EnvError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pool(bubblewrap: None) -> Iterator[SandboxPool]:
    sandboxes = SandboxPool()
    sandboxes.open()
    yield sandboxes
    sandboxes.close()


@pytest.fixture(scope="session")
def users_pool(bubblewrap: None) -> Iterator[SandboxPool]:
    """The sandbox that an ordinary user gets, for whoever runs the tests.

    Root in a user namespace without capabilities owns its processes there as any user does.
    """

    def make_for_user(kind: Kind, limits: Limits, *, image: str) -> Isolation:
        made = make_isolation(kind, limits, image=image)
        assert isinstance(made, Bubblewrap)
        return replace(made, is_root=False)

    sandboxes = SandboxPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "make_isolation", make_for_user)
        sandboxes.open()
    yield sandboxes
    sandboxes.close()


@pytest.fixture(scope="session")
def docker_image() -> str:
    image = os.environ.get(DOCKER_IMAGE, "")
    if not image:
        pytest.skip(f"{DOCKER_IMAGE} names no image with Python; docker is not tested")
    try:
        make_isolation("docker", Limits(), image=image)
    except EnvError as error:
        pytest.skip(str(error))
    return image


@pytest.fixture(scope="session")
def docker_pool(docker_image: str) -> Iterator[SandboxPool]:
    sandboxes = SandboxPool("docker", image=docker_image)
    sandboxes.open()
    yield sandboxes
    sandboxes.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    tmp_path = tmp_path_factory.mktemp("host")
    secret = tmp_path / "secret"
    secret.write_text("treasure")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Host(secret, tmp_path / "marker", listener, victim)
    victim.kill()
    victim.wait()
