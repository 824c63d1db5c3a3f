"""The search server: its protocol, batches, bounded queue and health page."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

import pytest

from moored.envs.search.corpus import Passage
from moored.envs.search.retriever import Hit, Retriever
from moored.envs.search.server import Query, SearchService, make_app, parse_query
from moored.errors import EnvError


class Fake(Retriever):
    """Finds passages named after the query; may wait for leave, and may fail."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.leave = threading.Event()
        self.leave.set()

    def search(self, queries: Sequence[str], num_passages: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        assert self.leave.wait(10)
        if "fail" in queries:
            raise RuntimeError("no index")
        return [
            [Hit(Passage(f"{q}{i}", "text"), 1.0 - i) for i in range(num_passages)] for q in queries
        ]


async def call(
    app, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, dict, bytes]:
    """One request, as a web server hands it to the application."""
    sent: list[dict] = []
    scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    scope["headers"] = list(headers)

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    await app({**scope, "http_version": "1.1", "root_path": "", "scheme": "http"}, receive, send)
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(m.get("body", b"") for m in sent[1:])


def ask(*queries: str, **more: object) -> bytes:
    return json.dumps({"queries": queries, "topk": 2, **more}).encode()


def run(scenario, max_waiting: int = 256, max_batch: int = 64) -> tuple[SearchService, Fake]:
    """Run a scenario against an application whose worker is running."""
    fake = Fake()

    async def main() -> SearchService:
        service = SearchService(fake, "fake", 3, max_waiting, max_batch)
        worker = asyncio.create_task(service.run())
        async with asyncio.timeout(20):
            await scenario(make_app(service), fake)
        worker.cancel()
        return service

    return asyncio.run(main()), fake


def test_passages_come_with_and_without_scores():
    async def scenario(app, fake):
        status, _, body = await call(app, "POST", "/retrieve", ask("a", return_scores=True))
        assert status == 200
        (hits,) = json.loads(body)["result"]
        assert hits[0] == {"document": {"title": "a0", "contents": '"a0"\ntext'}, "score": 1.0}
        assert len(hits) == 2
        _, _, body = await call(app, "POST", "/retrieve", ask("a"))
        assert json.loads(body)["result"][0][0] == {"title": "a0", "contents": '"a0"\ntext'}

    run(scenario)


def test_who_lacks_the_token_and_pages_of_other_sites_find_nothing():
    async def scenario(app, fake):
        app = make_app(SearchService(fake, "fake", 3), token="secret")
        host, key = (b"host", b"localhost:8000"), (b"authorization", b"Bearer secret")
        for headers, status in (
            ([host], 401),
            ([host, (b"authorization", b"Bearer guess")], 401),
            ([host, key, (b"origin", b"http://evil.example")], 403),
        ):
            assert (await call(app, "POST", "/retrieve", ask("a"), headers))[0] == status
        assert (await call(app, "GET", "/health", headers=[host]))[0] == 200

    _, fake = run(scenario)
    assert not fake.batches


def test_requests_that_wait_are_searched_in_one_batch_and_each_gets_its_own():
    async def scenario(app, fake):
        fake.leave.clear()
        calls = [asyncio.create_task(call(app, "POST", "/retrieve", ask("first")))]
        while not fake.batches:
            await asyncio.sleep(0.001)
        calls += [
            asyncio.create_task(call(app, "POST", "/retrieve", ask(q, topk=1))) for q in "bcd"
        ]
        await asyncio.sleep(0.02)
        fake.leave.set()
        answers = [json.loads(body)["result"] for _, _, body in await asyncio.gather(*calls)]
        titles = [[hit["title"] for hit in hits] for ((*hits,),) in answers]
        assert titles == [["first0", "first1"], ["b0"], ["c0"], ["d0"]]

    _, fake = run(scenario)
    assert fake.batches == [["first"], ["b", "c", "d"]]


def test_a_batch_holds_at_most_its_limit_unless_one_request_alone_has_more():
    async def scenario(app, fake):
        fake.leave.clear()
        calls = [asyncio.create_task(call(app, "POST", "/retrieve", ask("x")))]
        while not fake.batches:
            await asyncio.sleep(0.001)
        for queries in ("ab", "c", "defg"):
            calls.append(asyncio.create_task(call(app, "POST", "/retrieve", ask(*queries))))
        await asyncio.sleep(0.02)
        fake.leave.set()
        await asyncio.gather(*calls)

    _, fake = run(scenario, max_batch=3)
    assert fake.batches == [["x"], ["a", "b", "c"], ["d", "e", "f", "g"]]


def test_a_full_queue_refuses_with_503_and_says_when_to_come_back():
    async def scenario(app, fake):
        fake.leave.clear()
        calls = [asyncio.create_task(call(app, "POST", "/retrieve", ask("x")))]
        while not fake.batches:
            await asyncio.sleep(0.001)
        calls += [asyncio.create_task(call(app, "POST", "/retrieve", ask(q))) for q in "ab"]
        await asyncio.sleep(0.02)
        status, headers, body = await call(app, "POST", "/retrieve", ask("c"))
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body) == {"error": "2 requests are waiting"}
        assert json.loads((await call(app, "GET", "/health"))[2])["status"] == "full"
        fake.leave.set()
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 3

    service, _ = run(scenario, max_waiting=2)
    assert (service.num_refused, service.num_answered) == (1, 3)


def test_a_search_that_fails_is_a_500_and_the_next_one_works():
    async def scenario(app, fake):
        status, _, body = await call(app, "POST", "/retrieve", ask("fail"))
        assert (status, json.loads(body)) == (500, {"error": "the search failed: no index"})
        assert (await call(app, "POST", "/retrieve", ask("a")))[0] == 200

    service, _ = run(scenario)
    assert service.num_failed == 1


def test_the_health_page_tells_what_was_served():
    async def scenario(app, fake):
        await call(app, "POST", "/retrieve", ask("a"))
        status, _, body = await call(app, "GET", "/health")
        told = json.loads(body)
        assert status == 200
        assert (told["status"], told["num_answered"], told["num_passages"]) == ("ok", 1, 3)
        status, headers, page = await call(app, "GET", "/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert b"num_answered</td><td>1" in page

    run(scenario)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body must be JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"{}", "'queries' must be a list of 1 to 256 texts"),
        (b'{"queries": []}', "'queries' must be a list"),
        (b'{"queries": [3]}', "a query must be a text"),
        (json.dumps({"queries": ["x" * 10_001]}).encode(), "at most 10,000 characters"),
        (b'{"queries": ["a"], "topk": 0}', "'topk' must be a whole number from 1 to 100, got 0"),
        (b'{"queries": ["a"], "topk": true}', "'topk' must be"),
        (b'{"queries": ["a"], "topk": "3"}', "'topk' must be"),
        (b"[" * 100_000, "the body must be JSON"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(body, message):
    with pytest.raises(EnvError, match=message):
        parse_query(body)

    async def scenario(app, fake):
        status, _, answer = await call(app, "POST", "/retrieve", body)
        assert status == 422 and "error" in json.loads(answer)

    run(scenario)


def test_topk_may_be_left_out():
    assert parse_query(b'{"queries": ["a"], "topk": null}') == Query(["a"], 5, False)
