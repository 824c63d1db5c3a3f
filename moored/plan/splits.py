"""How the GPUs of a cluster can be divided between samplers and learners, and whether any way fits.

Which way is fastest is found in `moored.plan.cluster`.
"""

from __future__ import annotations

from bisect import bisect_left

from moored.errors import MooredError
from moored.plan.coefficients import MEASURED, Coefficients
from moored.plan.gpus import Gpu
from moored.plan.links import Cluster
from moored.plan.memory import ALONE_SHARE
from moored.plan.setup import Setup
from moored.plan.sharded import (
    LearnerMemory,
    SamplerMemory,
    learner_choices,
    resident_bytes,
    sampler_bytes_kept,
    sampler_memory,
)

WAYS = (1, 2, 4, 8, 16)
"""Tensor parallelism to choose from."""
MOST_NODE_COUNTS = 2048
"""Numbers of learners' nodes to choose from, about: 16,384 GPUs in nodes of 8 have as many."""


def check_split(setup: Setup, cluster: Cluster, samplers: int | None, ways: int | None) -> None:
    """Refuse what is not planned for a cluster, and splits that it does not allow."""
    _check_setup(setup)
    if samplers is not None:
        _check_samplers(setup, cluster, samplers)
    if ways is not None and (ways < 1 or setup.shape.heads % ways):
        raise MooredError(
            f"--tensor-parallel must divide the {setup.shape.heads} heads of the model, got {ways}"
        )
    if ways is not None and ways > cluster.gpus_per_node:
        raise MooredError(
            f"--tensor-parallel {ways} is more than the {cluster.gpus_per_node} GPUs of a node, "
            f"and a replica stays within one; raise --gpus-per-node or lower it"
        )
    if samplers is None or ways is None:
        return
    if not most_replicas(setup, cluster, cluster.num_gpus - samplers, ways):
        raise MooredError(
            f"--tensor-parallel {ways} needs {ways} GPUs of one node for a sampler, and --samplers "
            f"{samplers} leaves no node with that many; raise --samplers or lower --tensor-parallel"
        )


def _check_setup(setup: Setup) -> None:
    if setup.states_on_host or setup.optimizer != "adamw":
        raise MooredError(
            "optimizer.states=host and optimizer.kind=adamw_8bit are for one GPU; leave them out, "
            "because several GPUs share the states"
        )
    if not setup.bf16:
        raise MooredError(
            "engine.dtype=float32 is not planned for a cluster, because the rates of GPUs are "
            "those of bfloat16; leave it out"
        )
    if setup.has_server:
        raise MooredError(
            "engine.vllm.server is for one GPU; leave it out, because on several every rank and "
            "replica has a vLLM of its own, in its process"
        )


def _check_samplers(setup: Setup, cluster: Cluster, samplers: int) -> None:
    if cluster.num_gpus == 1:
        raise MooredError(
            "--samplers divides GPUs between samplers and learners, and there is one only; leave "
            "it out, or raise --gpus"
        )
    learners = cluster.num_gpus - samplers
    if samplers < 1 or learners < 1:
        raise MooredError(
            f"--samplers must leave GPUs to learners: from 1 to {cluster.num_gpus - 1}, "
            f"got {samplers}"
        )
    if learners > setup.num_groups:
        raise MooredError(
            f"{learners} learners share {setup.num_groups} groups, so some would have none; raise "
            f"--samplers or rollout.num_groups"
        )


def possible_ways(setup: Setup, cluster: Cluster, ways: int | None) -> list[int]:
    """Tensor parallelism that the heads of the model and a node allow, or what was given."""
    tried = WAYS if ways is None else (ways,)
    return [n for n in tried if n <= cluster.gpus_per_node and setup.shape.heads % n == 0]


def possible_learners(setup: Setup, cluster: Cluster, samplers: int | None) -> list[int]:
    """Parts of a node, or whole nodes, of very many several at a time; every rank has a group."""
    if samplers is not None:
        return [cluster.num_gpus - samplers]
    node, most = cluster.gpus_per_node, min(cluster.num_gpus - 1, setup.num_groups)
    together = node * max(1, -(-most // (node * MOST_NODE_COUNTS)))
    return [*range(1, min(together, most) + 1), *range(2 * together, most + 1, together)]


def most_replicas(setup: Setup, cluster: Cluster, learners: int, ways: int) -> int:
    """Of samplers on what so many learners leave; each has an episode to write."""
    node = cluster.gpus_per_node
    full, rest = divmod(cluster.num_gpus, node)
    taken, part = divmod(learners, node)
    # Learners fill the first nodes; a replica stays within one of those that they leave.
    if taken == full:
        free = (rest - part) // ways
    else:
        free = (node - part) // ways + (full - taken - 1) * (node // ways) + rest // ways
    return min(free, setup.num_episodes)


def shared_sampler(setup: Setup, gpu: Gpu, given: Coefficients, ranks: int) -> SamplerMemory:
    """The sampler on the GPU of each of so many learners."""
    kept = resident_bytes(setup, given.memory, ranks)
    rows = -(-setup.num_episodes // ranks)
    return sampler_memory(
        setup,
        gpu,
        given.memory,
        ways=1,
        wanted_rows=rows,
        learner_bytes=kept,
        vllm_share=setup.vllm_share,
    )


def sampler_apart(
    setup: Setup, gpu: Gpu, given: Coefficients, replicas: int, ways: int
) -> SamplerMemory:
    """A GPU of one of so many replicas, which have theirs to themselves."""
    rows = -(-setup.num_episodes // replicas)
    share = ALONE_SHARE if ways > 1 or setup.vllm_share else 0.0
    return sampler_memory(setup, gpu, given.memory, ways=ways, wanted_rows=rows, vllm_share=share)


def learners_that_fit(
    setup: Setup, gpu: Gpu, given: Coefficients, ranks: int, beside: SamplerMemory | None = None
) -> list[LearnerMemory]:
    """Micro-batches that fit a rank, `beside` a sampler or alone; the smallest where none does."""
    kept = 0
    if beside is not None:
        kept = sampler_bytes_kept(setup, gpu, given.memory, beside.parts["keys and values"])
    return learner_choices(setup, gpu, given.memory, ranks=ranks, sampler_bytes=kept)


def any_fits(
    setup: Setup,
    cluster: Cluster,
    *,
    samplers: int | None = None,
    ways: int | None = None,
    given: Coefficients = MEASURED,
) -> bool:
    """Whether any layout fits, by memory alone: in milliseconds what comparing all of them says.

    A rank needs less the more there are, and so does a replica. Of all splits that the learners fit
    in, that with the fewest leaves most to the samplers, and is the only one to look at.
    """
    check_split(setup, cluster, samplers, ways)
    if is_open(samplers, ways) and cluster.num_gpus <= setup.num_groups:
        sampler = shared_sampler(setup, cluster.gpu, given, cluster.num_gpus)
        if sampler.fits and _learner_fits(setup, cluster, given, cluster.num_gpus, sampler):
            return True
    learners = possible_learners(setup, cluster, samplers)
    first = bisect_left(learners, True, key=lambda n: _learner_fits(setup, cluster, given, n))
    if first == len(learners):
        return False
    for own_ways in possible_ways(setup, cluster, ways):
        replicas = most_replicas(setup, cluster, learners[first], own_ways)
        if replicas and sampler_apart(setup, cluster.gpu, given, replicas, own_ways).fits:
            return True
    return False


def is_open(samplers: int | None, ways: int | None) -> bool:
    """Nothing was asked for that keeps samplers off the learners' GPUs."""
    return samplers is None and ways in (None, 1)


def _learner_fits(
    setup: Setup,
    cluster: Cluster,
    given: Coefficients,
    ranks: int,
    beside: SamplerMemory | None = None,
) -> bool:
    choices = learners_that_fit(setup, cluster.gpu, given, ranks, beside)
    return choices[0].peak_bytes <= cluster.gpu.memory_bytes
