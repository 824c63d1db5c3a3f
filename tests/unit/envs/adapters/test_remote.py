"""The client of `moored serve-env`, against a real server that is stopped and killed."""

from __future__ import annotations

import functools
import json
import pickle
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import pytest

from moored.envs import format_reply
from moored.envs.adapters import Remote, remote
from moored.envs.check.runner import check_env
from moored.envs.mix import make_env, open_env
from moored.envs.resources import SharedResources
from moored.envs.serving.wire import NoRoomError, messages_to_json, result_to_json
from moored.errors import EnvError, MooredError
from moored.rollout.pool import EnvPool
from tests.env_server import serve_env
from tests.json_server import json_server

pytest.importorskip("uvicorn")


@pytest.fixture(autouse=True)
def forget_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port may be used again by another server; and nobody waits long for one that is gone."""
    remote._about_servers.clear()
    monkeypatch.setattr(remote, "RETRY_WAITS_S", (0.01, 0.02))


@contextmanager
def fake_server(answers: dict[str, tuple[int, object]], token: str = "") -> Iterator[str]:
    """Answers by the last part of the path: a status, and JSON or bytes."""

    def answer(path: str, body: object, headers: Mapping[str, str]) -> tuple[int, object]:
        said = answers[path.rpartition("/")[2]]
        if token and headers.get("Authorization") != f"Bearer {token}":
            return 401, {"error": "the token is missing"}
        return said

    with json_server(answer) as url:
        yield url


def sane() -> dict[str, tuple[int, Any]]:
    env = make_env("countdown")
    messages = messages_to_json(env.reset(0))
    about = {"protocol": 1, "name": "countdown", "max_turns": 1, "is_stochastic": False}
    return {
        "environment": (200, about),
        "sessions": (200, {"session": "s"}),
        "reset": (200, {"messages": messages}),
        "step": (200, result_to_json(env.step("x"))),
        "oracle": (200, {"answer": "1"}),
        "s": (200, {}),
    }


@pytest.fixture(scope="module")
def lake() -> Iterator[str]:
    """The address of a server of slippery lakes."""
    with serve_env("frozen_lake", "-o", "slip=0.5", "--max-sessions=300") as (url, _):
        yield url


def test_a_served_environment_plays_as_if_it_were_here(lake: str) -> None:
    here = make_env("frozen_lake", slip=0.5)
    with open_env("remote", url=lake) as env:
        assert (env.max_turns, env.is_stochastic) == (here.max_turns, True)
        for episode in range(3):
            assert env.reset(4, episode) == here.reset(4, episode)
            result = None
            while result is None or not result.is_over:
                assert env.oracle() == here.oracle()
                reply = format_reply("", here.oracle())
                result = here.step(reply)
                assert env.step(reply) == result


def test_a_copy_pickled_in_mid_episode_goes_on_in_a_session_of_its_own(lake: str) -> None:
    with closing(Remote(url=lake)) as env:
        env.reset(4, 1)
        env.step("malformed")
        with closing(pickle.loads(pickle.dumps(env))) as copy:
            reply = format_reply("", env.oracle())
            assert env.step(reply) == copy.step(reply)


def test_a_served_environment_keeps_the_rules(lake: str) -> None:
    rules = ["protocol", "determinism", "ending", "malformed", "replies"]
    report = check_env(f"remote:{lake}", num_tasks=1, in_child=False, only=rules, reply_limit_s=1.0)
    report.raise_if_failed()


def test_a_server_that_hangs_or_dies_costs_the_episode_and_a_new_one_serves_the_next() -> None:
    with serve_env("bandit") as (url, server), closing(Remote(url=url, timeout_s=0.5)) as env:
        env.reset(0)
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(EnvError, match=r"no answer within 0\.5 s"):
            env.step("x")
        with pytest.raises(EnvError, match="call reset"):
            env.step("x")
        server.send_signal(signal.SIGCONT)
        env.reset(1)
        server.kill()
        server.wait()
        with pytest.raises(EnvError, match="remote: http"):
            env.step("x")
        port = int(url.rpartition(":")[2])
        with serve_env("bandit", port=port):
            env.reset(1)
            assert env.step("x").is_over


def num_open(url: str) -> int:
    """Sessions that the server holds."""
    with urllib.request.urlopen(f"{url}/health") as answer:
        return json.load(answer)["sessions"]["active"]


class Full(dict[str, Any]):
    """Sane answers of a server whose sessions are in use for so many requests."""

    def __init__(self, num_refused: int) -> None:
        super().__init__(sane())
        self.num_left = num_refused

    def __getitem__(self, path: str) -> Any:
        if path == "sessions":
            self.num_left -= 1
        refused = path == "sessions" and self.num_left >= 0
        return (503, {"error": "raise --max-sessions"}) if refused else super().__getitem__(path)


def test_a_free_session_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FULL_WAIT_S", 0.01)
    with fake_server(Full(3)) as url, closing(Remote(url=url)) as env:
        env.reset(0)
        assert env.step("x").terminated


def test_a_server_without_a_free_session_is_given_up_with_the_option_to_raise() -> None:
    with serve_env("bandit", "--max-sessions=1") as (url, _), closing(Remote(url=url)) as first:
        first.reset(0)
        with (
            closing(Remote(url=url, timeout_s=0.3)) as second,
            pytest.raises(NoRoomError, match="larger --max-sessions"),
        ):
            second.reset(0)


def test_only_the_first_callers_wait_where_a_run_holds_the_sessions_itself() -> None:
    with fake_server(answers := Full(1000)) as url, closing(Remote(url=url, timeout_s=0.3)) as env:
        with pytest.raises(NoRoomError):
            env.reset(0)
        left = answers.num_left
        with pytest.raises(NoRoomError):
            env.reset(0)
        assert answers.num_left == left - 1


def test_the_default_server_has_room_for_the_128_episodes_of_a_preset() -> None:
    with serve_env("bandit") as (url, _), EnvPool(workers=8) as pool:
        make = functools.partial(make_env, "remote", url=url)
        pool.ask([(index, pool.take(make), (index, 0)) for index in range(128)])
        answers = dict(pool.poll(linger_s=None))
        assert len(answers) == 128
        assert not [answer for answer in answers.values() if isinstance(answer, Exception)]


def test_a_run_that_ends_in_mid_episode_leaves_no_session(lake: str) -> None:
    before = num_open(lake)
    with closing(SharedResources()) as resources:
        env = make_env("remote", url=lake)
        resources.attach(env)
        env.reset(0)
        assert num_open(lake) == before + 1
    assert num_open(lake) == before


def test_an_episode_that_ends_in_an_error_leaves_no_session(lake: str) -> None:
    before = num_open(lake)
    with closing(Remote(url=lake)) as env:
        env.reset(0)
        env._replies.append("a turn that the server does not know of")
        with pytest.raises(EnvError, match="turn 0 was expected"):
            env.step("x")
    assert num_open(lake) == before


def test_a_check_needs_few_sessions_and_leaves_none() -> None:
    rules = ["protocol", "processes", "determinism", "pickling"]
    with serve_env("bandit", "--max-sessions=20") as (url, _):
        check_env(f"remote:{url}", num_tasks=6, only=rules).raise_if_failed()
        assert num_open(url) == 0


def test_a_full_server_is_not_a_broken_rule() -> None:
    with serve_env("bandit", "--max-sessions=1") as (url, _), closing(Remote(url=url)) as other:
        other.reset(0)
        with pytest.raises(NoRoomError, match="--max-sessions"):
            check_env("remote", options={"url": url, "timeout_s": 0.3})


def test_an_instance_is_made_while_the_server_is_down_if_it_was_known() -> None:
    with fake_server(sane()) as url:
        assert make_env("remote", url=url).max_turns == 1
    env = make_env("remote", url=url)
    assert env.max_turns == 1
    with closing(env), pytest.raises(EnvError, match="remote: http"):
        env.reset(0)


def test_a_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_TOKEN", "secret")
    monkeypatch.delenv("MOORED_ENV_TOKEN", raising=False)
    with fake_server(sane(), token="secret") as url:
        with (
            closing(Remote(url=url)) as env,
            pytest.raises(EnvError, match="401 Unauthorized: the token is missing"),
        ):
            env.reset(0)
        with closing(Remote(url=url, token_env="LAKE_TOKEN")) as env:
            assert env.reset(0)


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("sessions", (500, b"Oh"), "500 Internal Server Error: Oh"),
        ("sessions", (200, {"session": 5}), "gave the session 5"),
        ("reset", (200, b"<html>"), "the answer is not JSON: <html>"),
        ("reset", (200, {"messages": []}), "messages must be a list that is not empty"),
        ("reset", (200, [1]), "a JSON object was expected"),
    ],
)
def test_a_server_that_talks_nonsense_at_the_start_costs_the_episode(
    path: str, answer: tuple[int, object], said: str
) -> None:
    with (
        fake_server({**sane(), path: answer}) as url,
        closing(Remote(url=url)) as env,
        pytest.raises(EnvError, match=said),
    ):
        env.reset(0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((500, {"error": "KeyError: 'x'"}), "500 Internal Server Error: KeyError: 'x'"),
        ((200, {"reward": "lots"}), "as true or false"),
        ((200, b"\\xff\\xfe"), "the answer is not JSON"),
    ],
)
def test_a_server_that_talks_nonsense_in_mid_episode_costs_the_episode(
    answer: tuple[int, object], said: str
) -> None:
    answers = sane()
    with fake_server(answers) as url, closing(Remote(url=url)) as env:
        env.reset(0)
        answers["step"] = answer
        with pytest.raises(EnvError, match=said):
            env.step("x")
        answers.update(sane())
        env.reset(0)
        assert env.step("x").terminated


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"protocol": 2}, "does not speak protocol 1"),
        ({"protocol": 1, "max_turns": 0}, "gave max_turns = 0"),
        ({"protocol": 1, "max_turns": True}, "gave max_turns = True"),
    ],
)
def test_a_server_of_another_kind_is_refused(about: dict[str, object], said: str) -> None:
    with (
        fake_server({**sane(), "environment": (200, about)}) as url,
        pytest.raises(EnvError, match=said),
    ):
        _ = Remote(url=url).max_turns


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs the option 'url'"),
        ({"url": "localhost"}, "must look like http"),
        ({"url": "http://127.0.0.1:1", "timeout_s": 0}, "timeout_s must be positive"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(MooredError, match=said):
        make_env("remote", **options).reset(0)
