"""Serve a retriever over HTTP with Search-R1's protocol, as `moored serve-search` does.

Requests wait in a bounded queue and are searched in batches, one batch at a time, in a thread. A
full queue is answered with 503 and `Retry-After`. `/health` tells how the server does, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING

from moored.envs.base import encodable
from moored.envs.search.retriever import Hit, Retriever
from moored.envs.serving.app import Refused, check_sender, read_body
from moored.errors import EnvError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 60.0
MAX_QUERY_CHARS = 10_000
MAX_QUERIES = 256
MAX_TOPK = 100
DEFAULT_TOPK = 5
KEPT_TIMES = 1000
MAX_WAITING = 256
MAX_BATCH = 64


@dataclass(frozen=True, slots=True)
class Query:
    """What a request asks for."""

    queries: list[str]
    topk: int
    return_scores: bool


@dataclass(slots=True, eq=False)
class SearchService:
    """A retriever behind a bounded queue; `run` searches until it is cancelled."""

    retriever: Retriever
    label: str
    """The retriever in words, for the health page."""
    num_passages: int
    max_waiting: int = MAX_WAITING
    """Requests that may wait; more are refused."""
    max_batch: int = MAX_BATCH
    """Queries that are searched together, unless one request alone has more."""
    waiting: deque[tuple[Query, asyncio.Future[list[list[Hit]]]]] = field(default_factory=deque)
    num_answered: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_batches: int = 0
    started_s: float = field(default_factory=time.monotonic)
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.max_waiting

    async def search(self, query: Query) -> list[list[Hit]]:
        """Wait in the queue for the passages of every query."""
        start_s = time.monotonic()
        future: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        self.waiting.append((query, future))
        self._news.set()
        found = await future
        self.times_s.append(time.monotonic() - start_s)
        return found

    async def run(self) -> None:
        """Search batch after batch."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self.waiting:
                await self._search_batch()

    async def _search_batch(self) -> None:
        batch = [self.waiting.popleft()]
        num_queries = len(batch[0][0].queries)
        while self.waiting and num_queries + len(self.waiting[0][0].queries) <= self.max_batch:
            batch.append(self.waiting.popleft())
            num_queries += len(batch[-1][0].queries)
        self.num_batches += 1
        texts = [text for query, _ in batch for text in query.queries]
        topk = max(query.topk for query, _ in batch)
        try:
            found = await asyncio.to_thread(self.retriever.search, texts, topk)
        except Exception as error:  # a query that fails must not end the server
            logger.exception("a batch of %d queries failed", len(texts))
            found = error
        self._hand_out(batch, found)

    def _hand_out(
        self,
        batch: list[tuple[Query, asyncio.Future[list[list[Hit]]]]],
        found: list[list[Hit]] | Exception,
    ) -> None:
        start = 0
        for query, future in batch:
            stop = start + len(query.queries)
            if future.done():  # the client has left
                pass
            elif isinstance(found, Exception):
                future.set_exception(EnvError(f"the search failed: {found}"))
            else:
                future.set_result([hits[: query.topk] for hits in found[start:stop]])
            start = stop

    def health(self) -> dict[str, object]:
        """Figures for people and for monitors."""
        cuts = quantiles(self.times_s, n=100) if len(self.times_s) > 1 else [0.0] * 99
        return {
            "status": "full" if self.is_full else "ok",
            "retriever": self.label,
            "num_passages": self.num_passages,
            "num_waiting": len(self.waiting),
            "max_waiting": self.max_waiting,
            "num_answered": self.num_answered,
            "num_refused": self.num_refused,
            "num_failed": self.num_failed,
            "num_batches": self.num_batches,
            "p50_ms": round(cuts[49] * 1e3, 3),
            "p99_ms": round(cuts[98] * 1e3, 3),
            "uptime_s": round(time.monotonic() - self.started_s, 1),
        }


def make_app(service: SearchService, token: str = "") -> Starlette:
    """The web application: `/retrieve`, which asks for the token, `/health`, and `/` as a page."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    async def retrieve(request: Request) -> JSONResponse:
        return await _retrieve(service, request, token)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse(service.health())

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(_health_page(service.health()))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(service.run())
        yield
        task.cancel()

    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/health", health),
        Route("/", page),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _retrieve(service: SearchService, request: Request, token: str) -> JSONResponse:
    from starlette.responses import JSONResponse

    def refuse(status: int, why: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": why}, status, headers)

    try:
        check_sender(request, token)
        query = parse_query(await read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S))
    except Refused as error:
        return refuse(error.status, str(error), error.headers)
    except EnvError as error:
        return refuse(422, str(error))
    if service.is_full:
        service.num_refused += 1
        return refuse(503, f"{service.max_waiting} requests are waiting", {"Retry-After": "1"})
    try:
        found = await service.search(query)
    except EnvError as error:
        service.num_failed += 1
        return refuse(500, str(error))
    service.num_answered += 1
    return JSONResponse({"result": [_as_json(hits, query.return_scores) for hits in found]})


def parse_query(body: bytes) -> Query:
    """Read and check the body of a request."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise EnvError("the body must be JSON") from None
    if not isinstance(data, Mapping):
        raise EnvError(f"the body must be a JSON object, got {type(data).__name__}")
    queries, topk = data.get("queries"), data.get("topk")
    if not isinstance(queries, list) or not 0 < len(queries) <= MAX_QUERIES:
        raise EnvError(f"'queries' must be a list of 1 to {MAX_QUERIES} texts")
    if not all(isinstance(query, str) and len(query) <= MAX_QUERY_CHARS for query in queries):
        raise EnvError(f"a query must be a text of at most {MAX_QUERY_CHARS:,} characters")
    topk = DEFAULT_TOPK if topk is None else topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MAX_TOPK:
        raise EnvError(f"'topk' must be a whole number from 1 to {MAX_TOPK}, got {topk!r:.40}")
    return Query(list(map(encodable, queries)), topk, bool(data.get("return_scores", False)))


def _as_json(hits: list[Hit], return_scores: bool) -> list[dict[str, object]]:
    documents = [{"title": h.passage.title, "contents": h.passage.contents} for h in hits]
    if not return_scores:
        return [dict(document) for document in documents]
    return [{"document": d, "score": h.score} for d, h in zip(documents, hits, strict=True)]


def _health_page(figures: Mapping[str, object]) -> str:
    from html import escape

    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
        for name, value in figures.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" '
        'content="5"><title>moored serve-search</title><style>body{font:16px system-ui;margin:2em}'
        "td{padding:.2em 1em .2em 0}</style><h1>moored serve-search</h1>"
        f"<table>{rows}</table><p>POST /retrieve answers searches, GET /health these figures as "
        "JSON.</p></html>"
    )
