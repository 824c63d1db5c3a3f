"""An environment that another process serves with `moored serve-env`.

In: the server's address. Out: the served environment, as if it were here. What the server refuses,
and a server that is gone, slow or talks nonsense, is an `EnvError`: it costs the episode.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from moored.envs.base import Resource, StepResult, check_address
from moored.envs.serving.wire import (
    PROTOCOL,
    NoRoomError,
    expect_mapping,
    messages_from_json,
    result_from_json,
)
from moored.errors import EnvError
from moored.json_http import HttpError, JsonClient
from moored.types import Message

RETRY_WAITS_S = (0.1, 0.4)
"""Pauses before a request is sent again; every request may be repeated without harm."""
FULL_WAIT_S = 0.2
"""Pause before a server whose sessions are all in use is asked for one again."""
LOST_SESSION, FULL = 404, 503
_about_servers: dict[str, dict[str, object]] = {}


@dataclass
class ServerConnection(Resource):
    """The connections to one server, shared by all sessions, which end with it."""

    url: str
    token_env: str = "MOORED_ENV_TOKEN"
    timeout_s: float = 30.0
    _client: JsonClient | None = field(default=None, compare=False, repr=False)
    sessions: set[str] = field(default_factory=set, compare=False, repr=False)
    _full_since_s: float | None = field(default=None, compare=False, repr=False)

    def open(self) -> None:
        token = os.environ.get(self.token_env, "")
        self._client = JsonClient(self.url, api_key=token, timeout_s=self.timeout_s)

    def close(self) -> None:
        if self._client is not None:
            with suppress(EnvError):  # a server that is gone has closed them
                while self.sessions:
                    self.close_session(next(iter(self.sessions)))
            self.sessions.clear()
            self._client.close()
            self._client = None

    def open_session(self) -> str:
        """A new session; while all are in use, one is waited for, up to `timeout_s`."""
        start_s = time.monotonic()
        while True:
            try:
                session = self.post("/sessions", {}).get("session")
                break
            except ServerError as error:
                if error.status != FULL:
                    raise
                # Where a run itself holds the sessions it lacks, only its first callers wait.
                self._full_since_s = self._full_since_s or start_s
                if time.monotonic() - self._full_since_s > self.timeout_s:
                    text = f"{error}; none was free for {self.timeout_s:g} s"
                    raise NoRoomError(text) from error
            time.sleep(FULL_WAIT_S)
        self._full_since_s = None
        if not isinstance(session, str) or not session.isprintable():
            raise EnvError(f"remote: {self.url} gave the session {session!r:.80}")
        self.sessions.add(session)
        return session

    def close_session(self, session: str) -> None:
        """Close a session that was opened here; ServerError when the server does not answer."""
        self.sessions.discard(session)
        try:
            self.delete(f"/sessions/{session}")
        except ServerError as error:
            if error.status is None:
                raise

    def get(self, path: str) -> dict[str, object]:
        """Look something up."""
        return self._ask(lambda client: client.get(path))

    def post(self, path: str, body: object) -> dict[str, object]:
        """Send a request, wait for the answer."""
        return self._ask(lambda client: client.post(path, body))

    def delete(self, path: str) -> None:
        """Have something deleted."""
        self._ask(lambda client: client.delete(path))

    def _ask(self, send: Callable[[JsonClient], object]) -> dict[str, object]:
        """Send a request, again when the connection was lost; EnvError when that does not help."""
        if self._client is None:
            self.open()
        assert self._client is not None
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                return dict(expect_mapping(send(self._client)))
            except HttpError as error:
                if error.status is not None or error.is_timeout or wait_s is None:
                    text = f"remote: {self.url}: {error.with_remedy()}"
                    raise ServerError(text, error.status) from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


class ServerError(EnvError):
    """A request that the server refused or did not answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Remote:
    """An environment that another process serves with `moored serve-env`.

    Reward: that of the served environment, as are its prompts, turns, success and metrics.

    Options:
        url: the server's address, such as "http://127.0.0.1:8000".
        token_env ("MOORED_ENV_TOKEN"): environment variable with the server's token, if it asks
            for one.
        timeout_s (30.0): how long to wait for an answer, and for a full server's next free session.

    A server that dies, hangs, or answers with an error or nonsense costs the episode, not the run:
    the next one opens a new session.
    """

    name: ClassVar[str] = "remote"
    main_option: ClassVar[str] = "url"

    def __init__(
        self, *, url: str, token_env: str = "MOORED_ENV_TOKEN", timeout_s: float = 30.0
    ) -> None:
        if timeout_s <= 0:
            raise EnvError(f"remote: timeout_s must be positive, got {timeout_s}")
        check_address("remote", url)
        self._connection = ServerConnection(url, token_env, timeout_s)
        self._session = ""
        self._over = True

    def resources(self) -> dict[str, Resource]:
        connection = self._connection
        return {
            "server": ServerConnection(connection.url, connection.token_env, connection.timeout_s)
        }

    @property
    def max_turns(self) -> int:
        value = self._facts().get("max_turns")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EnvError(f"remote: {self._connection.url} gave max_turns = {value!r:.40}")
        return value

    @property
    def is_stochastic(self) -> bool:
        return bool(self._facts().get("is_stochastic"))

    def check_available(self) -> None:
        self._facts()

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        self._seeds = task_seed, episode_seed
        self._replies: list[str] = []
        messages = messages_from_json(self._begin().get("messages"))
        self._over = False
        return messages

    def step(self, reply: str) -> StepResult:
        self._check_running("step")
        try:
            self._catch_up()
            result = self._send_reply(reply, len(self._replies))
        except EnvError:
            self._over = True
            raise
        self._replies.append(reply)
        self._over = result.is_over
        return result

    def oracle(self) -> str:
        self._check_running("oracle")
        self._catch_up()
        answer = self._server().post(f"/sessions/{self._session}/oracle", {}).get("answer")
        if not isinstance(answer, str):
            raise EnvError(f"remote: {self._connection.url} gave the answer {answer!r:.80}")
        return answer

    def close(self) -> None:
        self._over = True
        session, self._session = self._session, ""
        if session:
            with suppress(EnvError):  # the server may be gone; it closes idle sessions itself
                self._server().close_session(session)
        self._connection.close()

    def __getstate__(self) -> dict[str, object]:
        # A copy plays in a session of its own, where `_catch_up` repeats the replies so far.
        connection = self._connection
        bare = ServerConnection(connection.url, connection.token_env, connection.timeout_s)
        return {**self.__dict__, "_session": "", "_connection": bare}

    def _server(self) -> ServerConnection:
        """The run's shared connection, or one of its own where nothing is shared."""
        return getattr(self, "server", self._connection)

    def _facts(self) -> dict[str, object]:
        """What the server said of its environment when it was first asked in this process.

        Instances that are made while the server is down must not fail for that: a run makes new
        ones after every error.
        """
        url = self._connection.url
        if url not in _about_servers:
            try:
                about = self._server().get("/environment")
            finally:
                if not self._session:  # nobody may close an instance that is only asked this
                    self._connection.close()
            if about.get("protocol") != PROTOCOL:
                raise EnvError(
                    f"remote: {url} does not speak protocol {PROTOCOL}; is it a `moored serve-env` "
                    f"of this version?"
                )
            _about_servers[url] = about
        return _about_servers[url]

    def _begin(self) -> dict[str, object]:
        """Reset the session, or a new one where there is none or the server has forgotten it."""
        task_seed, episode_seed = self._seeds
        body = {"task_seed": task_seed, "episode_seed": episode_seed}
        if self._session:
            try:
                return self._server().post(f"/sessions/{self._session}/reset", body)
            except ServerError as error:
                if error.status != LOST_SESSION:
                    raise
                self._server().sessions.discard(self._session)
        self._session = self._server().open_session()
        return self._server().post(f"/sessions/{self._session}/reset", body)

    def _catch_up(self) -> None:
        """In a copy: play the replies so far in a session of its own."""
        if self._session:
            return
        self._begin()
        for turn, reply in enumerate(self._replies):
            self._send_reply(reply, turn)

    def _send_reply(self, reply: str, turn: int) -> StepResult:
        body = {"reply": reply, "turn": turn}
        return result_from_json(self._server().post(f"/sessions/{self._session}/step", body))

    def _check_running(self, method: str) -> None:
        if self._over:
            raise EnvError(f"remote: the episode is over; call reset before {method}")
