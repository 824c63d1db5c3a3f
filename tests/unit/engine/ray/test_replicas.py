"""Sampler replicas on a real Ray cluster of two nodes."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moored.config import load_config
from moored.engine.base import (
    Event,
    Request,
    SamplingParams,
    Stream,
    new_session,
    write_replies,
)
from moored.engine.ray import replicas as ray_replicas
from moored.engine.ray import team as ray_team
from moored.engine.ray.cluster import Cluster
from moored.engine.ray.replica import MakeSampler
from moored.engine.ray.replicas import ReplicaSampler, Seat
from moored.engine.ray.weights import Meeting
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError
from moored.types import Completion, FinishReason, Prompt

pytest.importorskip("ray")

pytestmark = pytest.mark.cluster
PARAMS = SamplingParams(max_tokens=12)
BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def toy(monkeypatch):
    """A sampler that needs no torch, and is there at once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("toy_cluster")


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(session=new_session(), prompt=Prompt(rng.integers(5, 90, 20)), seed=seed)
        for seed in range(count)
    ]


@pytest.fixture
def start(ray_cluster):
    """Samplers over so many replicas, and the events that they told."""
    made = []

    def sampler(
        replicas: int | str, make: MakeSampler, max_lag: int = 0
    ) -> tuple[ReplicaSampler, list[Event]]:
        options = {"address": ray_cluster.address, "replicas": replicas}
        rollout = {"max_lag": max_lag}
        config = load_config({"engine": {"kind": "ray", "ray": options}, "rollout": rollout})
        events: list[Event] = []
        made.append(Cluster(config, num_learners=0))
        return ReplicaSampler(made[-1], config, events.append, make), events

    yield sampler
    for connection in made:
        connection.close()


def same(found, expected) -> bool:
    return all(
        np.array_equal(one.token_ids, other.token_ids)
        for one, other in zip(found, expected, strict=True)
    )


def test_one_replica_writes_in_lockstep_what_its_sampler_writes_here(start, toy):
    asked = requests(6)
    expected = write_replies(toy.ToySampler(load_config({})), asked, PARAMS)
    sampler, _ = start(1, toy.ToySampler)
    assert sampler.stream(PARAMS).is_lockstep
    assert same(write_replies(sampler, asked, PARAMS), expected)


def test_requests_go_to_the_least_busy_replica_and_sessions_stay(start, toy):
    sampler, _ = start(2, toy.ToySampler)
    asked = requests(5)
    with closing(sampler.stream(PARAMS)) as stream:
        assert not stream.is_lockstep
        for request in asked:
            stream.submit(request)
        assert sorted(seat.load for seat in sampler.seats) == [2, 3]
        homes = {r.session: seat.number for seat in sampler.seats for r in seat.outbox}
        found = {}
        while len(found) < 5:
            found.update(stream.poll())
        for request in asked:
            more = request.prompt.then(found[request.session].token_ids, np.arange(5, 9))
            stream.submit(Request(session=request.session, prompt=more, seed=7))
        again = {r.session: seat.number for seat in sampler.seats for r in seat.outbox}
    assert again == homes


class Noting(Stream):
    """A stream that knows which sessions have ended, and writes it instead of replies."""

    is_lockstep = False

    def __init__(self) -> None:
        self.ended, self.asked = [], []

    def submit(self, request: Request) -> None:
        self.asked.append(request.session)

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        asked, self.asked = self.asked, []
        ids = np.array(self.ended, dtype=np.int64)
        reply = Completion(
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )
        return [(session, reply) for session in asked]

    def end(self, sessions: Sequence[int]) -> None:
        self.ended += sessions

    def close(self) -> None:
        pass


class NotingSampler:
    version = 0

    def __init__(self, _config) -> None:
        pass

    def stream(self, _params) -> Noting:
        return Noting()


def test_the_replica_of_a_session_hears_that_it_has_ended(start):
    sampler, _ = start(2, NotingSampler)
    first, second, third, fourth = requests(4)
    with closing(sampler.stream(PARAMS)) as stream:
        found = {}
        for request in (first, second):  # one for each replica
            stream.submit(request)
        while len(found) < 2:
            found.update(stream.poll())
        stream.end([first.session])
        for request in (third, fourth):
            stream.submit(request)
        while len(found) < 4:
            found.update(stream.poll())
    known = [found[request.session].token_ids.tolist() for request in (third, fourth)]
    assert sorted(known) == [[], [first.session]]


def test_replies_of_a_killed_replica_are_written_again_elsewhere(start, toy):
    asked = requests(8)
    expected = write_replies(toy.ToySampler(load_config({})), asked, PARAMS)
    sampler, events = start(2, toy.ToySampler)
    with closing(sampler.stream(PARAMS)) as stream:
        for request in asked:
            stream.submit(request)
        os.kill(sampler.seats[0].about.pid, signal.SIGKILL)
        found = {}
        while len(found) < 8:
            found.update(stream.poll())
    assert same([found[r.session] for r in asked], expected)
    assert events[0].kind == "replica_lost"
    assert events[0].figures["replies_again"] == 4
    while len(sampler.up) < 2:
        sampler.look_after(wait_s=0.5)
    assert events[-1].kind == "replica_back"
    assert events[-1].figures["seconds"] > 0.0


def test_the_only_replica_is_waited_for_and_has_the_newest_weights_again(start, toy):
    from moored.engine.ray.weights import pack_weights

    sampler, events = start(1, toy.ToySampler)
    weights = [("weight", np.array([0.25]))]
    sampler.publish(sampler._ray.put(pack_weights(weights)), 3)
    asked = requests(2)
    own = toy.ToySampler(load_config({}))
    own.load_weights(weights, 3)
    expected = write_replies(own, asked, PARAMS)
    os.kill(sampler.seats[0].about.pid, signal.SIGKILL)
    found = write_replies(sampler, asked, PARAMS)
    assert same(found, expected)
    assert [reply.policy_version for reply in found] == [3, 3]
    assert [event.kind for event in events] == ["replica_lost", "replica_back"]


def losing(toy, flag: Path, *, times: int) -> MakeSampler:
    """A sampler that loses a process of its own in its first calls, also as another actor."""

    def make(config):
        sampler = toy.ToySampler(config)
        write = sampler.generate

        def generate(requests, params):
            done = len(list(flag.iterdir()))
            if done < times:
                (flag / str(done)).touch()
                raise WorkerLost("a part of the model died")
            return write(requests, params)

        sampler.generate = generate
        return sampler

    return make


def test_a_replica_whose_sampler_lost_a_process_is_replaced(start, toy, tmp_path):
    asked = requests(3)
    expected = write_replies(toy.ToySampler(load_config({})), asked, PARAMS)
    sampler, events = start(1, losing(toy, tmp_path, times=1))
    assert same(write_replies(sampler, asked, PARAMS), expected)
    assert [event.kind for event in events] == ["replica_lost", "replica_back"]


def test_replicas_that_die_over_every_reply_end_the_run(start, toy, tmp_path, monkeypatch):
    monkeypatch.setattr("moored.engine.ray.replicas.MAX_LOSSES", 2)
    sampler, _ = start(1, losing(toy, tmp_path, times=99))
    with pytest.raises(MooredError, match=r"^sampler replicas died 2 times in a row without"):
        write_replies(sampler, requests(1), PARAMS)


def test_a_replica_that_joins_under_auto_is_used(start, toy, ray_cluster):
    sampler, events = start("auto", toy.ToySampler)
    assert 1 <= len(sampler.up) <= 4
    node = ray_cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    try:
        # Two nodes with 2 CPUs each, and the new one.
        while len(sampler.up) < 5:
            sampler.grow()
            sampler.look_after(wait_s=0.2)
        assert {event.kind for event in events} == {"replica_joined"}
        assert node.node_id in {seat.about.node for seat in sampler.seats if seat.about}
        with closing(sampler.stream(PARAMS)) as stream:
            for request in requests(10):
                stream.submit(request)
            assert [seat.load for seat in sampler.seats] == [2] * 5
    finally:
        ray_cluster.remove_node(node)


class Sending:
    """A learner in threads of this process, as rank 0 of a team is an actor."""

    def __init__(self, weight: float) -> None:
        from moored.engine.ray.circle import Sender

        self.sender = Sender("127.0.0.1")
        self.weight = weight
        self.meetings: list[Meeting] = []

    def meeting_place(self) -> tuple[str, int]:
        return self.sender.address

    def send_weights(self, meeting: Meeting, receiving: Sequence[Any]) -> bool:
        self.meetings.append(meeting)
        check = partial(ray_team._check_receiving, receiving)
        return self.sender.send(meeting, [("weight", np.array([self.weight]))], check)


def written_with(toy, weight: float, asked: list[Request]):
    own = toy.ToySampler(load_config({}))
    own.load_weights([("weight", np.array([weight]))], 0)
    return write_replies(own, asked, PARAMS)


def test_weights_that_the_learner_sends_are_those_of_all_replicas(start, toy):
    sampler, events = start(2, toy.ToySampler)
    learner, asked = Sending(0.25), requests(4)
    sampler.publish_direct(learner, 3)
    found = write_replies(sampler, asked, PARAMS)
    assert same(found, written_with(toy, 0.25, asked))
    assert {reply.policy_version for reply in found} == {3}
    learner.weight = 0.75
    sampler.publish_direct(learner, 4)
    assert same(write_replies(sampler, asked, PARAMS), written_with(toy, 0.75, asked))
    first, second = learner.meetings
    assert (first.circle, first.size) == (second.circle, 3), "connections are used again"
    assert not events


def test_a_replica_that_died_unseen_costs_the_others_nothing(start, toy):
    sampler, events = start(2, toy.ToySampler)
    learner, asked = Sending(0.25), requests(4)
    sampler.publish_direct(learner, 3)
    dead, alive = (seat.about.pid for seat in sampler.seats)
    os.kill(dead, signal.SIGKILL)
    sampler.publish_direct(learner, 4)
    assert alive in {seat.about.pid for seat in sampler.up}, "it was not started again"
    assert same(write_replies(sampler, asked, PARAMS), written_with(toy, 0.25, asked))
    while not any(seat.is_waiting for seat in sampler.seats):
        sampler.look_after(wait_s=0.5)
    sampler.publish_direct(learner, 5)
    assert len(sampler.up) == 2
    assert [event.kind for event in events] == ["replica_lost", "replica_back"]


def test_a_replica_that_was_started_again_unseen_costs_the_others_nothing(start, toy):
    sampler, events = start(2, toy.ToySampler)
    learner, asked = Sending(0.25), requests(4)
    sampler.publish_direct(learner, 3)
    (dead, alive), new = (seat.about.pid for seat in sampler.seats), None
    os.kill(dead, signal.SIGKILL)
    while new in (None, dead):
        with suppress(sampler._ray.exceptions.RayActorError):
            new = sampler._ray.get(sampler.seats[0].actor.about.remote()).pid
    sampler.publish_direct(learner, 4)
    assert [seat.about.pid for seat in sampler.up] == [new, alive]
    assert same(write_replies(sampler, asked, PARAMS), written_with(toy, 0.25, asked))
    assert not events


def test_a_replica_that_is_stopped_over_weights_of_the_store_is_started_anew(
    start, toy, monkeypatch
):
    from moored.engine.ray.weights import pack_weights

    sampler, events = start(2, toy.ToySampler)
    stopped = sampler.seats[0].about.pid
    monkeypatch.setattr(ray_replicas, "HANG_TIMES", 3.0 / sampler._options.patience_s)
    os.kill(stopped, signal.SIGSTOP)
    sampler.publish(sampler._ray.put(pack_weights([("weight", np.array([0.25]))])), 3)
    assert stopped not in {seat.about.pid for seat in sampler.up}
    asked = requests(4)
    assert same(write_replies(sampler, asked, PARAMS), written_with(toy, 0.25, asked))
    while len(sampler.up) < 2:
        sampler.look_after(wait_s=0.5)
    assert [event.kind for event in events] == ["replica_lost", "replica_back"]


def test_replies_of_a_replica_that_is_stopped_are_written_elsewhere(start, toy, monkeypatch):
    asked = requests(8)
    expected = write_replies(toy.ToySampler(load_config({})), asked, PARAMS)
    sampler, events = start(2, toy.ToySampler)
    monkeypatch.setattr(ray_replicas, "HANG_TIMES", 3.0 / sampler._options.patience_s)
    stopped = sampler.seats[0].about.pid
    os.kill(stopped, signal.SIGSTOP)
    assert same(write_replies(sampler, asked, PARAMS), expected)
    assert events[0].kind == "replica_lost"
    assert events[0].figures["replies_again"] == 4
    while len(sampler.up) < 2:
        sampler.look_after(wait_s=0.5)
    assert stopped not in {seat.about.pid for seat in sampler.up}


@pytest.fixture
def alone(monkeypatch):
    """A sampler of one replica that waits for weights; its clock goes on by 100 s at each look."""
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(ray_replicas, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    sampler = object.__new__(ReplicaSampler)
    sampler._options = SimpleNamespace(patience_s=150.0)  # pyright: ignore
    sampler._source = Sending(0.25)
    sampler.seats = [Seat(0, "actor", is_waiting=True)]
    return sampler


def test_replicas_that_hang_are_started_anew(alone):
    sampler, ended = alone, []
    sampler._ray = SimpleNamespace(kill=lambda actor, no_restart: ended.append(actor))
    quick, hung = (Seat(number, f"actor {number}", loading=number) for number in range(2))

    def look_after(wait_s: float) -> None:
        quick.loading = None
        if ended:
            hung.loading = "the next call"

    sampler.look_after = look_after
    sampler._wait_until_done([quick, hung], 150.0)
    assert ended == ["actor 1"]


def test_time_that_weights_took_to_fail_is_not_taken_from_replicas(alone, monkeypatch):
    sent, (seat,) = [], alone.seats

    def send(source) -> None:
        sent.append(source)
        seat.is_up = len(sent) == 3

    monkeypatch.setattr(alone, "_send", send)
    alone._wait_for_one(may_send=True)
    assert len(sent) == 3


def test_replicas_that_never_take_over_weights_end_the_run(alone, monkeypatch):
    sent = []
    monkeypatch.setattr(alone, "_send", sent.append)
    with pytest.raises(MooredError, match=r"^no sampler replica got the weights in 5 times; "):
        alone._wait_for_one(may_send=True)
    assert len(sent) == 5


def test_the_only_replica_gets_its_weights_again_from_the_learner(start, toy):
    sampler, events = start(1, toy.ToySampler)
    learner, asked = Sending(0.25), requests(2)
    sampler.publish_direct(learner, 3)
    os.kill(sampler.seats[0].about.pid, signal.SIGKILL)
    assert same(write_replies(sampler, asked, PARAMS), written_with(toy, 0.25, asked))
    assert [event.kind for event in events] == ["replica_lost", "replica_back"]


def test_beside_an_update_nobody_sends_weights_again(start, toy):
    sampler, _ = start(1, toy.ToySampler, max_lag=1)
    sampler.publish_direct(Sending(0.25), 3)
    os.kill(sampler.seats[0].about.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="all sampler replicas were lost during an update"):
        write_replies(sampler, requests(2), PARAMS)


def dying(toy, flag: Path) -> MakeSampler:
    """A sampler that dies once, over the first weights that come."""

    def make(config):
        sampler = toy.ToySampler(config)
        load = sampler.load_weights

        def load_weights(weights, version):
            next(iter(weights))
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            load([("weight", np.array([0.25]))], version)

        sampler.load_weights = load_weights
        return sampler

    return make


def test_a_replica_that_dies_while_weights_come_is_started_again(start, toy, tmp_path):
    sampler, events = start(2, dying(toy, tmp_path / "flag"))
    learner, asked = Sending(0.25), requests(4)
    sampler.publish_direct(learner, 3)
    assert same(write_replies(sampler, asked, PARAMS), written_with(toy, 0.25, asked))
    assert "replica_lost" in {event.kind for event in events}
