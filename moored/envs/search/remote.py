"""A search server that speaks Search-R1's protocol, as a retriever.

`POST /retrieve` with `{"queries": […], "topk": k, "return_scores": true}` brings
`{"result": [[{"document": {"contents": "…"}, "score": s}, …], …]}`. Whatever goes wrong is raised
as an `EnvError`: it ends the episode that searched, and never becomes text that the model reads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moored.envs.base import encodable
from moored.envs.search.corpus import Passage, parse_contents
from moored.envs.search.retriever import Hit, Retriever
from moored.errors import EnvError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "MOORED_SEARCH_TOKEN"
"""Environment variable with the token of a server that asks for one."""
NUM_PROBED = 5
"""Passages that are asked for at the start."""
MAX_PAUSE_S = 5.0
"""Longest pause before another try, whatever the server asks for."""


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
    known_title: str | None = None
    """Of a passage that it must have for the questions to have answers; None: not known."""

    def open(self) -> None:
        from moored.json_http import JsonClient

        address = self.url.rstrip("/").removesuffix("/retrieve")
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._client = JsonClient(address, api_key=token, timeout_s=self.timeout_s)
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
        try:
            answer = self._ask(queries, num_passages)
            return _read_answer(answer, len(queries), num_passages)
        except EnvError as error:
            raise EnvError(f"the search server at {self._client.url}: {error}") from error

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


def _read_answer(answer: Any, num_queries: int, num_passages: int) -> list[list[Hit]]:
    try:
        hits = [[_read_hit(item) for item in found[:num_passages]] for found in answer["result"]]
        if len(hits) == num_queries:
            return hits
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # something of another shape, which the message shows
    raise EnvError(
        f"an answer must hold 'result', for each of the {num_queries} queries a list of passages "
        f"with 'contents', or with 'title' and 'text', got {answer!r:.120}"
    )


def _read_hit(item: Any) -> Hit:
    """A passage with its score, or the passage alone."""
    found, score = item.get("document", item), item.get("score") or 0.0
    if "contents" in found:
        return Hit(parse_contents(encodable(found["contents"])), float(score))
    return Hit(Passage(encodable(found["title"]), encodable(found["text"])), float(score))
