"""Two updates of one rank in a process of its own; prints what they came to as JSON.

python tests/unit/engine/fsdp/one_update.py RANK SIZE STORE WEIGHTS GRADIENTS OPTION …

WEIGHTS and GRADIENTS say what is held whole: 0, 1, or in bytes the memory of this rank (`512B`).
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moored.engine.fsdp import learner as learner_file
from moored.engine.fsdp.learner import ShardedLearner
from moored.engine.fsdp.trained import whole
from moored.engine.fsdp.whole import Whole
from tests.unit.engine.fsdp.tiny import own_samples, prepare, trained_numbers


def main(rank: int, size: int, store: str, held: list[str], options: list[str]) -> object:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if held[0].endswith("B"):
        learner_file._memory_bytes = lambda device, ranks: int(held[rank].removesuffix("B"))
    else:
        given = Whole(weights=held[0] == "1", gradients=held[1] == "1")
        learner_file.held_whole = lambda *sizes, **more: given
    model, config = prepare(*options)
    counts = dist.new_group(backend="gloo")
    assert isinstance(counts, dist.ProcessGroup)
    mesh = init_device_mesh("cpu", (size,))
    learner = ShardedLearner(model, config, mesh=mesh, counts=counts, with_critic=True)
    stats = [list(learner.step([own_samples(rank, size)])) for _ in range(2)]
    parts = len(learner._sharded[learner.model].parts)
    return {"stats": stats, "weights": trained_numbers(learner, whole), "parts": parts}


if __name__ == "__main__":
    own, size, store, *rest = sys.argv[1:]
    print(json.dumps(main(int(own), int(size), store, rest[:2], rest[2:])))
