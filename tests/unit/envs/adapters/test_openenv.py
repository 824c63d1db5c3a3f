"""The OpenEnv adapter against a server that talks its protocol, and against the real package."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets")

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from moored.envs import format_reply
from moored.envs.adapters import OpenEnv
from moored.envs.check.runner import check_env
from moored.envs.mix import make_env
from moored.errors import EnvError, MooredError
from moored.json_http import HttpError, JsonClient

NUMBER = {"number": {"type": "integer"}, "metadata": {"type": "object"}}
SERVER = Path(__file__).with_name("openenv_server.py")


def answer(text: object) -> str:
    return format_reply("", str(text))


def double(observation: Mapping[str, Any]) -> str:
    return str(2 * int(observation["text"].split()[1]))


def observation(text: str, reward: float | None = None, done: bool = False) -> dict[str, object]:
    data = {"observation": {"text": text, "more": 1}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str) -> dict[str, object]:
    return {"type": "error", "data": {"code": code, "message": f"says {code}"}}


def count(kind: str, data: dict[str, Any], state: dict[str, int]) -> object:
    """A game: double the number, once."""
    if kind == "reset":
        state["number"] = data["seed"] % 1000
        return observation(f"double {state['number']}")
    if data["number"] < 0:
        return error("VALIDATION_ERROR")
    return observation("over", float(data["number"] == 2 * state["number"]), done=True)


@contextmanager
def openenv_server(
    play: Callable[[str, dict[str, Any], dict[str, int]], object],
    fields: Mapping[str, object] = NUMBER,
) -> Iterator[str]:
    """`play` answers each message with JSON, or bytes to send as they are."""

    def handle(connection: ServerConnection) -> None:
        state: dict[str, int] = {}
        for message in connection:
            request = json.loads(message)
            if request["type"] == "close":
                return
            said = play(request["type"], request["data"], state)
            connection.send(said.decode() if isinstance(said, bytes) else json.dumps(said))

    def schema(connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": {"properties": fields}}).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    server = serve(handle, "127.0.0.1", 0, process_request=schema)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
    finally:
        server.shutdown()
        thread.join()


def test_an_episode_is_played_over_the_websocket() -> None:
    with (
        openenv_server(count) as url,
        closing(OpenEnv(url=url, observation_field="text", oracle=double)) as env,
    ):
        user = env.reset(0)[1].text
        assert "double" in user and "more" not in user
        result = env.step(answer(env.oracle()))
        assert (result.reward, result.terminated, result.success) == (1.0, True, True)
        env.reset(0)
        assert not env.step(answer(1)).success
        with pytest.raises(EnvError, match="call reset"):
            env.step(answer(1))


def test_an_answer_that_the_schema_refuses_is_malformed_and_the_episode_goes_on() -> None:
    with openenv_server(count) as url, closing(OpenEnv(url=url, max_turns=3)) as env:
        env.reset(0)
        for reply in (answer("five"), answer(-1)):
            result = env.step(reply)
            assert (result.is_valid, result.reward, result.is_over) == (False, -0.1, False)
        assert env.step(answer(5)).terminated


def test_of_several_fields_the_answer_is_a_json_object_or_fills_the_one_that_is_named() -> None:
    seen: list[dict[str, Any]] = []

    def note(kind: str, data: dict[str, Any], state: dict[str, int]) -> object:
        seen.append(data)
        return observation(str(data.get("seed")))

    fields = {"row": {"type": "integer"}, "mark": {"type": "string"}}
    with openenv_server(note, fields) as url:
        with closing(OpenEnv(url=url)) as env:
            assert "JSON object (row, mark)" in env.reset(0)[0].text
            env.step(answer('{"row": 1, "mark": "X"}'))
            assert seen[-1] == {"row": 1, "mark": "X"}
            assert not env.step(answer("[1]")).is_valid
        with closing(OpenEnv(url=url, action_field="mark")) as env:
            env.reset(0)
            env.step(answer("O"))
            assert seen[-1] == {"mark": "O"}


def test_a_number_that_may_be_null_is_still_a_number() -> None:
    fields = {"number": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}
    with openenv_server(count, fields) as url, closing(OpenEnv(url=url)) as env:
        env.reset(0)
        assert not env.step(answer("five")).is_valid
        assert env.step(answer(5)).terminated


def test_a_copy_pickled_in_mid_episode_goes_on_in_a_session_of_its_own() -> None:
    with openenv_server(count) as url, closing(OpenEnv(url=url)) as env:
        env.reset(3)
        with closing(pickle.loads(pickle.dumps(env))) as copy:
            assert copy.step(answer(7)) == env.step(answer(7))


def test_an_instance_does_not_grow_by_the_text_of_every_task_it_has_played() -> None:
    def long(kind: str, data: dict[str, Any], state: dict[str, int]) -> object:
        return observation(f"{data.get('seed')} " * 1500)

    with openenv_server(long) as url, closing(OpenEnv(url=url)) as env:
        env.reset(0)
        before = len(pickle.dumps(env))
        for task in range(1, 11):
            env.reset(task)
        # Ten first observations have over ten thousand characters each.
        assert len(pickle.dumps(env)) < before + 5000


def test_a_server_that_ignores_the_seed_is_refused_in_a_sentence() -> None:
    numbers = iter(range(1000))

    def play(kind: str, data: dict[str, Any], state: dict[str, int]) -> object:
        return observation(f"start {next(numbers)}")

    with openenv_server(play) as url, closing(OpenEnv(url=url)) as env:
        env.reset(0)
        with pytest.raises(EnvError, match="another first observation for the same seed"):
            env.reset(0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"<html>", "openenv: http"),
        ([1], "a JSON object was expected"),
        (error("EXECUTION_ERROR"), "the server says: says EXECUTION_ERROR"),
        ({"type": "state", "data": {}}, "an observation was expected"),
        ({"type": "observation", "data": {"observation": {}, "done": 1}}, "an observation was"),
        (observation("x", float("nan")), "reward must be a finite number"),
    ],
)
def test_a_server_that_talks_nonsense_costs_the_episode(said: object, message: str) -> None:
    def play(kind: str, data: dict[str, Any], state: dict[str, int]) -> object:
        return said if kind == "step" else count(kind, data, state)

    with openenv_server(play) as url, closing(OpenEnv(url=url)) as env:
        env.reset(0)
        with pytest.raises(EnvError, match=message):
            env.step(answer(1))
        env.reset(0)


def test_a_server_that_hangs_or_is_gone_costs_the_episode() -> None:
    def play(kind: str, data: dict[str, Any], state: dict[str, int]) -> object:
        if kind == "step":
            time.sleep(0.6)
        return count(kind, data, state)

    with openenv_server(play) as url, closing(OpenEnv(url=url, timeout_s=0.3)) as env:
        env.reset(0)
        with pytest.raises(EnvError, match=r"no answer within 0\.3 s"):
            env.step(answer(1))
    with pytest.raises(EnvError, match="openenv: http"):
        env.reset(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs the option 'url'"),
        ({"url": "localhost:8000"}, "url must look like http"),
        ({"url": "http://a", "max_turns": 0}, "max_turns must be at least 1"),
        ({"url": "http://a", "timeout_s": 0}, "timeout_s must be positive"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(MooredError, match=said):
        make_env("openenv", **options)


@pytest.fixture
def real_server() -> Iterator[str]:
    """A server of OpenEnv's own package, which may live in another Python."""
    python = os.environ.get("MOORED_OPENENV_PYTHON")
    if python is None and importlib.util.find_spec("openenv") is None:
        pytest.skip("needs openenv-core here, or in the Python that MOORED_OPENENV_PYTHON names")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python or sys.executable, str(SERVER), str(port)]
    process = subprocess.Popen(command, env=environ)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_up(url):
            assert process.poll() is None
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def is_up(url: str) -> bool:
    client = JsonClient(url, api_key=None, timeout_s=1.0)
    try:
        return bool(client.get("/health"))
    except HttpError:
        return False
    finally:
        client.close()


def test_an_environment_of_the_real_package_keeps_the_rules(real_server: str) -> None:
    options: dict[str, object] = {
        "url": real_server,
        "observation_field": "text",
        "max_turns": 3,
        "oracle": double,
    }
    rules = ["protocol", "determinism", "pickling", "ending", "reference", "splits", "replies"]
    report = check_env(
        "openenv",
        options=options,
        num_tasks=2,
        num_split_seeds=10,
        in_child=False,
        only=rules,
        reply_limit_s=1.0,
    )
    report.raise_if_failed()
