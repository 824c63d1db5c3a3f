"""A client of Kimina's Lean server: Lean code in, what Lean says out.

It speaks `POST /verify`, which every version of the server has. A server that is gone, slow or
talks nonsense is an `EnvError`; a proof on which Lean runs out of time is a verdict.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from moored.envs.base import Resource, encodable
from moored.errors import EnvError
from moored.json_http import HttpError, JsonClient

RETRY_WAITS_S = (0.2, 1.0)
"""Pauses before code is sent again to a server that was not reached or had no free process."""
HTTP_GRACE_S = 10.0
"""How much longer than Lean may run the server may take to answer."""


@dataclass(frozen=True, slots=True)
class LeanMessage:
    """One message of Lean, with the line it is about, counted from 1."""

    severity: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class LeanReport:
    """What Lean says about some code."""

    messages: tuple[LeanMessage, ...] = ()
    num_sorries: int = 0
    has_timed_out: bool = False


@dataclass
class LeanServer(Resource):
    """The connection to a server, shared by all episodes."""

    url: str
    token_env: str = "LEAN_SERVER_API_KEY"
    time_limit_s: int = 45
    max_concurrency: int | None = 16
    _client: JsonClient | None = field(default=None, compare=False, repr=False)

    def open(self) -> None:
        token = os.environ.get(self.token_env, "")
        timeout_s = self.time_limit_s + HTTP_GRACE_S
        self._client = JsonClient(self.url, api_key=token, timeout_s=timeout_s)

    def check_reachable(self) -> None:
        """Raise an EnvError when nothing answers at the address."""
        self.open()
        assert self._client is not None
        try:
            self._client.check_reachable()
        except HttpError as error:
            raise EnvError(f"lean: {self.url}: {error.with_remedy()}") from error
        finally:
            self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def check(self, code: str) -> LeanReport:
        """Have Lean check some code."""
        assert self._client is not None, "the server was not opened"
        body = {
            "codes": [{"custom_id": "proof", "proof": code}],
            "timeout": self.time_limit_s,
            "infotree_type": None,
            "disable_cache": False,
        }
        return read_report(self._post(self._client, body))

    def _post(self, client: JsonClient, body: object) -> object:
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                return client.post("/verify", body)
            except HttpError as error:
                is_passing = error.status == 429 or (error.status is None and not error.is_timeout)
                if not is_passing or wait_s is None:
                    raise EnvError(f"lean: {self.url}: {error}") from error
                time.sleep(max(wait_s, min(error.retry_after_s, 5.0)))
        raise AssertionError("the last attempt returns or raises")


def read_report(answer: Any) -> LeanReport:
    """The report of the one piece of code that was sent."""
    try:
        (result,) = answer["results"]
        problem = result.get("error")
        if problem:
            if "timed out" in str(problem):
                return LeanReport(has_timed_out=True)
            raise EnvError(f"lean: the server says: {problem!s:.200}")
        response = result["response"]
        if "message" in response:
            raise EnvError(f"lean: Lean's process says: {response['message']!s:.200}")
        if "messages" not in response and "env" not in response:
            raise KeyError("messages")
        messages = tuple(map(_read_message, response.get("messages") or ()))
        return LeanReport(messages, num_sorries=len(response.get("sorries") or ()))
    except EnvError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvError(f"lean: an answer of Lean was expected, got {answer!r:.120}") from error


def _read_message(fields: Any) -> LeanMessage:
    line = (fields.get("pos") or {}).get("line", 0)
    return LeanMessage(fields["severity"], encodable(str(fields.get("data", ""))), int(line))
