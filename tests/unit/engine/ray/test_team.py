"""Learner ranks as actors: what one of them raises while others wait for it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from moored.config import load_config
from moored.engine.ray import team as ray_team
from moored.engine.ray.cluster import Cluster
from moored.engine.ray.team import RankHost, RayTeam
from moored.engine.workers.ranks import Rank
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError

pytest.importorskip("ray")
pytestmark = pytest.mark.cluster


class Uneven:
    """Rank 0 fails in an update; the others wait there for what it does not send."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def step(self) -> None:
        if self._rank == 0:
            raise MooredError("out of memory")
        time.sleep(60)

    def damaged_weights(self) -> list[str]:
        return []

    def weights(self) -> list[tuple[str, np.ndarray]]:
        return []


def make_uneven(config, rank, address, *, trains) -> Uneven:
    return Uneven(rank.rank)


@pytest.fixture
def team(ray_cluster, monkeypatch):
    monkeypatch.setattr(ray_team, "NOTICE_S", 0.1)
    options = {"address": ray_cluster.address, "learners": 2}
    config = load_config({"engine": {"kind": "ray", "device": "cpu", "ray": options}})
    cluster = Cluster(config, num_learners=2)
    yield RayTeam(cluster, config, make_uneven, trains=True)
    cluster.close()


def test_ranks_of_which_one_failed_are_not_asked_again(team):
    with pytest.raises(MooredError, match="out of memory"):
        team.call("step")
    # Rank 1 would answer this after its minute.
    start_s = time.monotonic()
    with pytest.raises(MooredError, match="out of memory"):
        team.call("damaged_weights")
    assert time.monotonic() - start_s < 30
    team.restart()
    assert team.call("damaged_weights") == [[], []]


def test_a_deadline_that_passes_between_two_looks_at_the_clock_is_no_error(monkeypatch):
    clock = iter(range(10))
    monkeypatch.setattr(ray_team, "NOTICE_S", 1.5)
    monkeypatch.setattr(ray_team, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    waits = []

    def wait(calls, timeout):
        assert timeout >= 0, "Ray refuses a negative time"
        waits.append(timeout)
        return [], calls

    team = object.__new__(RayTeam)
    team._ray = SimpleNamespace(wait=wait)
    assert not team._has_lost_one(["call"])
    assert waits == [0.5]


def test_all_ranks_gather_weights_and_rank_0_alone_packs_them():
    gathered = []

    def weights():
        yield "a", np.zeros(2, np.float32)
        gathered.append("a")

    for rank in (0, 1):
        host = RankHost(Rank(rank=rank, size=2))
        host._worker = SimpleNamespace(weights=weights)
        packed = host.packed_weights()[1]
        assert (packed is not None) == (rank == 0)
    assert gathered == ["a", "a"]


def test_all_ranks_gather_weights_that_rank_0_sends_and_also_those_that_nobody_takes():
    for rank, is_sent in ((0, True), (0, False), (1, False)):
        gathered, sent = [], []

        def weights(gathered=gathered):
            for name in "abc":
                gathered.append(name)
                yield name, np.zeros(2, np.float32)

        def send(meeting, weights, check, sent=sent, is_sent=is_sent):
            sent += [name for name, _ in (weights if is_sent else [next(weights)])]
            return is_sent

        host = RankHost(Rank(rank=rank, size=2))
        host._worker = SimpleNamespace(weights=weights)
        if rank == 0:
            host._sender = SimpleNamespace(send=send)  # pyright: ignore[reportAttributeAccessIssue]
        assert host.send_weights(None, []) == is_sent  # pyright: ignore[reportArgumentType]
        assert gathered == ["a", "b", "c"]
        assert sent == {(0, True): ["a", "b", "c"], (0, False): ["a"]}.get((rank, is_sent), [])


def test_a_cluster_that_is_gone_is_told_in_one_sentence():
    def wait(timeout_seconds):
        raise Exception("Placement group 7 does not exist.\nTraceback …")

    team = object.__new__(RayTeam)
    team._group = SimpleNamespace(wait=wait)
    with pytest.raises(MooredError, match=r"is gone \(Placement group 7 does not exist.\); start"):
        team._has_room(0.1)


def test_ranks_that_hang_after_a_replica_was_lost_are_not_waited_for_for_ever(monkeypatch):
    clock, lost = iter(range(0, 1000, 100)), iter([False, True])
    monkeypatch.setattr(ray_team, "STUCK_S", 250)
    monkeypatch.setattr(ray_team, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(ray_team, "_has_failed", lambda calls: next(lost))
    waits = []

    def wait(calls, timeout):
        waits.append(timeout)
        return [], calls

    team = object.__new__(RayTeam)
    team._ray, team._failure, team.size = SimpleNamespace(wait=wait), None, 1
    host = SimpleNamespace(send_weights=SimpleNamespace(remote=lambda *given: "call"))
    team._hosts = [host]
    with pytest.raises(WorkerLost, match="hangs while it sends weights"):
        team.send_weights(None, ["receiving"])  # pyright: ignore[reportArgumentType]
    # Lost at 100 s, and hanging at 200, 300 and 400 s.
    assert len(waits) == 5
