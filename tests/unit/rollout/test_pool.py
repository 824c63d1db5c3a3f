"""Calls of environments: in threads, within a time limit, with shared resources."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from moored.envs import Resource, StepResult
from moored.errors import EnvError, EnvTimeoutError
from moored.rollout.pool import EnvPool
from moored.types import Message


@dataclass
class Server(Resource):
    """Notes what happens to it."""

    port: int = 0
    log: ClassVar[list[str]] = []

    def open(self) -> None:
        self.log.append(f"open {self.port}")

    def close(self) -> None:
        self.log.append(f"close {self.port}")


class Client:
    """An environment with a server."""

    name: ClassVar[str] = "client"
    is_stochastic: bool = False
    max_turns: int = 1
    server: Server

    def __init__(self, port: int = 1) -> None:
        self.port = port
        self.num_closed = 0

    def resources(self) -> dict[str, Resource]:
        return {"server": Server(self.port)}

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        return [Message("user", f"port {self.server.port}")]

    def step(self, reply: str) -> StepResult:
        return StepResult(observation="", reward=0.0, terminated=True)

    def oracle(self) -> str:
        return ""

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def fresh_log():
    Server.log.clear()


@pytest.fixture
def hang():
    """A call that returns only when the test is over."""
    release = threading.Event()
    yield release.wait
    release.set()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The pool's clock, which moves only when a test adds to it."""
    clock = Clock()
    monkeypatch.setattr("moored.rollout.pool.time", clock)
    return clock


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def outlast(self, limit_s: float, hang: Callable[[], object]) -> Callable[[], object]:
        """A call that hangs, and whose limit is over at once."""

        def call() -> object:
            self.now_s += 2 * limit_s
            return hang()

        return call


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_calls(workers):
    with EnvPool(workers=workers) as pool:
        assert pool.run_all([lambda i=i: i * i for i in range(500)]) == [i * i for i in range(500)]
        assert pool.run_all([]) == []


def test_results_are_polled_under_their_keys():
    with EnvPool() as pool:
        pool.submit("a", lambda: 1)
        pool.submit("b", lambda: 2)
        found = {}
        while len(found) < 2:
            found.update(pool.poll())
        assert found == {"a": 1, "b": 2}


@pytest.mark.parametrize("workers", [1, 3])
def test_questions_of_one_batch_are_answered_under_their_keys(workers):
    with EnvPool(workers=workers) as pool:
        envs = [pool.take(Client) for _ in range(20)]
        pool.ask([(key, env, (0, 0)) for key, env in enumerate(envs)])
        found = dict(pool.poll(linger_s=None))
        assert found == {key: [Message("user", "port 1")] for key in range(20)}
        pool.ask([])
        assert pool.poll() == []


def test_a_batch_of_questions_wakes_as_many_workers_as_it_needs():
    barrier = threading.Barrier(3, timeout=60)

    class Meeting(Client):
        def step(self, reply: str) -> StepResult:
            barrier.wait()
            return super().step(reply)

    with EnvPool(workers=3) as pool:
        envs = [pool.take(Meeting) for _ in range(3)]
        for _ in range(2):  # threads are started for the first batch, and woken for the second
            pool.ask([(key, env, "here") for key, env in enumerate(envs)])
            found = pool.poll(linger_s=None)
            assert all(isinstance(result, StepResult) for _, result in found) and len(found) == 3


def test_polling_without_pending_calls_gives_nothing():
    with EnvPool() as pool:
        assert pool.poll() == [] and pool.poll(wait_s=0.0) == []


def test_polling_without_waiting_returns_at_once():
    release = threading.Event()
    with EnvPool() as pool:
        pool.submit("a", release.wait)
        assert pool.poll(wait_s=0.0) == []
        release.set()  # closing the pool waits a while for calls that are under way


def test_what_a_call_raises_is_data():
    def fail() -> None:
        raise KeyError("no map")

    def leave() -> None:
        raise SystemExit(3)

    with EnvPool() as pool:
        error, left, value = pool.run_all([fail, leave, lambda: 5])
    assert isinstance(error, KeyError) and value == 5
    assert isinstance(left, EnvError)
    assert re.fullmatch(r"it raised SystemExit at test_pool\.py:\d+: 3", str(left))


def test_a_call_that_hangs_costs_only_itself(clock, hang):
    late = clock.outlast(60.0, hang)
    with EnvPool(timeout_s=60.0) as pool:
        found = pool.run_all([lambda: 1, late, lambda: 2, late, lambda: 3])
        assert [found[0], found[2], found[4]] == [1, 2, 3]
        assert isinstance(found[1], EnvTimeoutError) and isinstance(found[3], EnvTimeoutError)
        assert "took over 60 s" in str(found[1]) and "rollout.env_timeout_s" in str(found[1])
        assert pool.run_all([lambda: 4]) == [4]


def test_threads_that_were_given_up_are_counted_until_they_end(clock):
    release = threading.Event()
    with EnvPool(timeout_s=60.0) as pool:
        pool.run_all([clock.outlast(60.0, release.wait), lambda: 1])
        assert pool.num_hung == 1
        release.set()
        while pool.num_hung:
            threading.Event().wait(0.001)


def test_other_workers_go_on_while_a_call_hangs(clock, hang):
    # Until the others' results are in, the clock stands: a slow thread's call would be late, too.
    others_are_in = threading.Event()
    late = clock.outlast(60.0, hang)
    with EnvPool(workers=2, timeout_s=60.0) as pool:
        pool.submit("hangs", lambda: others_are_in.wait(60) and late())
        for number in range(3):
            pool.submit(number, lambda: "done")
        found: dict[Hashable, object] = {}
        while len(found) < 3:
            found.update(pool.poll())
        assert found == {0: "done", 1: "done", 2: "done"}
        others_are_in.set()
        ((key, error),) = pool.poll()
    assert key == "hangs" and isinstance(error, EnvTimeoutError)


def test_time_in_the_queue_does_not_count(clock):
    def take_most_of_the_limit() -> str:
        clock.now_s += 50.0
        return "in time"

    with EnvPool(timeout_s=60.0) as pool:
        assert pool.run_all([take_most_of_the_limit] * 5) == ["in time"] * 5


def test_a_late_result_of_a_call_that_was_given_up_is_dropped(clock):
    release = threading.Event()
    with EnvPool(timeout_s=60.0) as pool:
        pool.submit("late", clock.outlast(60.0, release.wait))
        ((key, error),) = pool.poll()
        assert key == "late" and isinstance(error, EnvTimeoutError)
        release.set()
        assert pool.run_all([lambda: "next"]) == ["next"]
        assert pool.poll() == []


def test_calls_run_at_the_same_time_in_several_workers():
    barrier = threading.Barrier(3, timeout=60)
    with EnvPool(workers=3) as pool:
        assert sorted(pool.run_all([barrier.wait] * 3)) == [0, 1, 2]  # pyright: ignore[reportArgumentType]


def test_without_a_limit_a_call_may_take_as_long_as_it_likes():
    with EnvPool(timeout_s=None) as pool:
        assert pool.run_all([lambda: threading.Event().wait(0.15)]) == [False]


def test_environments_are_reused_and_closed_at_the_end():
    with EnvPool() as pool:
        env = pool.take(Client)
        pool.give_back(Client, env)
        assert pool.take(Client) is env
        pool.give_back(Client, env)
    assert isinstance(env, Client) and env.num_closed == 1


def test_a_discarded_environment_is_closed_and_not_given_out_again(caplog):
    class Broken(Client):
        def close(self) -> None:
            super().close()
            raise OSError("already gone")

    with EnvPool() as pool:
        env = pool.take(Broken)
        pool.discard(env)
        assert isinstance(env, Client) and env.num_closed == 1
        assert pool.take(Broken) is not env
    assert "client could not be closed: OSError: already gone" in caplog.text


def test_an_environment_that_hangs_is_not_given_out_again(clock, hang):
    with EnvPool(timeout_s=60.0) as pool:
        env = pool.take(Client)
        pool.submit("step", clock.outlast(60.0, hang), env=env)
        pool.poll()
        pool.give_back(Client, env)
        assert pool.take(Client) is not env


def test_an_environment_that_hung_is_let_go_once_its_call_has_ended(clock):
    release = threading.Event()
    with EnvPool(timeout_s=60.0) as pool:
        env = pool.take(Client)
        pool.submit("step", clock.outlast(60.0, release.wait), env=env)
        pool.poll()
        pool.give_back(Client, env)
        known = weakref.ref(env)
        del env
        release.set()
        for _ in range(5000):
            gc.collect()
            if known() is None and not pool.num_hung:
                break
            threading.Event().wait(0.001)
        assert known() is None


def test_an_environment_that_hangs_in_close_does_not_hold_the_pool_up(hang, caplog):
    class Sticky(Client):
        def close(self) -> None:
            hang()

    with EnvPool(timeout_s=0.01) as pool:
        pool.give_back(Sticky, pool.take(Sticky))
    assert "still closing" in caplog.text
    assert Server.log == ["open 1", "close 1"]


def test_dropped_calls_leave_no_results():
    with EnvPool() as pool:
        pool.submit("a", lambda: 1)
        pool.drop_calls()
        assert pool.poll() == []
        assert pool.run_all([lambda: 2]) == [2]


def test_equal_resources_are_opened_once_and_closed_at_the_end():
    with EnvPool() as pool:
        envs = [pool.take(Client), pool.take(Client), pool.take(lambda: Client(port=2))]
        assert [env.reset(0)[0].text for env in envs] == ["port 1", "port 1", "port 2"]
        assert envs[0].server is envs[1].server  # pyright: ignore[reportAttributeAccessIssue]
        pool.discard(envs[0])
        assert Server.log == ["open 1", "open 2"]
    assert Server.log == ["open 1", "open 2", "close 2", "close 1"]


def test_resources_are_closed_after_an_error_and_after_an_interrupt():
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), EnvPool() as pool:
            pool.take(Client)
            raise error
    assert Server.log == ["open 1", "close 1"] * 2


def test_a_resource_bounds_the_calls_that_use_it():
    @dataclass
    class Narrow(Resource):
        max_concurrency: int | None = 2

    class Narrowed(Client):
        def resources(self) -> dict[str, Resource]:
            return {"gate": Narrow()}

    lock, numbers = threading.Lock(), []
    num_inside = 0

    def call() -> None:
        nonlocal num_inside
        with lock:
            num_inside += 1
            numbers.append(num_inside)
        threading.Event().wait(0.01)
        with lock:
            num_inside -= 1

    barrier = threading.Barrier(2, timeout=60)
    with EnvPool(workers=4) as pool:
        envs = [pool.take(Narrowed) for _ in range(8)]
        pool.run_all([call] * 8, envs)
        assert max(numbers) == 2
        # Calls of others pass those that wait for room.
        free = [pool.take(Client) for _ in range(2)]
        found = pool.run_all([call] * 4 + [barrier.wait] * 2, [*envs[:4], *free])
        assert sorted(found[4:]) == [0, 1]  # pyright: ignore[reportArgumentType]


def test_a_call_that_hangs_gives_its_room_up(clock, hang):
    @dataclass
    class Single(Resource):
        max_concurrency: int | None = 1

    class Narrowed(Client):
        def resources(self) -> dict[str, Resource]:
            return {"gate": Single()}

    with EnvPool(workers=2, timeout_s=60.0) as pool:
        envs = [pool.take(Narrowed) for _ in range(2)]
        late, value = pool.run_all([clock.outlast(60.0, hang), lambda: 7], envs)
        assert isinstance(late, EnvTimeoutError) and value == 7


def test_a_poll_that_lingers_returns_a_whole_batch_of_short_calls() -> None:
    with EnvPool() as pool:
        for key in range(20):
            pool.submit(key, lambda key=key: key)
        found = pool.poll(linger_s=None)
    assert sorted(found) == [(key, key) for key in range(20)]


def test_a_poll_lingers_no_longer_than_nothing_comes() -> None:
    go_on = threading.Event()
    with EnvPool(workers=2) as pool:
        pool.submit("quick", lambda: 1)
        pool.submit("slow", go_on.wait)
        assert pool.poll(linger_s=0.01) == [("quick", 1)]
        go_on.set()
        assert pool.poll() == [("slow", True)]


def test_a_lingering_poll_gives_up_calls_that_take_too_long() -> None:
    go_on = threading.Event()
    with EnvPool(workers=2, timeout_s=0.05) as pool:
        pool.submit("quick", lambda: 1)
        pool.submit("slow", go_on.wait)
        found = dict(pool.poll(linger_s=None))
        go_on.set()
    assert found["quick"] == 1
    assert isinstance(found["slow"], EnvTimeoutError)
