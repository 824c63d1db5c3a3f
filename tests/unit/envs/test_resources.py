"""Resources: declared by an environment, opened once, attached, closed."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from moored.envs import Resource, StepResult
from moored.envs.mix import open_env
from moored.envs.resources import SharedResources, detached, resources_of
from moored.errors import EnvError
from moored.types import Message

LOG: list[str] = []


@dataclass
class Server(Resource):
    """Notes what happens to it; cannot be pickled while it is open."""

    port: int = 0

    def open(self) -> None:
        LOG.append(f"open {self.port}")
        self.handler = lambda: None

    def close(self) -> None:
        LOG.append(f"close {self.port}")


class Client:
    name: ClassVar[str] = "client"
    is_stochastic: bool = False
    max_turns: int = 1
    server: Server

    def __init__(self, *, port: int = 1) -> None:
        self.port = port

    def resources(self) -> Any:
        return {"server": Server(self.port)}

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        return [Message("user", f"port {self.server.port}")]

    def step(self, reply: str) -> StepResult:
        return StepResult(observation="", reward=0.0, terminated=True)

    def oracle(self) -> str:
        return ""

    def close(self) -> None:
        LOG.append("close client")


class Plain(Resource):
    """Equal only to itself."""


@dataclass
class Missing(Resource):
    def open(self) -> None:
        raise FileNotFoundError("wiki.index")


@dataclass
class Stuck(Resource):
    def close(self) -> None:
        raise OSError("busy")


class Declares(Client):
    """Declares what it is given."""

    def __init__(self, declared: object) -> None:
        super().__init__()
        self.declared = declared

    def resources(self) -> Any:
        return self.declared() if callable(self.declared) else self.declared


@pytest.fixture(autouse=True)
def fresh_log():
    LOG.clear()


def test_equal_resources_are_one_and_others_are_not():
    shared = SharedResources()
    envs = [Client(), Client(), Client(port=2)]
    for env in envs:
        shared.attach(env)
    assert envs[0].server is envs[1].server and envs[2].server.port == 2
    shared.close()
    assert LOG == ["open 1", "open 2", "close 2", "close 1"]


def test_closing_twice_closes_once():
    shared = SharedResources()
    shared.attach(Client())
    shared.close()
    shared.close()
    assert LOG == ["open 1", "close 1"]


def test_a_resource_that_fails_to_close_loses_no_other(caplog):
    shared = SharedResources()
    shared.attach(Declares({"server": Server(1), "stuck": Stuck()}))
    shared.close()
    assert LOG == ["open 1", "close 1"]
    assert "Stuck could not be closed: OSError: busy" in caplog.text


def test_a_resource_that_cannot_be_opened_is_an_error_and_is_not_closed():
    shared = SharedResources()
    message = "client: the resource 'index' could not be opened: FileNotFoundError: wiki.index"
    with pytest.raises(EnvError, match=message):
        shared.attach(Declares({"server": Server(1), "index": Missing()}))
    shared.close()
    assert LOG == ["open 1", "close 1"]


def test_a_resource_that_equals_nothing_is_refused():
    with pytest.raises(EnvError, match="dataclass"):
        SharedResources().attach(Declares(lambda: {"index": Plain()}))


@pytest.mark.parametrize("declared", [[Server(1)], {"server": "localhost"}, None])
def test_only_resources_can_be_declared(declared):
    with pytest.raises(EnvError, match="Resource"):
        resources_of(Declares(declared))


def test_an_environment_is_pickled_without_its_open_resources():
    shared, env = SharedResources(), Client(port=3)
    shared.attach(env)
    with detached(env) as held:
        copy = pickle.loads(pickle.dumps(env))
        assert list(held) == ["server"]
    assert env.server is held["server"] and not hasattr(copy, "server")
    shared.close()


def test_an_environment_can_be_opened_for_one_block():
    with open_env(Client, port=4) as env:
        assert env.reset(0)[0].text == "port 4"
    assert LOG == ["open 4", "close client", "close 4"]
