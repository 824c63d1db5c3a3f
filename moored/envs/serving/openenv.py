"""OpenEnv's WebSocket protocol, played with moored's environments.

One connection is one session. A client sends `{"type": …, "data": {…}}` with the types `reset`,
`step`, `state` and `close`; the answers have the types `observation`, `state` and `error`, as
OpenEnv 0.3 writes them. An action is `{"reply": text}`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moored.envs.serving.sessions import Session, Sessions
from moored.envs.serving.wire import NoRoomError, messages_to_json, result_to_json
from moored.errors import EnvError
from moored.types import content_text

if TYPE_CHECKING:
    from starlette.websockets import WebSocket


class InvalidMessage(Exception):
    """A message that OpenEnv's protocol does not know; `code` is OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def environment_schema() -> dict[str, object]:
    """JSON schemas of action, observation and state, as OpenEnv's `/schema` gives them."""
    text = {"type": "string"}
    parts: dict[str, object] = {"type": "array"}
    flags = {name: {"type": "boolean"} for name in ("is_valid", "success", "truncated")}
    numbers = {"type": "object", "additionalProperties": {"type": "number"}}
    return {
        "action": {
            "type": "object",
            "properties": {"reply": {**text, "description": "<think>…</think><answer>…</answer>"}},
            "required": ["reply"],
        },
        "observation": {
            "type": "object",
            "properties": {"text": text, "messages": parts, **flags, "metrics": numbers},
        },
        "state": {
            "type": "object",
            "properties": {"episode_id": text, "step_count": {"type": "integer"}},
        },
    }


class Player:
    """Plays one connection, from its first message to its end."""

    def __init__(self, socket: WebSocket, sessions: Sessions) -> None:
        self._socket = socket
        self._sessions = sessions
        self._episode_id = ""

    async def play(self) -> None:
        """Answer messages until the client leaves, or says nothing for too long."""
        from starlette.websockets import WebSocketDisconnect

        try:
            session = await self._sessions.open()
        except Exception as error:
            await self._fail("CAPACITY_REACHED" if isinstance(error, NoRoomError) else "", error)
            return await self._socket.close()
        try:
            while await self._answer_next(session):
                pass
            await self._socket.close()
        except (WebSocketDisconnect, RuntimeError):  # RuntimeError: closed while sending
            return None
        finally:
            await self._sessions.close(session)

    async def _answer_next(self, session: Session) -> bool:
        """Answer one message; False when the session is over."""
        limit_s = self._sessions.limits.idle_timeout_s
        try:
            text = await asyncio.wait_for(self._socket.receive_text(), limit_s)
        except TimeoutError:
            await self._fail("SESSION_ERROR", EnvError(f"no message for {limit_s:g} s"))
            return False
        try:
            kind, data = _read(text)
            if kind == "close":
                return False
            answer = json.dumps(await self._handle(session, kind, data), allow_nan=False)
        except InvalidMessage as error:
            await self._fail(error.code, error)
        except Exception as error:  # what an environment raises is data
            await self._fail("EXECUTION_ERROR", error)
        else:
            await self._socket.send_text(answer)
        return True

    async def _handle(
        self, session: Session, kind: str, data: Mapping[str, Any]
    ) -> dict[str, object]:
        if kind == "reset":
            return await self._reset(session, data)
        if kind == "step":
            return await self._step(session, data)
        if kind == "state":
            state = {"episode_id": self._episode_id, "step_count": session.num_turns}
            return {"type": "state", "data": state}
        raise InvalidMessage("UNKNOWN_TYPE", f"unknown message type {kind!r:.40}")

    async def _reset(self, session: Session, data: Mapping[str, Any]) -> dict[str, object]:
        seeds = (_seed(data, "seed"), _seed(data, "episode_seed"))
        task_seed = secrets.randbelow(1 << 31) if seeds[0] is None else seeds[0]
        messages = await self._sessions.reset(session, task_seed, seeds[1] or 0)
        self._episode_id = str(data.get("episode_id") or secrets.token_urlsafe(8))
        observation = {
            "text": "\n\n".join(message.text for message in messages),
            "messages": messages_to_json(messages),
            "is_valid": True,
            "success": False,
            "truncated": False,
            "metrics": {},
        }
        return _observation(observation, None, False)

    async def _step(self, session: Session, data: Mapping[str, Any]) -> dict[str, object]:
        reply = data.get("reply")
        if not isinstance(reply, str):
            raise InvalidMessage("VALIDATION_ERROR", 'an action is {"reply": text}')
        result = await self._sessions.step(session, reply)
        fields = result_to_json(result)
        observation = {
            "text": content_text(result.observation),
            "messages": [{"role": "user", "content": fields["observation"]}],
            **{name: fields[name] for name in ("is_valid", "success", "truncated", "metrics")},
        }
        return _observation(observation, float(result.reward), bool(result.is_over))

    async def _fail(self, code: str, error: Exception) -> None:
        data = {"message": str(error), "code": code or "FACTORY_ERROR"}
        await self._socket.send_text(json.dumps({"type": "error", "data": data}))


def _observation(
    observation: dict[str, object], reward: float | None, done: bool
) -> dict[str, object]:
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def _read(text: str) -> tuple[str, Mapping[str, Any]]:
    """Type and data of a message."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidMessage("INVALID_JSON", "the message is not JSON") from None
    data = message.get("data", {}) if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise InvalidMessage("VALIDATION_ERROR", 'a message is {"type": …, "data": {…}}')
    return str(message.get("type", "")), data


def _seed(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is not None and not is_number:
        raise InvalidMessage("VALIDATION_ERROR", f"{name} must be a whole number >= 0")
    return value
