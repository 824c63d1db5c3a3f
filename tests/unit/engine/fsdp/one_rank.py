"""One rank of a learner in a process of its own; prints what it found as JSON.

python tests/unit/engine/fsdp/one_rank.py MODEL RANK SIZE STORE OPTION …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moored.config import load_config
from moored.engine.fsdp.trained import whole
from moored.engine.lora import add_lora, plain_weights
from moored.engine.ray.worker import LearnerWorker
from moored.engine.workers.ranks import Rank
from moored.models.load import load_model

MIB = 2**20


def main(model: str, rank: int, size: int, store: str, options: list[str]) -> dict[str, object]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    given = {"model": model, "env": "bandit", "engine": {"device": "cpu"}}
    config = load_config(given, ["algorithm.name=ppo", "algorithm.kl_coef=0.1", *options])
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    worker = LearnerWorker(config, Rank(rank=rank, size=size))
    peak = memory("VmHWM") - before
    found = worker.plain_logprobs(np.array([1, 2, 3]), np.array([4, 5]), False)
    return {"peak_mib": peak, "off": furthest(worker, config), "logprobs": found.tolist()}


def memory(kind: str) -> float:
    """A line of this process's status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024 / MIB
    raise ValueError(kind)


def furthest(worker: LearnerWorker, config) -> float:
    """Largest difference of policy, critic and reference from a model that was loaded whole."""
    plain = add_lora(load_model(config.model, torch.device("cpu")).model, config)
    wanted = dict(plain_weights(plain))
    learner, critic, off = worker.learner, worker.learner.critic, 0.0
    assert critic is not None
    modules = [(learner.model, ""), (critic.trunk, "model."), (learner.reference, "")]
    for module, start in modules:
        for name, weight in plain_weights(module):
            found = whole(weight).to(torch.float32)
            off = max(off, float((found - wanted[start + name]).abs().max()))
    adapters = {name: weight for name, weight in plain.named_parameters() if ".lora_" in name}
    for name, weight in adapters.items():
        found = whole(learner.model.get_parameter(name).detach())
        off = max(off, float((found - weight).abs().max()))
    return max(off, *(float(whole(w).abs().max()) for w in critic.head.parameters()))


if __name__ == "__main__":
    name, rank, size, store, *rest = sys.argv[1:]
    print(json.dumps(main(name, int(rank), int(size), store, rest)))
