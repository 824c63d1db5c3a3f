"""How ranks meet, and how they part when there is nothing to compute."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from moored.engine.workers import lines
from moored.engine.workers.ranks import Rank


def rank(number: int, size: int = 3) -> Rank:
    return Rank(rank=number, size=size, local_rank=number, local_size=size)


@pytest.fixture
def store(monkeypatch) -> HashStore:
    """The store of all ranks, which would be gone with the driver."""
    shared = HashStore()
    monkeypatch.setattr(lines, "_open_store", lambda rank: shared)
    monkeypatch.setattr(lines, "_met", set())
    return shared


def test_a_driver_that_lets_followers_go_stays_until_each_has_heard_it(store):
    driver = threading.Thread(target=lines.meet, args=(rank(0), lines.LEAVE))
    driver.start()
    assert lines.meet(rank(2)) is False
    driver.join(0.2)
    assert driver.is_alive()  # rank 1 has not read it yet
    assert lines.meet(rank(1)) is False
    driver.join()


def test_a_follower_that_never_leaves_does_not_keep_the_driver(store, monkeypatch):
    monkeypatch.setattr(lines, "FAREWELL", timedelta(milliseconds=50))
    assert lines.meet(rank(0), lines.LEAVE) is False
