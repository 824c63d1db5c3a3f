"""The server of environments, without a network: sessions, limits, tokens, OpenEnv's WebSocket."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from moored.envs import format_reply
from moored.envs.base import Resource, StepResult
from moored.envs.mix import make_env
from moored.envs.serving.app import build_app, given_token
from moored.envs.serving.sessions import Limits, Sessions, UnknownSessionError
from moored.envs.serving.wire import (
    NoRoomError,
    WireError,
    content_from_json,
    content_to_json,
    messages_from_json,
    messages_to_json,
    result_from_json,
    result_to_json,
)
from moored.errors import EnvTimeoutError, MooredError
from moored.types import ImagePart, Message, TextPart
from tests.env_server import serve_env

pytest.importorskip("starlette")


class Odd:
    """Say what is asked for: an environment that fails as its reply says."""

    name: ClassVar[str] = "odd"
    is_stochastic = False
    max_turns = 3
    gate = threading.Event()

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        return [Message("system", "Odd."), Message("user", f"{task_seed} {episode_seed}")]

    def step(self, reply: str) -> StepResult:
        if reply == "raise":
            raise KeyError("lost")
        if reply == "late":
            raise TimeoutError("of its own")
        if reply == "exit":
            raise SystemExit(3)
        if reply == "tuple":
            return ("on", 0.5)  # pyright: ignore[reportReturnType]
        if reply == "hang":
            self.gate.wait(30)
        reward = float("nan") if reply == "nan" else 0.5
        return StepResult(
            observation=f"You said {reply}.", reward=reward, terminated=reply == "end"
        )

    def oracle(self) -> str:
        return "end"

    def close(self) -> None:
        pass


@contextmanager
def client_of(source: Any = Odd, *, token: str = "", **limits: Any) -> Iterator[Any]:
    from starlette.testclient import TestClient

    app = build_app(lambda: make_env(source), limits=Limits(**limits), token=token)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def opened(client: Any, **seeds: int) -> str:
    session = client.post("/sessions").json()["session"]
    assert client.post(f"/sessions/{session}/reset", json=seeds).status_code == 200
    return f"/sessions/{session}"


def test_an_episode_over_http_is_the_episode_itself() -> None:
    env = make_env("sokoban")
    with client_of("sokoban") as client:
        session = client.post("/sessions").json()["session"]
        path = f"/sessions/{session}"
        first = client.post(f"{path}/reset", json={"task_seed": 7, "episode_seed": 1}).json()
        assert messages_from_json(first["messages"]) == env.reset(7, 1)
        for turn in range(env.max_turns):
            answer = client.post(f"{path}/oracle", json={}).json()["answer"]
            assert answer == env.oracle()
            reply = format_reply("", answer)
            there = client.post(f"{path}/step", json={"reply": reply, "turn": turn}).json()
            here = env.step(reply)
            assert result_from_json(there) == here
            if here.is_over:
                break
        assert here.success
        assert client.delete(path).status_code == 200
        assert client.delete(path).status_code == 404


def test_a_repeated_step_is_played_once_and_another_turn_is_refused() -> None:
    with client_of() as client:
        path = opened(client)
        first = client.post(f"{path}/step", json={"reply": "a", "turn": 0})
        again = client.post(f"{path}/step", json={"reply": "a", "turn": 0})
        assert (again.status_code, again.json()) == (200, first.json())
        skipped = client.post(f"{path}/step", json={"reply": "b", "turn": 5})
        assert (skipped.status_code, skipped.json()["error"]) == (
            409,
            "turn 1 was expected, got a reply for 5",
        )


def test_a_session_does_not_keep_the_last_reply() -> None:
    class Silent(Odd):
        def step(self, reply: str) -> StepResult:
            return StepResult(observation="on", reward=0.0, terminated=False)

    async def play() -> int:
        sessions = Sessions(Silent, Limits())
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            session = await sessions.open()
            await sessions.reset(session, 0, 0)
            await sessions.step(session, "x" * 1_000_000, 0)
        assert sessions.num_open == 20
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        assert asyncio.run(play()) < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_step_after_the_end_is_refused_until_the_next_reset() -> None:
    with client_of() as client:
        path = opened(client)
        assert client.post(f"{path}/step", json={"reply": "end", "turn": 0}).json()["terminated"]
        assert client.post(f"{path}/step", json={"reply": "a", "turn": 1}).status_code == 409
        assert client.post(f"{path}/reset", json={}).status_code == 200
        assert client.post(f"{path}/step", json={"reply": "a", "turn": 0}).status_code == 200


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        ("raise", 500, "KeyError: 'lost'"),
        ("late", 500, "TimeoutError: of its own"),
        ("exit", 409, "it raised SystemExit: 3"),
        ("nan", 500, "ValueError"),
        ("tuple", 409, "step must return a StepResult, got tuple"),
    ],
)
def test_what_an_environment_raises_is_an_answer(reply: str, status: int, said: str) -> None:
    with client_of() as client:
        path = opened(client)
        answer = client.post(f"{path}/step", json={"reply": reply, "turn": 0})
        assert answer.status_code == status
        assert said in answer.json()["error"]
        assert client.get("/health").json()["status"] == "healthy"


def test_half_a_surrogate_pair_travels_both_ways() -> None:
    with client_of() as client:
        path = opened(client)
        body = json.dumps({"reply": "\ud800", "turn": 0})
        answer = client.post(f"{path}/step", content=body)
        assert json.loads(answer.content)["observation"] == "You said \ud800."


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("reset", "no json", 400),
        ("reset", "[1]", 422),
        ("reset", '{"task_seed": -1}', 422),
        ("reset", '{"task_seed": true}', 422),
        ("reset", '{"task_seed": 1.5}', 422),
        ("step", '{"turn": 0}', 422),
        ("step", '{"reply": "a"}', 422),
        ("step", json.dumps({"reply": "x" * 2000, "turn": 0}), 413),
    ],
)
def test_requests_that_make_no_sense_are_refused(path: str, body: str, status: int) -> None:
    with client_of(max_request_bytes=1000) as client:
        session = opened(client)
        answer = client.post(f"{session}/{path}", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]


def test_a_request_whose_body_never_ends_is_refused_and_its_connection_closed() -> None:
    with serve_env("bandit", "--call-timeout=0.5") as (url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = "POST /sessions/x/step HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode() + b'{"reply": ')
            with connection.makefile("rb") as answer:
                said = answer.read().decode()  # until the server closes
    assert said.startswith("HTTP/1.1 408 ") and "not complete after 0.5 s" in said


def test_no_more_sessions_than_allowed_are_opened() -> None:
    with client_of(max_sessions=2) as client:
        first, _ = opened(client), opened(client)
        assert client.post("/sessions").status_code == 503
        assert client.get("/health").json()["sessions"] == {"active": 2, "max": 2}
        client.delete(first)
        assert client.post("/sessions").status_code == 200


def test_an_idle_session_is_closed_and_a_used_one_is_not() -> None:
    async def play() -> None:
        sessions = Sessions(Odd, Limits(idle_timeout_s=600.0))
        idle, used = await sessions.open(), await sessions.open()
        for session in (idle, used):
            session.used_s -= 1000.0
        await sessions.reset(used, 0, 0)
        await sessions.close_idle()
        assert sessions.find(used.id) is used
        with pytest.raises(UnknownSessionError):
            sessions.find(idle.id)

    asyncio.run(play())


def test_a_hanging_call_ends_its_session_and_keeps_its_place_until_it_returns() -> None:
    async def play() -> None:
        Odd.gate.clear()
        limits = Limits(max_sessions=1)
        sessions = Sessions(Odd, limits)
        session = await sessions.open()
        await sessions.reset(session, 0, 0)
        sessions.limits = replace(limits, call_timeout_s=0.05)  # too short for others when busy
        with pytest.raises(EnvTimeoutError, match=r"over 0\.05 s"):
            await sessions.step(session, "hang")
        with pytest.raises(UnknownSessionError):
            sessions.find(session.id)
        with pytest.raises(NoRoomError):
            await sessions.open()
        sessions.limits = limits
        Odd.gate.set()
        while sessions.num_open:
            await asyncio.sleep(0.01)
        await sessions.open()

    asyncio.run(play())


def test_a_token_is_asked_for_everywhere_but_on_the_health_page() -> None:
    with client_of(token="secret") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/environment").status_code == 401
        wrong = {"Authorization": "Bearer guess"}
        assert client.post("/sessions", headers=wrong).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert client.get("/environment", headers=right).json() == {
            "protocol": 1,
            "name": "odd",
            "max_turns": 3,
            "is_stochastic": False,
        }


def test_a_token_may_be_the_password_of_an_address() -> None:
    basic = base64.b64encode(b"moored:secret").decode()
    assert given_token(f"Basic {basic}") == b"secret"
    assert given_token("Bearer secret") == b"secret"
    assert given_token("Basic !!") == given_token("Digest x") == given_token("") == b""


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1.evil", "null", "//["])
def test_a_page_of_another_site_may_not_play(origin: str) -> None:
    from starlette.websockets import WebSocketDisconnect

    with client_of() as client:
        answer = client.post("/sessions", headers={"Origin": origin})
        assert (answer.status_code, client.get("/health").json()["sessions"]["active"]) == (403, 0)
        with (
            pytest.raises(WebSocketDisconnect),
            client.websocket_connect("/ws", headers={"Origin": origin}),
        ):
            pass


def test_a_page_of_the_same_host_may_play() -> None:
    with client_of() as client:
        same = {"Origin": "http://testserver:3000"}
        assert client.post("/sessions", headers=same).status_code == 200
        with client.websocket_connect("/ws", headers=same) as socket:
            socket.send_json({"type": "reset"})
            assert socket.receive_json()["type"] == "observation"


def test_openenv_messages_play_an_episode() -> None:
    with client_of() as client, client.websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset", "data": {"seed": 5, "episode_id": "mine"}})
        first = socket.receive_json()
        assert first["type"] == "observation"
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        assert first["data"]["observation"]["messages"][1] == {"role": "user", "content": "5 0"}
        socket.send_json({"type": "step", "data": {"reply": "end"}})
        last = socket.receive_json()["data"]
        assert (last["reward"], last["done"]) == (0.5, True)
        assert last["observation"]["text"] == "You said end."
        socket.send_json({"type": "state"})
        assert socket.receive_json() == {
            "type": "state",
            "data": {"episode_id": "mine", "step_count": 1},
        }


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ('{"type": "dance"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {"action": 1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"reply": "raise"}}', "EXECUTION_ERROR"),
    ],
)
def test_openenv_errors_are_named_and_the_session_goes_on(message: str, code: str) -> None:
    with client_of() as client, client.websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset"})
        socket.receive_json()
        socket.send_text(message)
        answer = socket.receive_json()
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        socket.send_json({"type": "step", "data": {"reply": "a"}})
        assert socket.receive_json()["data"]["reward"] == 0.5


def test_an_openenv_connection_is_refused_without_room_or_token() -> None:
    from starlette.websockets import WebSocketDisconnect

    with client_of(max_sessions=1) as client:
        opened(client)
        with client.websocket_connect("/ws") as socket:
            assert socket.receive_json()["data"]["code"] == "CAPACITY_REACHED"
    with (
        client_of(token="secret") as client,
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/ws"),
    ):
        pass


def test_pictures_travel_as_png() -> None:
    image_module = pytest.importorskip("PIL.Image")
    picture = image_module.new("RGB", (3, 2), (200, 10, 30))
    content = [TextPart(type="text", text="see"), ImagePart(type="image", image=picture)]
    there = json.loads(json.dumps(content_to_json(content)))
    back: Any = content_from_json(there)
    assert back[0] == content[0]
    assert back[1]["image"].tobytes() == picture.tobytes()


def test_messages_and_results_come_back_as_they_were() -> None:
    messages = [Message("system", "s"), Message("user", "ü")]
    assert messages_from_json(json.loads(json.dumps(messages_to_json(messages)))) == messages
    result = StepResult(
        observation="o",
        reward=-0.1,
        penalty=-0.1,
        terminated=False,
        truncated=True,
        metrics={"m": 2.0},
    )
    assert result_from_json(json.loads(json.dumps(result_to_json(result)))) == result


GOOD = result_to_json(StepResult(observation="o", reward=0.0, terminated=False))


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {},
        {**GOOD, "reward": "much"},
        {**GOOD, "reward": True},
        {**GOOD, "reward": float("nan")},
        {**GOOD, "reward": 10**400},
        {**GOOD, "terminated": 1},
        {**GOOD, "terminated": True, "truncated": True},
        {**GOOD, "observation": 5},
        {**GOOD, "observation": []},
        {**GOOD, "observation": [{"type": "image", "png": "no"}]},
        {**GOOD, "metrics": {"m": "x"}},
    ],
)
def test_a_result_that_is_none_is_refused(data: object) -> None:
    with pytest.raises(WireError):
        result_from_json(data)


@pytest.mark.parametrize("data", [None, [], {}, [1], [{"role": "king", "content": "a"}]])
def test_messages_that_are_none_are_refused(data: object) -> None:
    with pytest.raises(WireError):
        messages_from_json(data)


class Numpy(Odd):
    """Gives numbers and flags as numpy has them."""

    def step(self, reply: str) -> StepResult:
        return StepResult(
            observation="on",
            reward=np.float32(0.5),  # pyright: ignore[reportArgumentType]
            terminated=np.bool_(False),  # pyright: ignore[reportArgumentType]
            success=np.bool_(True),  # pyright: ignore[reportArgumentType]
            metrics={"moves": np.int64(3)},  # pyright: ignore[reportArgumentType]
        )


def test_numbers_and_flags_of_numpy_travel_over_both_protocols() -> None:
    with client_of(Numpy) as client:
        path = opened(client)
        there = client.post(f"{path}/step", json={"reply": "a", "turn": 0})
        found = result_from_json(there.json())
        assert (found.reward, found.success, found.metrics) == (0.5, True, {"moves": 3.0})
        with client.websocket_connect("/ws") as socket:
            socket.send_text(json.dumps({"type": "reset", "data": {"seed": 1}}))
            socket.receive_text()
            socket.send_text(json.dumps({"type": "step", "data": {"reply": "a"}}))
            answer = json.loads(socket.receive_text())
    assert answer["type"] == "observation", answer
    assert (answer["data"]["reward"], answer["data"]["done"]) == (0.5, False)
    assert answer["data"]["observation"]["success"] is True


@pytest.mark.parametrize("limit", ["max_sessions", "idle_timeout_s", "max_request_bytes"])
def test_limits_must_be_positive(limit: str) -> None:
    with pytest.raises(MooredError, match=f"{limit} must be positive, got 0"):
        Limits(**{limit: 0})


def test_what_sessions_share_is_opened_once_and_closed_with_the_server() -> None:
    events: list[str] = []

    @dataclass
    class Index(Resource):
        def open(self) -> None:
            events.append("open")

        def close(self) -> None:
            events.append("close")

    class Indexed(Odd):
        def resources(self) -> dict[str, Resource]:
            return {"index": Index()}

    with client_of(Indexed) as client:
        opened(client)
        opened(client)
        assert events == ["open"]
    assert events == ["open", "close"]
