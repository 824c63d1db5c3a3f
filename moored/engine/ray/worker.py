"""The worker of one learner rank on a cluster: that of `engine.workers`, without a sampler."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore

from moored.config import Config
from moored.engine.ray.circle import listening_fd
from moored.engine.workers.ranks import Rank
from moored.engine.workers.worker import RankWorker


class LearnerWorker(RankWorker):
    """Replicas write the replies: this one needs no copy of the weights for that."""

    has_sampler = False

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time; a collective each."""
        yield from self.learner.weights()


def make_worker(
    config: Config, rank: Rank, address: tuple[str, int], *, trains: bool
) -> LearnerWorker:
    """Meet the other ranks at an address of rank 0, then build this one's shard."""
    is_cpu = config.engine.device == "cpu"
    is_first = rank.rank == 0
    store = TCPStore(
        *address,
        rank.size,
        is_first,
        timeout=dist.default_pg_timeout,
        master_listen_fd=listening_fd(*address) if is_first else None,
    )
    dist.init_process_group(
        "gloo" if is_cpu else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank.rank,
        world_size=rank.size,
    )
    return LearnerWorker(config, rank, trains=trains)
