"""A pool of sandboxes for the tests of a session; skipped where bubblewrap cannot be used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moored.envs.code.isolation import Limits, make_isolation
from moored.envs.code.sandbox import SandboxPool
from moored.errors import EnvError


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
