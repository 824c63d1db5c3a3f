"""The web application behind `moored serve-env`: HTTP sessions, and OpenEnv's WebSocket.

Both play the same environments under the same limits. docs/adapters.md describes the protocol.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moored.envs.base import Environment, check_available
from moored.envs.serving.openenv import Player, environment_schema
from moored.envs.serving.sessions import Limits, Session, Sessions, UnknownSessionError
from moored.envs.serving.wire import PROTOCOL, NoRoomError, messages_to_json, result_to_json
from moored.errors import EnvError, EnvTimeoutError, MooredError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

MAX_SEED = 1 << 63
BODY_TIMEOUT = 408


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        # The rest of a body that took too long may never come.
        self.headers = {"Connection": "close"} if status == BODY_TIMEOUT else {}


def build_app(
    make_env: Callable[[], Environment], *, limits: Limits | None = None, token: str = ""
) -> Starlette:
    """A Starlette application; one instance of the environment is made now, to describe it."""
    from starlette.applications import Starlette
    from starlette.routing import Route, WebSocketRoute

    server = EnvServer(make_env, limits or Limits(), token)
    return Starlette(
        routes=[
            Route("/health", server.health),
            Route("/environment", server.answer(server.environment)),
            Route("/metadata", server.answer(server.metadata)),
            Route("/schema", server.answer(server.schema)),
            Route("/sessions", server.answer(server.open), methods=["POST"]),
            Route("/sessions/{id}/reset", server.answer(server.reset), methods=["POST"]),
            Route("/sessions/{id}/step", server.answer(server.step), methods=["POST"]),
            Route("/sessions/{id}/oracle", server.answer(server.oracle), methods=["POST"]),
            Route("/sessions/{id}", server.answer(server.close), methods=["DELETE"]),
            WebSocketRoute("/ws", server.play),
        ],
        lifespan=server.lifespan,
    )


class EnvServer:
    """The handlers; the sessions belong to the running application."""

    def __init__(self, make_env: Callable[[], Environment], limits: Limits, token: str) -> None:
        self._make_env = make_env
        self._limits = limits
        self._token = token
        env = make_env()
        check_available(env)
        self._about = {
            "protocol": PROTOCOL,
            "name": env.name,
            "max_turns": env.max_turns,
            "is_stochastic": env.is_stochastic,
        }
        self._doc = (type(env).__doc__ or "").strip()
        env.close()
        self._sessions: Sessions

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._sessions = Sessions(self._make_env, self._limits)
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await self._sessions.close_all()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self._limits.idle_timeout_s / 4))
            await self._sessions.close_idle()

    async def health(self, request: Request) -> Response:
        """Open to all: whether the server lives, and how full it is."""
        sessions = {"active": self._sessions.num_open, "max": self._limits.max_sessions}
        return json_response({"status": "healthy", "sessions": sessions})

    def answer(
        self, handle: Callable[[Request], Awaitable[dict[str, object]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler whose errors become answers with a status and one sentence."""

        async def answer(request: Request) -> Response:
            try:
                check_sender(request, self._token)
                return json_response(await handle(request))
            except Exception as error:  # what an environment raises is data
                status, message = explain(error)
                headers = error.headers if isinstance(error, Refused) else None
                return json_response({"error": message}, status, headers)

        return answer

    async def environment(self, request: Request) -> dict[str, object]:
        return self._about

    async def metadata(self, request: Request) -> dict[str, object]:
        return {"name": self._about["name"], "description": self._doc}

    async def schema(self, request: Request) -> dict[str, object]:
        return environment_schema()

    async def open(self, request: Request) -> dict[str, object]:
        return {"session": (await self._sessions.open()).id}

    async def reset(self, request: Request) -> dict[str, object]:
        body = await self._body(request)
        seeds = expect_seed(body, "task_seed"), expect_seed(body, "episode_seed")
        messages = await self._sessions.reset(self._session(request), *seeds)
        return {"messages": messages_to_json(messages)}

    async def step(self, request: Request) -> dict[str, object]:
        body = await self._body(request)
        reply, turn = body.get("reply"), body.get("turn")
        if not isinstance(reply, str) or not isinstance(turn, int):
            raise Refused(422, "a step needs a text 'reply' and a whole number 'turn'")
        return result_to_json(await self._sessions.step(self._session(request), reply, turn))

    async def oracle(self, request: Request) -> dict[str, object]:
        return {"answer": await self._sessions.oracle(self._session(request))}

    async def close(self, request: Request) -> dict[str, object]:
        await self._sessions.close(self._session(request))
        return {}

    async def play(self, socket: WebSocket) -> None:
        """OpenEnv's protocol: a session as long as the connection."""
        try:
            check_sender(socket, self._token)
        except Refused:
            await socket.close(code=1008)
            return
        await socket.accept()
        await Player(socket, self._sessions).play()

    def _session(self, request: Request) -> Session:
        return self._sessions.find(request.path_params["id"])

    async def _body(self, request: Request) -> Mapping[str, Any]:
        limits = self._limits
        data = await read_body(request, limits.max_request_bytes, limits.call_timeout_s)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise Refused(400, "the request is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(422, "a JSON object was expected")
        return body


def json_response(
    data: dict[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII: observations may hold half a surrogate pair, which UTF-8 cannot."""
    from starlette.responses import Response

    text = json.dumps(data, allow_nan=False)
    return Response(text, status, headers, "application/json")


def check_sender(connection: HTTPConnection, token: str) -> None:
    """Refuse who does not know the token, and browser pages of other sites."""
    # A browser lets any page send requests to localhost, and names the page's site as origin.
    origin = connection.headers.get("origin")
    if origin is not None and host_of(origin) != connection.url.hostname:
        raise Refused(403, f"pages of {origin:.80} may not use this server")
    if token and not hmac.compare_digest(
        given_token(connection.headers.get("authorization", "")), token.encode()
    ):
        raise Refused(401, "the token is missing or wrong")


async def read_body(request: Request, max_bytes: int, limit_s: float) -> bytes:
    """The whole body; Refused when it is too long or takes too long."""
    data = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    raise Refused(413, f"a request may have {max_bytes:,} bytes")
    except TimeoutError:
        raise Refused(BODY_TIMEOUT, f"the request was not complete after {limit_s:g} s") from None
    return bytes(data)


def host_of(origin: str) -> str:
    """The host of an Origin header, "" for one that has none."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def given_token(header: str) -> bytes:
    """The token of an Authorization header: `Bearer TOKEN`, or the password of `Basic …`."""
    kind, _, value = header.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode()
    if kind.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def expect_seed(body: Mapping[str, Any], name: str) -> int:
    """A whole number of the request, 0 where it is not given."""
    value = body.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_SEED:
        raise Refused(422, f"{name} must be a whole number from 0 to 2**63 - 1, got {value!r:.40}")
    return value


def explain(error: Exception) -> tuple[int, str]:
    """HTTP status and sentence for an error."""
    if isinstance(error, Refused):
        return error.status, str(error)
    if isinstance(error, UnknownSessionError):
        return 404, str(error)
    if isinstance(error, NoRoomError):
        return 503, str(error)
    if isinstance(error, EnvTimeoutError):
        return 504, str(error)
    if isinstance(error, EnvError):
        return 409, str(error)
    if isinstance(error, MooredError):
        return 422, str(error)
    return 500, f"{type(error).__name__}: {error}"
