"""A client of Kimina's Lean server: Lean code in, what Lean says out.

It speaks `POST /verify`, which every version of the server has. A server that is gone, slow or
talks nonsense is an `EnvError`; a proof on which Lean runs out of time is a verdict.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moored.envs.base import Resource, encodable
from moored.errors import EnvError
from moored.json_http import HttpError, JsonClient

RETRY_WAITS_S = (0.2, 1.0)
"""Pauses before code is sent again to a server that was not reached or had no free process."""
HTTP_GRACE_S = 10.0
"""How much longer than Lean may run the server may take to answer."""
SEVERITIES = ("trace", "info", "warning", "error")


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


def read_report(answer: object) -> LeanReport:
    """The report of the one piece of code that was sent."""
    results = _mapping(answer).get("results")
    if not isinstance(results, list) or len(results) != 1:
        raise EnvError(f"lean: the server must give one result, got {answer!r:.80}")
    result = _mapping(results[0])
    problem = result.get("error")
    if problem:
        if "timed out" in str(problem):
            return LeanReport(has_timed_out=True)
        raise EnvError(f"lean: the server says: {problem!s:.200}")
    response = _mapping(result.get("response"))
    if "message" in response:
        raise EnvError(f"lean: Lean's process says: {response['message']!s:.200}")
    if "messages" not in response and "env" not in response:
        raise EnvError(f"lean: an answer of Lean was expected, got {response!r:.80}")
    messages = tuple(_message(item) for item in _items(response, "messages"))
    return LeanReport(messages, num_sorries=len(_items(response, "sorries")))


def _items(response: Mapping[str, Any], name: str) -> Sequence[object]:
    found = response.get(name) or []
    if not isinstance(found, list):
        raise EnvError(f"lean: {name} must be a list, got {found!r:.80}")
    return found


def _message(item: object) -> LeanMessage:
    fields = _mapping(item)
    severity, position = fields.get("severity"), fields.get("pos")
    line = position.get("line", 0) if isinstance(position, Mapping) else 0
    if severity not in SEVERITIES or not isinstance(line, int):
        raise EnvError(f"lean: a message of Lean was expected, got {item!r:.80}")
    return LeanMessage(severity, encodable(str(fields.get("data", ""))), line)


def _mapping(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise EnvError(f"lean: a JSON object was expected, got {data!r:.80}")
    return data
