"""A search server that speaks Search-R1's protocol, as a retriever.

`POST /retrieve` with `{"queries": […], "topk": k, "return_scores": true}` brings
`{"result": [[{"document": {"contents": "…"}, "score": s}, …], …]}`. Whatever goes wrong is raised
as an `EnvError`: it ends the episode that searched, and never becomes text that the model reads.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moored.envs.search.corpus import Passage, parse_contents, storable
from moored.envs.search.retriever import Hit, Retriever
from moored.errors import EnvError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "MOORED_SEARCH_TOKEN"
"""Environment variable with the token of a server that asks for one."""
NUM_PROBED = 5
"""Passages that are asked for at the start."""
MAX_PAUSE_S = 5.0
"""Longest pause before another try, whatever the server asks for."""


class CircuitBreaker:
    """Stops asking a server that keeps failing, for `rest_s` after `max_failures` in a row.

    Then one call may try while the others still rest; its success closes the circuit again.
    """

    def __init__(
        self, max_failures: int, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures = max_failures
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._rests_until_s = 0.0

    def may_call(self) -> bool:
        """Whether to ask the server now."""
        with self._lock:
            if self._num_failures < self._max_failures:
                return True
            now_s = self._clock()
            if now_s < self._rests_until_s:
                return False
            self._rests_until_s = now_s + self._rest_s
            return True

    def succeeded(self) -> None:
        """Report an answer."""
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        """Report a call without an answer."""
        with self._lock:
            self._num_failures += 1
            self._rests_until_s = self._clock() + self._rest_s


@dataclass
class SearchServer(Retriever):
    """Any server with `/retrieve`. Opening it asks once: a wrong address is told at the start."""

    url: str
    timeout_s: float = 10.0
    """For one request."""
    num_tries: int = 3
    """Requests that are sent for one search while failures look temporary."""
    pause_s: float = 0.25
    """Before the second try; doubled before each further one."""
    max_failures: int = 5
    """Searches in a row that fail before the server is left alone."""
    rest_s: float = 15.0
    """For how long it is left alone; searches fail at once meanwhile."""
    known_title: str | None = None
    """Of a passage that it must have for the questions to have answers; None: not known."""

    def open(self) -> None:
        from moored.json_http import JsonClient

        address = self.url.rstrip("/").removesuffix("/retrieve")
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._client = JsonClient(address, api_key=token, timeout_s=self.timeout_s)
        self._breaker = CircuitBreaker(self.max_failures, self.rest_s)
        try:
            (hits,) = self.search([self.known_title or "town"], NUM_PROBED)
        except EnvError as error:
            self._client.close()
            raise EnvError(
                f"{error}; start it first (moored serve-search), or check the address"
            ) from error

        titles = [hit.passage.title for hit in hits]
        if self.known_title is not None and self.known_title not in titles:
            logger.warning(
                "the search server at %s does not have the passages that the made-up questions are "
                "about (no %r): set env.N.options.questions to questions about its own, or start "
                "it with the same --world-seed",
                self._client.url,
                self.known_title,
            )

    def close(self) -> None:
        self._client.close()

    def search(self, queries: Sequence[str], num_passages: int) -> list[list[Hit]]:
        if not self._breaker.may_call():
            raise EnvError(
                f"the search server at {self._client.url} failed {self.max_failures} times in a "
                f"row and is left alone for {self.rest_s:g} s"
            )
        try:
            answer = self._ask(queries, num_passages)
            hits = _read_answer(answer, len(queries), num_passages)
        except EnvError as error:
            self._breaker.failed()
            raise EnvError(f"the search server at {self._client.url}: {error}") from error
        self._breaker.succeeded()
        return hits

    def _ask(self, queries: Sequence[str], num_passages: int) -> object:
        from moored.json_http import HttpError

        body = {"queries": list(queries), "topk": num_passages, "return_scores": True}
        for trial in range(1, self.num_tries + 1):
            try:
                return self._client.post("/retrieve", body)
            except HttpError as error:
                if not error.is_transient or trial == self.num_tries:
                    raise EnvError(f"{error} (try {trial} of {self.num_tries})") from error
                pause_s = max(self.pause_s * 2 ** (trial - 1), error.retry_after_s)
            time.sleep(min(pause_s, MAX_PAUSE_S))
        raise AssertionError("the last try returns or raises")


def _read_answer(answer: object, num_queries: int, num_passages: int) -> list[list[Hit]]:
    lists = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(lists, list) or len(lists) != num_queries:
        raise EnvError(
            f"an answer must hold 'result', a list for each of the {num_queries} queries, got "
            f"{answer!r:.120}"
        )
    if not all(isinstance(found, list) for found in lists):
        raise EnvError(f"'result' must hold lists of passages, got {lists!r:.120}")
    return [[_read_hit(item) for item in found[:num_passages]] for found in lists]


def _read_hit(item: object) -> Hit:
    """A passage with its score, or the passage alone."""
    found = item.get("document", item) if isinstance(item, Mapping) else None
    score = item.get("score") if isinstance(item, Mapping) else None
    if isinstance(found, Mapping):
        contents, title, text = (found.get(name) for name in ("contents", "title", "text"))
        number = float(score) if isinstance(score, int | float) else 0.0
        if isinstance(contents, str):
            return Hit(parse_contents(storable(contents)), number)
        if isinstance(title, str) and isinstance(text, str):
            return Hit(Passage(storable(title), storable(text)), number)
    raise EnvError(f"a passage must have 'contents', or 'title' and 'text', got {item!r:.120}")
