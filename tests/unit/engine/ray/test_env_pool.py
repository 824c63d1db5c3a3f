"""Environments in actors of a real Ray cluster of two nodes."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("transformers")

from moored.config import load_config
from moored.engine.base import Event, LockstepStream, Request, SamplingParams
from moored.engine.ray.cluster import Cluster
from moored.engine.ray.env_host import to_bytes
from moored.engine.ray.env_pool import ActorPool
from moored.envs.base import StepResult
from moored.envs.mix import EnvMix
from moored.errors import EnvError, EnvTimeoutError, MooredError
from moored.rollout.episodes import Task, roll_out
from moored.rollout.pool import Answer, EnvCalls, EnvPool
from moored.rollout.render import Renderer
from moored.types import Completion, FinishReason, Group, StopReason
from tests.contract.registered import needs_bubblewrap

pytestmark = pytest.mark.cluster
MOVES = ("up", "down", "left", "right", "up || left", "nothing at all")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path) -> Path:
    """Where the user starts the run: environments of their own are found beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Sampler:
    """Moves that depend on the whole prompt and on the seed."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Completion:
        rng = random.Random(f"{request.seed} {request.prompt.key}")
        text = f"<think>{rng.random()}</think><answer>{rng.choice(MOVES)}</answer>"
        ids = [*self._renderer.tokenizer.encode(text), self._renderer.stop_ids[0]]
        return Completion(np.array(ids), np.zeros(len(ids)), FinishReason.STOP, 0)

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def writer(toy_tokenizer) -> Any:
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    return SimpleNamespace(sampler=Sampler(renderer), renderer=renderer)


@pytest.fixture
def start(ray_cluster):
    """Pools over so many actors, and the events that they told."""
    made: list[Any] = []

    def pool(env: object, actors: int = 2, **rollout: object) -> tuple[ActorPool, list[Event]]:
        ray = {"address": ray_cluster.address, "env_actors": actors}
        config = load_config(
            {"env": env, "rollout": rollout, "engine": {"kind": "ray", "ray": ray}}
        )
        events: list[Event] = []
        made.append(Cluster(config, num_learners=0, num_env_actors=actors))
        made.append(ActorPool(made[-1], config, events.append))
        return made[-1], events

    yield pool
    for part in reversed(made):
        part.close()


def play(writer: Any, pool: EnvCalls[Any], env: object, num_groups: int = 6) -> list[Group]:
    """Groups of four episodes."""
    (spec,) = load_config({"env": env}).env
    (make,) = EnvMix([spec]).makers
    tasks = [
        Task(group_id=i, env=spec.name, make_env=make, task_seed=i, episode_seeds=(0, 1, 2, 3))
        for i in range(num_groups)
    ]
    options = load_config({"rollout": {"max_context": 100_000}}).rollout
    return roll_out(tasks, engine=writer, options=options, seed=(1, 2), pool=pool)


def same(found: Sequence[Group], expected: Sequence[Group]) -> bool:
    """To the last token, log-probability and metric."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(found) == repr(expected)


def kill(pool: ActorPool, number: int = 0) -> None:
    about = pool.actors[number].about
    assert about is not None
    os.kill(about.pid, signal.SIGKILL)


def ask(pool: ActorPool, make: Callable[[], Any], replies: Sequence[str]) -> list[Answer]:
    """One episode for each reply, as its first: all begin, then all are answered."""
    envs = [pool.take(make) for _ in replies]
    pool.ask([(key, env, (key, 0)) for key, env in enumerate(envs)])
    assert len(pool.poll(linger_s=None)) == len(replies)
    pool.ask([(key, envs[key], reply) for key, reply in enumerate(replies)])
    found = dict(pool.poll(linger_s=None))
    pool.drop_calls()
    for key, env in enumerate(envs):
        if isinstance(found[key], Exception):
            pool.discard(env)
        else:
            pool.give_back(make, env)
    return [found[key] for key in range(len(replies))]


@pytest.mark.parametrize(
    "env", ["my_envs:Walk", "sokoban", pytest.param("code", marks=needs_bubblewrap)]
)
def test_rollouts_are_those_of_environments_in_the_driver(start, writer, env):
    with EnvPool() as here:
        expected = play(writer, here, env)
    pool, events = start(env)
    # Instances are used again in the second rollout.
    for _ in range(2):
        assert same(play(writer, pool, env), expected)
    assert not events
    nodes = {actor.about.node for actor in pool.actors if actor.about is not None}
    assert len(nodes) == 2, "one actor on each node"


def test_a_module_of_that_name_in_the_current_folder_is_not_the_driver_s(
    start, writer, own_folder, monkeypatch
):
    """As when a run is resumed from another folder, which comes last on the path."""
    with EnvPool() as here:
        expected = play(writer, here, "my_envs:Walk")
    (own_folder / "my_envs.py").write_text("class Walk:\n    name = 'another'\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(own_folder)])
    pool, _ = start("my_envs:Walk")
    assert same(play(writer, pool, "my_envs:Walk"), expected)


def num_errors(found: Sequence[Group], expected: Sequence[Group]) -> int:
    """Episodes that ended as an error of their environment; all others are as they should be."""
    pairs = [
        (mine, whole)
        for group, other in zip(found, expected, strict=True)
        for mine, whole in zip(group.trajectories, other.trajectories, strict=True)
    ]
    others = [pair for pair in pairs if pair[0].stop is not StopReason.ENV_ERROR]
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        assert all(repr(mine) == repr(whole) for mine, whole in others)
    return len(pairs) - len(others)


def test_ten_kills_at_random_moments_cost_the_episodes_in_flight(start, writer):
    env = {"name": "my_envs:Walk", "options": {"pause_s": 0.005}}
    with EnvPool() as here:
        expected = play(writer, here, env)
    pool, events = start(env)
    rng, is_over = random.Random(0), threading.Event()

    def strike() -> None:
        for _ in range(10):
            time.sleep(rng.uniform(0.0, 0.4))
            while not is_over.is_set() and len(pool.up) < 2:
                time.sleep(0.01)
            kill(pool, rng.randrange(2))
            # Noticed, so that the next one kills another process.
            while not is_over.is_set() and len(pool.up) == 2:
                time.sleep(0.01)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        num_lost = 0
        while striker.is_alive():
            num_lost += num_errors(play(writer, pool, env), expected)
    finally:
        is_over.set()
        striker.join()
    assert same(play(writer, pool, env), expected)
    lost = [event for event in events if event.kind == "env_actor_lost"]
    assert len(lost) == 10
    assert sum(int(str(event.figures["episodes_lost"])) for event in lost) == num_lost > 0
    assert {"env_actor", "pid", "node"} <= lost[0].figures.keys()


def test_a_lost_node_costs_the_episodes_in_flight(start, writer, ray_cluster):
    env = {"name": "my_envs:Walk", "options": {"pause_s": 0.005}}
    with EnvPool() as here:
        expected = play(writer, here, env)
    node = ray_cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    pool, events = start(env, actors=3)
    places = [actor.about.node for actor in pool.actors if actor.about is not None]
    assert node.node_id in places
    timer = threading.Timer(0.1, ray_cluster.remove_node, (node,), {"allow_graceful": False})
    timer.start()
    num_lost = 0
    while not events or events[-1].kind != "env_actor_back":
        num_lost += num_errors(play(writer, pool, env), expected)
    timer.join()
    assert events[0].figures["episodes_lost"] == num_lost
    assert same(play(writer, pool, env), expected)
    assert [event.kind for event in events] == ["env_actor_lost", "env_actor_back"]


def test_an_actor_that_dies_between_rollouts_costs_no_episode(start, writer):
    with EnvPool() as here:
        expected = play(writer, here, "frozen_lake")
    pool, events = start("frozen_lake", actors=1)
    kill(pool)
    assert same(play(writer, pool, "frozen_lake"), expected)
    assert [event.kind for event in events] == ["env_actor_lost", "env_actor_back"]
    assert str(events[0].text).startswith("environment actor 0 is lost")


def test_an_actor_that_cannot_make_its_environments_again_tries_once_more(
    start, own_folder, monkeypatch, caplog
):
    monkeypatch.setattr("moored.engine.ray.env_pool.RETRY_S", 0.1)
    pool, events = start("my_envs:Busy", actors=1)
    (own_folder / "busy").touch()
    kill(pool)
    make = EnvMix(load_config({"env": "my_envs:Busy"}).env).makers[0]
    assert isinstance(ask(pool, make, ["on"])[0], StepResult)
    assert [event.kind for event in events] == ["env_actor_lost", "env_actor_back"]
    assert "port 1234 is taken" in caplog.text


def make_walk() -> Any:
    return EnvMix(load_config({"env": "my_envs:Walk"}).env).makers[0]


def test_a_hung_call_costs_one_episode_and_its_actor_is_replaced_between_rollouts(start):
    pool, events = start("my_envs:Walk", actors=1, env_timeout_s=0.5)
    make = make_walk()
    found = ask(pool, make, ["on", "hang", "on"])
    assert isinstance(found[1], EnvTimeoutError)
    assert isinstance(found[0], StepResult) and isinstance(found[2], StepResult)
    assert not events
    assert isinstance(ask(pool, make, ["on"])[0], StepResult)
    assert [event.kind for event in events] == ["env_actor_lost", "env_actor_back"]
    assert events[0].text == "environment actor 0 is replaced: 1 call given up in it still run"


def test_a_call_that_holds_the_interpreter_ends_its_actor(start, monkeypatch):
    monkeypatch.setattr("moored.engine.ray.env_pool.SILENCE_S", 1.0)
    pool, events = start("my_envs:Walk", actors=1, env_timeout_s=0.5)
    found = ask(pool, make_walk(), ["lock"])
    assert isinstance(found[0], EnvError) and "lost" in str(found[0])
    assert "gave no sign for 1.5 s" in events[0].text
    assert isinstance(ask(pool, make_walk(), ["on"])[0], StepResult)


def test_an_environment_that_ends_its_process_costs_the_episodes_of_its_actor(start):
    pool, events = start("my_envs:Walk", actors=1)
    found = ask(pool, make_walk(), ["on", "die", "on"])
    assert isinstance(found[1], EnvError)
    num_lost = sum(isinstance(answer, EnvError) for answer in found)
    assert [event.kind for event in events] == ["env_actor_lost"]
    # One that has answered has more turns to play, and is lost as well.
    assert events[0].figures["episodes_lost"] == 3 >= num_lost
    assert isinstance(ask(pool, make_walk(), ["on"])[0], StepResult)
    assert events[1].kind == "env_actor_back"


def test_an_environment_that_dies_as_it_begins_does_so_twice_and_no_more(start):
    pool, events = start("my_envs:DiesAtReset", actors=1)
    env = pool.take(EnvMix(load_config({"env": "my_envs:DiesAtReset"}).env).makers[0])
    pool.ask([(1, env, (0, 0))])
    ((_, found),) = pool.poll()
    assert isinstance(found, EnvError)
    lost = [event.figures["episodes_lost"] for event in events if event.kind == "env_actor_lost"]
    assert lost == [0, 1]


def test_an_episode_whose_actor_was_lost_between_two_turns_is_an_error(start):
    pool, _ = start("my_envs:Walk", actors=1)
    env = pool.take(make_walk())
    for question in ((0, 0), "on"):
        pool.ask([(1, env, question)])
        pool.poll()
    kill(pool)
    pool.ask([(1, env, "on")])
    ((_, found),) = pool.poll()
    assert isinstance(found, EnvError) and "lost" in str(found)
    pool.discard(env)
    assert isinstance(ask(pool, make_walk(), ["on"])[0], StepResult)


def test_an_error_is_told_in_words_with_its_place(start):
    pool, _ = start("my_envs:Walk", actors=1)
    odd, well = ask(pool, make_walk(), ["raise", "on"])
    assert type(odd) is EnvError
    assert re.fullmatch(r"it raised OddError at my_envs\.py:\d+: 1 and 2", str(odd))
    assert isinstance(well, StepResult)


def test_an_answer_that_cannot_be_sent_takes_no_other_with_it():
    bad = StepResult(observation="x", reward=0.0, terminated=True, metrics={"f": lambda: 1})  # pyright: ignore
    well = StepResult(observation="x", reward=0.0, terminated=True)
    (_, first, _), (_, second, turns) = pickle.loads(to_bytes([(0, bad, 1), (1, well, 7)]))
    assert isinstance(first, EnvError) and "cannot be sent to the driver" in str(first)
    assert (second, turns) == (well, 7)


def test_resources_are_opened_once_in_each_actor_and_closed_at_the_end(start, writer, own_folder):
    pool, _ = start("my_envs:Reader")
    for _ in range(2):
        play(writer, pool, "my_envs:Reader")
    pids = [actor.about.pid for actor in pool.actors if actor.about is not None]
    book = own_folder / "book.txt"
    assert sorted(book.read_text().splitlines()) == sorted(f"open {pid}" for pid in pids)
    pool.close()
    closed = book.read_text().splitlines()[2:]
    assert sorted(closed) == sorted(f"close {pid}" for pid in pids)


def test_questions_that_were_dropped_leave_nothing_behind(start, writer):
    pool, _ = start("my_envs:Walk", actors=1)
    make = make_walk()
    env = pool.take(make)
    pool.ask([(5, env, (0, 0))])
    pool.poll(wait_s=0.0)
    pool.drop_calls()
    pool.give_back(make, env)
    assert pool.poll() == []
    assert isinstance(ask(pool, make, ["on"])[0], StepResult)


def test_an_environment_that_cannot_be_pickled_is_one_sentence(start):
    pool, _ = start("my_envs:Walk", actors=1)
    with pytest.raises(EnvError, match="cannot be sent to environment actors") as found:
        pool.take(partial(print, threading.Lock()))
    assert "engine.ray.env_actors=0" in str(found.value)


def test_an_environment_that_actors_do_not_find_is_one_sentence(start, monkeypatch):
    import my_envs  # pyright: ignore[reportMissingImports]

    here = ModuleType("only_here")
    here.Walk = my_envs.Walk  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "only_here", here)
    with pytest.raises(MooredError, match="no module named 'only_here'") as found:
        start("only_here:Walk")
    assert "an environment actor on" in str(found.value)


def test_replicas_leave_room_for_environment_actors_under_auto(ray_cluster):
    ray = {"address": ray_cluster.address, "replicas": "auto", "env_actors": 3}
    config = load_config({"engine": {"kind": "ray", "ray": ray}})
    with closing(Cluster(config, num_learners=0, num_env_actors=3)) as cluster:
        # Two nodes with 2 CPUs each.
        assert sum(node["CPU"] for node in cluster.free_for_replicas()) == 1.0
