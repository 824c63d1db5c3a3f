"""Weights from a learner to replicas over a group of their own; here all are threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore  # pyright: ignore

from moored.engine.ray import circle as circles
from moored.engine.ray.circle import CalledOff, MemberLost, Receiver, Sender
from moored.engine.ray.weights import Meeting

WEIGHTS = [
    ("matrix", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
    ("odd", torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)),
    ("scalar", torch.tensor(7)),
    ("empty", torch.zeros(0, 2)),
    ("turned", torch.arange(6.0).reshape(2, 3).T),
    ("array", np.array([0.25])),
]


@pytest.fixture
def sender() -> Sender:
    return Sender("127.0.0.1")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def meet(sender: Sender, *, size: int, circle: str = "first", number: int = 0) -> Meeting:
    return Meeting(address=sender.address, circle=circle, round=number, size=size, on_gpus=False)


def ask(
    threads: ThreadPoolExecutor, receiver: Receiver, meeting: Meeting, member: int
) -> Future[dict[str, torch.Tensor]]:
    return threads.submit(lambda: dict(receiver.weights(replace(meeting, member=member))))


def check_same(found: dict[str, torch.Tensor], given: list[tuple[str, Any]]) -> None:
    assert list(found) == [name for name, _ in given]
    for name, weight in given:
        expected = torch.as_tensor(weight)
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)


def test_a_store_of_this_machine_alone_listens_nowhere_else(sender: Sender) -> None:
    psutil = pytest.importorskip("psutil")
    found = [
        each.laddr.ip
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == sender.address[1]
    ]
    assert found == ["127.0.0.1"]


def never() -> None:
    """Nobody is lost."""


@pytest.mark.parametrize("piece_bytes", [1, 40, 2**28])
def test_every_replica_gets_every_weight_round_after_round(
    sender, threads, monkeypatch, piece_bytes
):
    monkeypatch.setattr(circles, "PIECE_BYTES", piece_bytes)
    receivers = [Receiver(), Receiver()]
    for number in range(2):
        meeting = meet(sender, size=3, number=number)
        found = [ask(threads, receiver, meeting, i) for i, receiver in enumerate(receivers, 1)]
        given = [(name, weight + number) for name, weight in WEIGHTS]
        assert sender.send(meeting, given, never)
        for one in found:
            check_same(one.result(), given)


def test_a_replica_that_is_lost_before_the_round_calls_it_off_and_the_others_go_on(
    sender, threads, monkeypatch
):
    monkeypatch.setattr(circles, "CHECK_S", 0.0)

    def one_is_lost() -> None:
        raise MemberLost("a replica is lost")

    here = Receiver()
    meeting = meet(sender, size=3)
    waiting = ask(threads, here, meeting, 1)
    weights = iter(WEIGHTS)
    assert not sender.send(meeting, weights, one_is_lost)
    with pytest.raises(CalledOff):
        waiting.result()
    assert len(list(weights)) == len(WEIGHTS), "nothing was gathered for nobody"
    again = meet(sender, size=2, circle="second", number=1)
    found = ask(threads, here, again, 1)
    assert sender.send(again, WEIGHTS, never)
    check_same(found.result(), WEIGHTS)


def test_rounds_of_a_circle_leave_nothing_in_the_store(sender, threads):
    receiver, left = Receiver(), []
    for number in range(3):
        meeting = meet(sender, size=2, number=number)
        found = ask(threads, receiver, meeting, 1)
        assert sender.send(meeting, WEIGHTS, never)
        check_same(found.result(), WEIGHTS)
        left.append(sender._store.num_keys())
    assert left[1:] == left[:1] * 2


def test_a_replica_that_hangs_is_not_waited_for_for_ever(sender, monkeypatch):
    monkeypatch.setattr(circles, "PATIENCE", timedelta(0))
    assert not sender.send(meet(sender, size=2), WEIGHTS, never)


def test_a_replica_that_is_lost_before_it_joins_the_group_is_noticed(sender, monkeypatch):
    monkeypatch.setattr(circles, "CHECK_S", 0.0)
    monkeypatch.setattr(circles, "PATIENCE", timedelta(seconds=5))
    meeting, asked = meet(sender, size=2), []
    PrefixStore(meeting.circle, sender._store).set("0/1", "")

    def one_is_lost() -> None:
        asked.append(0)
        raise MemberLost("a replica is lost")

    assert not sender.send(meeting, WEIGHTS, one_is_lost)
    assert asked, "the sender did not wait for the connection to time out"


def test_a_learner_that_fails_leaves_its_circle(sender, threads):
    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError("out of memory")
        yield

    meeting = meet(sender, size=2)
    found = ask(threads, Receiver(), meeting, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        sender.send(meeting, fail(), never)
    with pytest.raises(MemberLost):
        found.result()


@pytest.mark.parametrize("before", [None, "0"])
def test_groups_raise_their_own_errors_and_the_environment_is_as_it_was(monkeypatch, before):
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with circles._own_errors():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


def test_a_replica_that_is_lost_between_pieces_is_noticed(sender, threads, monkeypatch):
    monkeypatch.setattr(circles, "PIECE_BYTES", 1)
    receiver = Receiver()
    meeting = meet(sender, size=2)

    def take_one() -> None:
        next(receiver.weights(replace(meeting, member=1)))
        # As when its process ends: nothing holds the connections any more.
        receiver._circle = None

    taking = threads.submit(take_one)
    endless = ((f"weight {i}", torch.zeros(2**16)) for i in range(2**20))
    assert not sender.send(meeting, endless, never)
    taking.result()


def test_a_learner_that_is_lost_between_pieces_is_noticed(sender, threads, monkeypatch):
    monkeypatch.setattr(circles, "PIECE_BYTES", 1)
    meeting = meet(sender, size=2)

    def lose_learner() -> Iterator[tuple[str, torch.Tensor]]:
        yield WEIGHTS[0]
        yield WEIGHTS[1]
        raise KeyboardInterrupt

    found = ask(threads, Receiver(), meeting, 1)
    with pytest.raises(KeyboardInterrupt):
        sender.send(meeting, lose_learner(), never)
    sender._circle = None
    with pytest.raises(MemberLost, match=r"^weights did not come through: "):
        found.result()


@pytest.mark.gpu
def test_nccl_takes_what_gloo_takes():
    sender = Sender("127.0.0.1")
    # NCCL refuses two members on one GPU.
    meeting = replace(meet(sender, size=1), on_gpus=True)
    assert sender.send(meeting, WEIGHTS, never)
    assert sender.send(replace(meeting, round=1), WEIGHTS, never)
