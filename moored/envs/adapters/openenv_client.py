"""One WebSocket session with an OpenEnv server, and its answers checked.

`OpenEnvSession` sends `reset` and `step` and returns `Observed`; whatever goes wrong is an
`EnvError`, and an action that the server's schema refuses an `ActionRefused`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moored.envs.serving.wire import expect_mapping, expect_number
from moored.errors import EnvError
from moored.json_http import HttpError, JsonClient

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_ANSWER_BYTES = 64 << 20


class ActionRefused(EnvError):
    """An action that does not fit the server's schema."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the server answered to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    """0 where the server gives none."""
    is_done: bool


class OpenEnvSession:
    """A connection, opened at the first message and again after a failure."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._socket: ClientConnection | None = None
        self._closing = ExitStack()

    def reset(self, **options: object) -> Observed:
        """Begin an episode."""
        return self._ask("reset", options)

    def step(self, action: Mapping[str, object]) -> Observed:
        """Take an action."""
        return self._ask("step", action)

    def close(self) -> None:
        """End the session; a server that is gone is left alone."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with suppress(Exception):  # whatever a broken connection raises, it is closed
            socket.send(json.dumps({"type": "close"}))
        with suppress(Exception):
            self._closing.close()

    def _ask(self, kind: str, data: Mapping[str, object]) -> Observed:
        message = json.dumps({"type": kind, "data": data})
        try:
            return _observed(self._exchange(message))
        except ActionRefused:
            raise
        except EnvError:
            self.close()
            raise
        except Exception as error:  # websockets and sockets raise many kinds
            self.close()
            text = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                text = f"no answer within {self._timeout_s:g} s"
            raise EnvError(f"openenv: {self._url}: {text}") from error

    def _exchange(self, message: str) -> object:
        from websockets.sync.client import connect

        if self._socket is None:
            connection = connect(
                self._url.replace("http", "ws", 1) + "/ws",
                open_timeout=self._timeout_s,
                close_timeout=1.0,
                max_size=MAX_ANSWER_BYTES,
                proxy=None,
            )
            self._socket = self._closing.enter_context(connection)
        self._socket.send(message)
        text = self._socket.recv(timeout=self._timeout_s)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise EnvError(f"openenv: {self._url}: the answer is not JSON: {text!r:.80}") from None


def _observed(answer: object) -> Observed:
    fields = expect_mapping(answer)
    data = expect_mapping(fields.get("data"))
    if fields.get("type") == "error":
        kind = ActionRefused if data.get("code") == "VALIDATION_ERROR" else EnvError
        raise kind(f"openenv: the server says: {data.get('message')!s:.200}")
    if fields.get("type") != "observation" or not isinstance(data.get("done"), bool):
        raise EnvError(f"openenv: an observation was expected, got {answer!r:.80}")
    reward = data.get("reward")
    return Observed(
        observation=expect_mapping(data.get("observation")),
        reward=0.0 if reward is None else expect_number("reward", float(reward)),
        is_done=data["done"],
    )


def fetch_action_schema(url: str, timeout_s: float) -> Mapping[str, Mapping[str, Any]]:
    """The fields of an action, from the server's `/schema`."""
    client = JsonClient(url, api_key=None, timeout_s=timeout_s)
    try:
        schema = expect_mapping(client.get("/schema"))
    except HttpError as error:
        raise EnvError(f"openenv: {url}: {error.with_remedy()}") from error
    finally:
        client.close()
    fields = expect_mapping(expect_mapping(schema.get("action")).get("properties", {}))
    return {name: expect_mapping(kind) for name, kind in fields.items() if name != "metadata"}
