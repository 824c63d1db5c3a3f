"""A search server that dies, hangs, answers garbage or fails costs episodes, not the run."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from moored.config import RolloutConfig
from moored.engine.base import LockstepStream, Request, SamplingParams
from moored.engine.endpoint.sampler import TextRenderer
from moored.envs import format_reply
from moored.envs.base import StepResult
from moored.envs.mix import make_env, open_env
from moored.envs.search.env import Search
from moored.envs.search.remote import SearchServer
from moored.envs.search.world import make_world
from moored.errors import EnvError
from moored.rollout.episodes import Task, roll_out
from moored.rollout.pool import EnvPool
from moored.types import Completion, FinishReason, StopReason, content_text
from tests.json_server import json_server
from tests.warm import WarmProcess

HIT = {"document": {"id": "3", "contents": '"Kirham"\nKirham is a town.'}, "score": 2.5}
GOOD = {"result": [[HIT]]}
Answer = Callable[[dict, int], tuple[int, object]]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[dict]]]:
    """A server that gives set answers; its address and the requests it has seen."""
    seen: list[dict] = []

    def note(path: str, body: dict, headers: object) -> tuple[int, object]:
        seen.append({"path": path, **body})
        return answer(body, len(seen) - 1)

    with json_server(note) as url:
        yield url, seen


def good(body: dict, number: int) -> tuple[int, object]:
    return 200, GOOD


def after_the_first(status: int, data: bytes) -> Answer:
    return lambda body, number: (status, data) if number else good(body, number)


def opened(url: str, **options: float) -> SearchServer:
    server = SearchServer(url, pause_s=0.0, **options)  # pyright: ignore[reportArgumentType]
    server.open()
    return server


def test_the_request_and_the_answer_are_those_of_search_r1():
    with serving(good) as (url, seen):
        (hits,) = opened(f"{url}/retrieve").search(["Kirham"], 5)
    asked = {"path": "/retrieve", "queries": ["Kirham"], "topk": 5, "return_scores": True}
    assert seen[1] == asked
    assert [(hit.passage.title, hit.passage.text, hit.score) for hit in hits] == [
        ("Kirham", "Kirham is a town.", 2.5)
    ]


@pytest.mark.parametrize(
    "passage",
    [
        {"contents": "Kirham\nKirham is a town."},
        {"title": "Kirham", "text": "Kirham is a town."},
        {"document": {"title": "Kirham", "text": "Kirham is a town."}, "score": None},
    ],
)
def test_other_shapes_of_a_passage_are_read_too(passage):
    with serving(lambda body, number: (200, {"result": [[passage]]})) as (url, _):
        ((hit,),) = opened(url).search(["Kirham"], 5)
    assert (hit.passage.title, hit.passage.text) == ("Kirham", "Kirham is a town.")


@pytest.mark.parametrize(
    ("status", "data", "message", "num_requests"),
    [
        (500, b"oops", r"500 .*oops \(try 3 of 3\)", 3),
        (503, b"", r"503 .*\(try 3 of 3\)", 3),
        (404, b"", r"404 .*\(try 1 of 3\)", 1),
        (200, b"<html>", r"the answer is not JSON: <html> \(try 3 of 3\)", 3),
        (200, b"[]", "must hold 'result'", 1),
        (200, b'{"result": []}', "must hold 'result'", 1),
        (200, b'{"result": [3]}', "must hold 'result'", 1),
        (200, b'{"result": [["x"]]}', "must hold 'result'", 1),
        (200, b'{"result": [[{"document": {"contents": 3}}]]}', "must hold 'result'", 1),
        (200, b"[" * 100_000, "not JSON", 3),
    ],
)
def test_what_a_server_does_wrong_is_an_environment_error(status, data, message, num_requests):
    with serving(after_the_first(status, data)) as (url, seen):
        server = opened(url)
        with pytest.raises(EnvError, match=message):
            server.search(["Kirham"], 5)
        assert len(seen) == 1 + num_requests


def test_a_failure_that_passes_is_not_noticed():
    def fails_once(body: dict, number: int) -> tuple[int, object]:
        return (500, b"") if number == 1 else good(body, number)

    with serving(fails_once) as (url, seen):
        assert len(opened(url).search(["Kirham"], 5)[0]) == 1
        assert len(seen) == 3


def test_a_server_that_is_not_there_is_told_at_the_start():
    told = r"127.0.0.1:9.*start it first \(moored serve-search\)"
    with EnvPool() as pool, pytest.raises(EnvError, match=told):
        pool.take(lambda: make_env("search", retriever="http://127.0.0.1:9"))


@contextmanager
def serve_search(*words: str, token: str = "") -> Iterator[tuple[WarmProcess, str]]:
    """`moored serve-search` as a process of its own, and its address."""
    environ = {"MOORED_SEARCH_TOKEN": token}
    process = WarmProcess(["serve-search", "--port", "0", *words], env=environ, slim=True)
    try:
        told = process.stdout.readline()
        assert "/retrieve" in told, told
        yield process, told.split()[-1].removesuffix("/retrieve")
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def test_a_server_without_the_passages_of_the_questions_is_told_of_at_the_start(caplog):
    """A server of one's own, and made-up questions: none could be answered."""
    with serving(good) as (url, seen):
        open_and_close(url)
        assert "does not have the passages that the made-up questions are about" in caplog.text
        assert "set env.N.options.questions" in caplog.text
        (asked,) = seen
        titles = [thing.name for thing in make_world(3).things]
        assert asked["queries"][0] in titles
    caplog.clear()
    with serve_search("--world-seed", "3") as (_, url):
        open_and_close(url)
        assert not caplog.text


def test_a_token_is_asked_for_and_sent(monkeypatch):
    with serve_search("--world-seed", "3", "--host", "0.0.0.0", token="secret") as (_, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        monkeypatch.setenv("MOORED_SEARCH_TOKEN", "secret")
        open_and_close(url)
        monkeypatch.delenv("MOORED_SEARCH_TOKEN")
        with pytest.raises(EnvError, match="401"):
            open_and_close(url)


def open_and_close(url: str) -> None:
    (retriever,) = Search(retriever=url, world_seed=3).resources().values()
    retriever.open()
    retriever.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[WarmProcess, str]]:
    with serve_search() as found:
        yield found


def searching_envs(pool: EnvPool, url: str) -> list[Search]:
    made = [pool.take(lambda: make_env("search", retriever=url, timeout_s=0.7)) for _ in range(4)]
    return [env for env in made if isinstance(env, Search)]


def search_with_all(pool: EnvPool, envs: list[Search]) -> list[StepResult | Exception]:
    """One search in a new episode of each, as training would do it."""
    for seed, env in enumerate(envs):
        env.reset(seed)
    reply = format_reply("", "search[Kirham town]")
    return pool.run_all([lambda env=env: env.step(reply) for env in envs], envs)


def assert_found(results: list[StepResult | Exception]) -> None:
    for result in results:
        assert isinstance(result, StepResult) and "[1] " in result.observation, result


def test_a_real_server_that_hangs_in_mid_run_costs_the_episodes_under_way(server):
    process, url = server
    with EnvPool(workers=4, timeout_s=30.0) as pool:
        envs = searching_envs(pool, url)
        assert_found(search_with_all(pool, envs))
        process.send_signal(signal.SIGSTOP)
        lost = search_with_all(pool, envs)
        process.send_signal(signal.SIGCONT)
        assert [type(result) for result in lost] == [EnvError] * 4
        assert all("no answer within 0.7 s" in str(error) for error in lost)
        assert_found(search_with_all(pool, envs))


class Pen:
    """Searches in the first turn; then half of the episodes search again, the others finish.

    Before the second turn it calls `between`.
    """

    def __init__(self, between: Callable[[], object]) -> None:
        self.between = between

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        turns = [sum(m.role == "assistant" for m in request.messages) for request in requests]
        if 1 in turns:
            self.between()
        return [
            self._write("finish[Kirham]" if turn and place % 2 else "search[Kirham town]")
            for place, turn in enumerate(turns)
        ]

    def _write(self, action: str) -> Completion:
        ids = np.array([ord(char) for char in format_reply("", action)])
        return Completion(ids, np.full(len(ids), -1.0), FinishReason.STOP)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        pass


@dataclass
class Writer:
    sampler: Pen
    renderer: TextRenderer = field(default_factory=TextRenderer)


def test_a_real_server_that_is_killed_in_mid_run_costs_the_episodes_that_search(monkeypatch):
    # It does not come back, however long a search waits before it tries again.
    monkeypatch.setattr("moored.envs.search.remote.MAX_PAUSE_S", 0.0)

    def tasks(url: str) -> list[Task]:
        make = functools.partial(make_env, "search", retriever=url, timeout_s=2.0, max_turns=2)
        seeds = range(3)
        return [
            Task(group_id=i, env="search", make_env=make, task_seed=i, episode_seeds=(0, 1))
            for i in seeds
        ]

    def kill() -> None:
        process.kill()
        process.wait()

    with serve_search() as (process, url), EnvPool(workers=2, timeout_s=30.0) as pool:
        engine, planned = Writer(Pen(kill)), tasks(url)
        options = RolloutConfig(max_context=100_000)
        groups = roll_out(planned, engine=engine, options=options, seed=(0,), pool=pool)
        stops = [trajectory.stop for group in groups for trajectory in group.trajectories]
        assert stops == [StopReason.ENV_ERROR, StopReason.DONE] * 3
        seen = [turn.seen for group in groups for t in group.trajectories for turn in t.turns]
        assert sum("[1] " in content_text(text) for text in seen) == 6
        assert not any("server" in content_text(text) for text in seen)
        # The next step of the run begins as usual; without a server every search is lost.
        again = roll_out(planned, engine=engine, options=options, seed=(1,), pool=pool)
        stops = {trajectory.stop for group in again for trajectory in group.trajectories}
        assert stops == {StopReason.ENV_ERROR}


def test_the_served_corpus_finds_what_the_embedded_one_does(server):
    with open_env("search", retriever=server[1]) as served, open_env("search") as embedded:
        for seed in range(20):
            served.reset(seed)
            embedded.reset(seed)
            is_over = False
            while not is_over:
                reply = format_reply("", embedded.oracle())
                here, there = embedded.step(reply), served.step(reply)
                assert here == there
                is_over = here.is_over


def test_ctrl_c_ends_the_server_without_an_error():
    with serve_search() as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout_s=30) == 0
