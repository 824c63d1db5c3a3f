"""One rank by itself: what it does besides computing."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch.distributed as dist

from moored.config import load_config
from moored.engine.workers import worker as module
from moored.engine.workers.ranks import Rank
from moored.engine.workers.worker import RankWorker


@pytest.fixture
def make(tmp_path):
    """A worker in a process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    config = load_config({"model": "nano", "engine": {"device": "cpu", "kind": "torchrun"}})
    yield lambda: RankWorker(config, Rank(rank=0, size=1, local_rank=0, local_size=1))
    dist.destroy_process_group()


def test_the_sampler_of_a_large_model_makes_room_for_updates(make, monkeypatch):
    assert make().learner.before_updates is None
    monkeypatch.setattr(module, "RELEASED_FROM", 1)
    worker = make()
    assert worker.learner.before_updates == worker.sampler.release
