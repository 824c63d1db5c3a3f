"""How to divide the GPUs of a cluster between samplers and learners, and what a step then takes.

Three layouts are compared on the same GPUs. *Together* (`engine.kind=torchrun`): every GPU has a
sampler with whole weights and a rank of the learner, which work in turn. *Apart*
(`engine.kind=ray`): some GPUs sample, the others learn, in turn or, with one step of lag, at the
same time. Of every layout the split with the shortest step is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moored.config import Config
from moored.errors import MooredError
from moored.plan.advice import LORA_RANK, with_options
from moored.plan.cluster_work import ClusterWork, Update
from moored.plan.coefficients import MEASURED, Coefficients
from moored.plan.gpus import GIB
from moored.plan.links import Cluster
from moored.plan.seconds import Lengths, longest_lengths
from moored.plan.setup import Setup, setup_of
from moored.plan.shapes import ModelShape
from moored.plan.sharded import (
    LearnerMemory,
    SamplerMemory,
    learner_memory,
    resident_bytes,
    sampler_memory,
)

TOGETHER, IN_TURN, OVERLAPPED = "together", "apart, in turn", "apart, max_lag 1"
LAYOUTS = (TOGETHER, IN_TURN, OVERLAPPED)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One division of the GPUs, with what it needs and takes."""

    name: str
    learners: int
    replicas: int
    ways: int
    """GPUs of a replica: its tensor parallelism."""
    idle: int
    """GPUs that no whole replica fits on."""
    learner: LearnerMemory
    sampler: SamplerMemory
    seconds: Mapping[str, float]
    """By phase."""
    update: Update
    tokens: int
    """That samplers write in a step."""

    @property
    def rollout_s(self) -> float:
        """One driver hands on all turns while samplers write."""
        return max(self.seconds["prefill"] + self.seconds["decode"], self.seconds["driver"])

    @property
    def learn_s(self) -> float:
        return self.seconds["advantages"] + self.seconds["update"]

    @property
    def step_s(self) -> float:
        if self.name == OVERLAPPED:
            return max(self.rollout_s, self.learn_s) + self.seconds["publish"]
        return self.rollout_s + self.learn_s + self.seconds["publish"]

    @property
    def tokens_per_s(self) -> float:
        """Of all samplers while they write."""
        return self.tokens / self.rollout_s

    @property
    def bound(self) -> str:
        """The part of a step that takes longest."""
        parts = {
            "prefill": self.seconds["prefill"],
            "decode": self.seconds["decode"],
            "driver": self.seconds["driver"],
            "advantages": self.seconds["advantages"],
            "update": self.seconds["update"],
            "publish": self.seconds["publish"],
        }
        if self.update.links_s > self.update.compute_s:
            parts["links of the update"] = parts.pop("update")
        return max(parts, key=lambda part: parts[part])

    def record(self) -> dict[str, object]:
        """For JSON; memory in GiB."""
        return {
            "learners": self.learners,
            "replicas": self.replicas,
            "tensor_parallel": self.ways,
            "idle_gpus": self.idle,
            "rows_at_a_time": self.sampler.rows,
            "micro_batch_tokens": self.learner.micro_batch_tokens,
            "gradient_checkpointing": self.learner.checkpointing,
            "learner_gib": _gib(self.learner.peak),
            "sampler_gib": _gib(self.sampler.parts),
            "seconds": {name: round(s, 4) for name, s in self.seconds.items()},
            "update_compute_s": round(self.update.compute_s, 4),
            "update_links_s": round(self.update.links_s, 4),
            "rollout_s": round(self.rollout_s, 4),
            "step_s": round(self.step_s, 4),
            "generated_tokens_per_s": round(self.tokens_per_s),
            "bound": self.bound,
        }


def _gib(parts: Mapping[str, int]) -> dict[str, float]:
    return {part: round(size / GIB, 3) for part, size in parts.items()}


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The best split of every layout that fits."""

    config: Config
    cluster: Cluster
    setup: Setup
    lengths: Lengths
    layouts: Mapping[str, Layout]
    misfits: Mapping[str, str]
    """Why a layout does not fit, by its name."""

    @property
    def fits(self) -> bool:
        return bool(self.layouts)

    @cached_property
    def best(self) -> Layout:
        """The shortest step."""
        return min(self.layouts.values(), key=lambda layout: layout.step_s)

    def record(self) -> dict[str, object]:
        """For JSON."""
        cluster, lengths = self.cluster, self.lengths
        return {
            "model": self.config.model,
            "num_parameters": self.setup.shape.num_parameters,
            "gpu": cluster.gpu.name,
            "gpus": cluster.num_gpus,
            "gpus_per_node": cluster.gpus_per_node,
            "node_gb_s": cluster.node_gbs,
            "network_gbit_s": cluster.network_gbits,
            "episodes": self.setup.num_episodes,
            "trajectory_tokens": lengths.trajectory,
            "turns": lengths.turns,
            "fits": self.fits,
            "best": self.best.name if self.fits else None,
            "layouts": {name: layout.record() for name, layout in self.layouts.items()},
            "misfits": dict(self.misfits),
        }


def plan_cluster(
    config: Config,
    shape: ModelShape,
    cluster: Cluster,
    lengths: Lengths | None = None,
    *,
    samplers: int | None = None,
    ways: int | None = None,
    given: Coefficients = MEASURED,
) -> ClusterPlan:
    """Compare layouts; `samplers` GPUs and `ways` of tensor parallelism may be given."""
    setup = setup_of(config, shape)
    _check(setup, cluster, samplers, ways)
    lengths = lengths or longest_lengths(config)
    search = _Search(setup, cluster, given, ClusterWork(setup, cluster, given, lengths))
    found = list(search.apart(samplers, ways))
    layouts: dict[str, Layout] = {}
    misfits: dict[str, str] = {}
    together = search.together() if samplers is None and ways in (None, 1) else None
    for name in LAYOUTS:
        tried = [layout for layout in [*found, together] if layout and layout.name == name]
        fitting = [layout for layout in tried if search.misfit(layout) is None]
        if fitting:
            layouts[name] = min(fitting, key=lambda layout: layout.step_s)
        elif tried:
            least = min(tried, key=search.over)
            misfits[name] = search.misfit(least) or ""
    return ClusterPlan(
        config=config,
        cluster=cluster,
        setup=setup,
        lengths=lengths,
        layouts=layouts,
        misfits=misfits,
    )


def _check(setup: Setup, cluster: Cluster, samplers: int | None, ways: int | None) -> None:
    if setup.states_on_host:
        raise MooredError(
            "optimizer.states=host is planned for one GPU only; several GPUs share the states"
        )
    if ways is not None and (ways < 1 or setup.shape.heads % ways):
        raise MooredError(
            f"--tensor-parallel must divide the {setup.shape.heads} heads of the model, got {ways}"
        )
    if ways is not None and ways > cluster.gpus_per_node:
        raise MooredError(
            f"--tensor-parallel {ways} is more than the {cluster.gpus_per_node} GPUs of a node, "
            f"and a replica stays within one; raise --gpus-per-node or lower it"
        )
    if samplers is not None and not 1 <= samplers < cluster.num_gpus:
        raise MooredError(
            f"--samplers must leave GPUs to learners: from 1 to {cluster.num_gpus - 1}, "
            f"got {samplers}"
        )


class _Search:
    """Layouts of one configuration on one cluster."""

    def __init__(
        self, setup: Setup, cluster: Cluster, given: Coefficients, work: ClusterWork
    ) -> None:
        self.setup, self.cluster, self.given, self.work = work.setup, cluster, given, work
        self.has_fast_sampler = setup.has_fast_sampler

    def together(self) -> Layout:
        """Every GPU has both, and the sampler's weights stay during updates."""
        setup, gpu, memory, num = self.setup, self.cluster.gpu, self.given.memory, self._num_gpus
        weights = setup.element_bytes * setup.shape.num_parameters
        learner = learner_memory(setup, gpu, memory, ranks=num, sampler_bytes=weights)
        kept = resident_bytes(setup, memory, num)
        rows = -(-setup.num_episodes // num)
        sampler = sampler_memory(setup, gpu, memory, ways=1, wanted_rows=rows, learner_bytes=kept)
        publish = self.work.publish_in_place(num)
        return self._layout(TOGETHER, num, num, 1, 0, learner, sampler, publish)

    @property
    def _num_gpus(self) -> int:
        return self.cluster.num_gpus

    def apart(self, samplers: int | None, ways: int | None) -> Iterator[Layout]:
        """Every split into learners and replicas that stay within a node."""
        all_ways = [1, 2, 4, 8, 16] if ways is None else [ways]
        for own_ways in all_ways:
            if own_ways > self.cluster.gpus_per_node or self.setup.shape.heads % own_ways:
                continue
            for learners in self._learners(samplers):
                free = _free_gpus(self.cluster, learners)
                replicas = sum(size // own_ways for size in free)
                replicas = min(replicas, self.setup.num_episodes)
                if replicas:
                    yield from self._split(learners, replicas, own_ways)

    def _learners(self, samplers: int | None) -> list[int]:
        """Parts of a node, or whole nodes."""
        if samplers is not None:
            return [self._num_gpus - samplers]
        node = self.cluster.gpus_per_node
        return [n for n in range(1, self._num_gpus) if n <= node or n % node == 0]

    def _split(self, learners: int, replicas: int, ways: int) -> Iterator[Layout]:
        setup, gpu, memory = self.setup, self.cluster.gpu, self.given.memory
        learner = learner_memory(setup, gpu, memory, ranks=learners)
        rows = -(-setup.num_episodes // replicas)
        sampler = sampler_memory(setup, gpu, memory, ways=ways, wanted_rows=rows)
        publish = self.work.publish(learners, replicas, ways)
        idle = self._num_gpus - learners - replicas * ways
        for name in (IN_TURN, OVERLAPPED):
            yield self._layout(name, learners, replicas, ways, idle, learner, sampler, publish)

    def _layout(
        self,
        name: str,
        learners: int,
        replicas: int,
        ways: int,
        idle: int,
        learner: LearnerMemory,
        sampler: SamplerMemory,
        publish: float,
    ) -> Layout:
        work, lengths = self.work, self.work.lengths
        is_vllm = ways > 1 or not self.has_fast_sampler
        update = work.update(learners, learner)
        seconds = {
            "prefill": work.prefill(replicas, ways),
            "decode": work.decode(replicas, sampler.rows, ways, is_vllm=is_vllm),
            "driver": work.driver(),
            "advantages": work.advantages(learners, learner),
            "update": update.seconds,
            "publish": publish,
        }
        return Layout(
            name=name,
            learners=learners,
            replicas=replicas,
            ways=ways,
            idle=idle,
            learner=learner,
            sampler=sampler,
            seconds=seconds,
            update=update,
            tokens=self.setup.num_episodes * lengths.turns * lengths.reply,
        )

    def over(self, layout: Layout) -> int:
        """Bytes by which the fuller GPU of a layout is too small; at most 0 where it fits."""
        peak = max(layout.learner.peak_bytes, layout.sampler.peak_bytes)
        return peak - self.cluster.gpu.memory_bytes

    def misfit(self, layout: Layout) -> str | None:
        """What does not fit and by how much; None where all does."""
        has = self.cluster.gpu.memory_bytes
        needs = {
            f"a learner of {layout.learners}": layout.learner.peak_bytes,
            f"a sampler GPU of {layout.ways}": layout.sampler.peak_bytes,
        }
        if layout.name == TOGETHER:
            needs = {"a GPU with learner and whole sampler": max(needs.values())}
        worst = max(needs, key=lambda part: needs[part])
        if needs[worst] <= has:
            return None
        return f"{worst} needs {needs[worst] / GIB:.1f} of {has / GIB:.1f} GiB"


def _free_gpus(cluster: Cluster, learners: int) -> list[int]:
    """GPUs that learners leave in each node; learners fill the first nodes."""
    free = []
    for size in cluster.node_sizes():
        taken = min(size, learners)
        learners -= taken
        free.append(size - taken)
    return free


MOST_GPUS = 1024
"""How far `smallest_cluster` looks."""


def smallest_cluster(found: ClusterPlan, given: Coefficients = MEASURED) -> int | None:
    """GPUs of the smallest cluster of the same kind that fits; whole nodes beyond the first."""
    node = found.cluster.gpus_per_node
    sizes = [*range(1, node + 1), *range(2 * node, MOST_GPUS + 1, node)]
    for num_gpus in sizes:
        if num_gpus <= found.cluster.num_gpus:
            continue
        larger = replace(found.cluster, num_gpus=num_gpus)
        shape = found.setup.shape
        if plan_cluster(found.config, shape, larger, found.lengths, given=given).fits:
            return num_gpus
    return None


def cluster_remedy(found: ClusterPlan) -> str:
    """What to do about a cluster on which nothing fits; each piece was planned again and fits."""
    num_gpus = smallest_cluster(found)
    pieces = [] if num_gpus is None else [f"give it {num_gpus} GPUs (--gpus {num_gpus})"]
    if not found.setup.lora_rank:
        adapters = with_options(found.config, {"optimizer.lora_rank": LORA_RANK})
        if plan_cluster(adapters, found.setup.shape, found.cluster, found.lengths).fits:
            pieces.append(f"set optimizer.lora_rank={LORA_RANK} (only adapters are trained)")
    if pieces:
        return ", or ".join(pieces)
    return "neither more GPUs of this kind nor adapters help; take a smaller model or larger GPUs"
