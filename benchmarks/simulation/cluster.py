"""Real rollouts over Ray replicas that wait, to compare simulated calls with.

The driver, its stream and the calls are those of `engine.kind=ray`; samplers and environments only
sleep (`real.py`). No model is loaded in a replica.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulation.model import Scenario
from simulation.real import RealRollouts, WaitingSampler

from moored.cli.options import read_config
from moored.config import Config
from moored.engine.ray.cluster import Cluster
from moored.engine.ray.replicas import ReplicaSampler
from moored.types import Completion


class OwnWaitingSampler(WaitingSampler):
    """With weights of its own, of which there are none."""

    version = 0

    def load_weights(self, weights: object, version: int) -> None:
        self.version = version


def make_sampler(given: Scenario, reply: Completion, config: Config) -> OwnWaitingSampler:
    """The sampler of a replica; its lengths are its own."""
    return OwnWaitingSampler(given, reply, os.getpid())


@contextmanager
def replicas(real: RealRollouts, given: Scenario) -> Iterator[ReplicaSampler]:
    """A cluster on this machine for as long as it is needed."""
    folder = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, sys.path)])
    options = [f"engine.ray.replicas={given.replicas}", "engine.ray.cpus=0.1"]
    config = read_config(["model=nano", "engine.device=cpu", "engine.kind=ray", *options])
    cluster = Cluster(config, num_learners=0)
    try:
        make = functools.partial(make_sampler, given, real.reply)
        yield ReplicaSampler(cluster, config, lambda event: None, make)
    finally:
        cluster.close()


def measure(real: RealRollouts, given: Scenario, num_repeats: int) -> list[float]:
    """Seconds of each rollout."""
    with replicas(real, given) as sampler:
        found = [real.seconds_with(sampler, given, seed) for seed in range(num_repeats + 1)]
    time.sleep(0.5)
    return found[1:]
