"""How to divide the GPUs of a cluster between samplers and learners, and what a step then takes.

Three layouts are compared on the same GPUs. *Together* (`engine.kind=torchrun`): every GPU has a
sampler with whole weights and a rank of the learner, which work in turn. *Apart*
(`engine.kind=ray`): some GPUs sample, the others learn, in turn or, with one step of lag, at the
same time. Of every layout the split with the shortest step is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from moored.config import Config
from moored.models.shapes import ModelShape
from moored.plan.cluster_work import ClusterWork, Route
from moored.plan.coefficients import MEASURED, Coefficients
from moored.plan.gpus import GIB, Gpu
from moored.plan.layouts import (
    IN_TURN,
    LAYOUTS,
    OVERLAPPED,
    TOGETHER,
    ClusterPlan,
    Layout,
)
from moored.plan.links import Cluster, make_cluster
from moored.plan.memory import ALONE_SHARE
from moored.plan.seconds import Lengths, longest_lengths
from moored.plan.setup import setup_of
from moored.plan.sharded import LearnerMemory, SamplerMemory
from moored.plan.splits import (
    check_split,
    is_open,
    learners_that_fit,
    most_replicas,
    possible_learners,
    possible_ways,
    sampler_apart,
    shared_sampler,
)


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
    check_split(setup, cluster, samplers, ways)
    lengths = lengths or longest_lengths(config)
    search = _Search(ClusterWork(setup, cluster, given, lengths), given, config.engine.ray.publish)
    found = search.apart(samplers, ways)
    layouts: dict[str, Layout] = {}
    misfits: dict[str, str] = {}
    may_share = is_open(samplers, ways)
    is_shared = cluster.num_gpus <= setup.num_groups
    together = search.together() if may_share and is_shared else None
    for name in LAYOUTS:
        tried = [layout for layout in [*found, together] if layout and layout.name == name]
        fitting = [layout for layout in tried if search.misfit(layout) is None]
        if fitting:
            layouts[name] = min(fitting, key=lambda layout: layout.step_s)
        elif tried:
            least = min(tried, key=search.over)
            misfits[name] = search.misfit(least) or ""
        elif name == TOGETHER and may_share:
            misfits[name] = (
                f"{cluster.num_gpus} ranks share {setup.num_groups} groups, so some would have "
                f"none; set rollout.num_groups={cluster.num_gpus} or more"
            )
    return ClusterPlan(
        config=config,
        cluster=cluster,
        setup=setup,
        lengths=lengths,
        layouts=layouts,
        misfits=misfits,
        samplers=samplers,
        ways=ways,
    )


class _Search:
    """Layouts of one configuration on one cluster."""

    def __init__(self, work: ClusterWork, given: Coefficients, route: Route) -> None:
        self.work, self.given = work, given
        self.route: Route = route
        self.setup, self.cluster = work.setup, work.cluster
        self._learners_alone: dict[int, LearnerMemory] = {}
        """Of every number of ranks: they do not depend on the tensor parallelism of samplers."""

    def together(self) -> Layout:
        """Every GPU has both."""
        setup, num = self.setup, self._num_gpus
        sampler = shared_sampler(setup, self.cluster.gpu, self.given, num)
        publish = self.work.publish_in_place(num)
        learner = best_batch(self.work, self.given, num, sampler)
        return self._layout(TOGETHER, num, num, 1, 0, learner, sampler, publish)

    @property
    def _num_gpus(self) -> int:
        return self.cluster.num_gpus

    def apart(self, samplers: int | None, ways: int | None) -> list[Layout]:
        """Every split, with the least tensor parallelism that lets one fit."""
        found: list[Layout] = []
        for own_ways in possible_ways(self.setup, self.cluster, ways):
            tried = list(self._splits(samplers, own_ways))
            found += tried
            if any(self.misfit(layout) is None for layout in tried):
                break
        return found

    def _splits(self, samplers: int | None, ways: int) -> Iterator[Layout]:
        """Splits into learners and replicas that stay within a node."""
        for learners in possible_learners(self.setup, self.cluster, samplers):
            replicas = most_replicas(self.setup, self.cluster, learners, ways)
            if replicas:
                yield from self._split(learners, replicas, ways)

    def _split(self, learners: int, replicas: int, ways: int) -> Iterator[Layout]:
        learner = self._learner(learners)
        sampler = sampler_apart(self.setup, self.cluster.gpu, self.given, replicas, ways)
        publish = self.work.publish(learners, replicas, ways, self.route)
        idle = self._num_gpus - learners - replicas * ways
        for name in (IN_TURN, OVERLAPPED):
            yield self._layout(name, learners, replicas, ways, idle, learner, sampler, publish)

    def _learner(self, ranks: int) -> LearnerMemory:
        if ranks not in self._learners_alone:
            self._learners_alone[ranks] = best_batch(self.work, self.given, ranks)
        return self._learners_alone[ranks]

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
        is_vllm = ways > 1 or not self.setup.has_fast_sampler
        update = work.update(learners, learner)
        decode = work.decode(replicas, sampler.rows, ways, is_vllm=is_vllm)
        seconds = {
            "prefill": work.prefill(replicas, ways),
            "decode": decode,
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
            is_vllm=ways > 1 or self.setup.vllm_share > 0.0,
            route=self.route,
        )

    def over(self, layout: Layout) -> int:
        """Bytes by which the fuller GPU of a layout is too small; at most 0 where it fits."""
        sampler = layout.sampler
        over = layout.learner.peak_bytes - self.cluster.gpu.memory_bytes
        return max(over, sampler.peak_bytes - sampler.room_bytes)

    def misfit(self, layout: Layout) -> str | None:
        """What does not fit and by how much; None where all does."""
        if self.over(layout) <= 0:
            return None
        has, needs = self.cluster.gpu.memory_bytes, layout.learner.peak_bytes
        sampler = layout.sampler
        whose = f"a learner of {layout.learners}"
        if sampler.peak_bytes - sampler.room_bytes > needs - has:
            whose, needs, has = (
                f"a sampler GPU of {layout.ways}",
                sampler.peak_bytes,
                sampler.room_bytes,
            )
        if layout.name == TOGETHER:
            whose = "a GPU with learner and whole sampler"
        where = ""
        if has < self.cluster.gpu.memory_bytes:
            where = f" that engine.vllm.memory_share={self._vllm_share(layout):g} leaves"
        return f"{whose} needs {needs / GIB:.1f} of {has / GIB:.1f} GiB{where}"

    def _vllm_share(self, layout: Layout) -> float:
        return self.setup.vllm_share if layout.name == TOGETHER else ALONE_SHARE


def best_batch(
    work: ClusterWork, given: Coefficients, ranks: int, beside: SamplerMemory | None = None
) -> LearnerMemory:
    """The micro-batch with the shortest updates of those that fit, `beside` a sampler or alone."""
    choices = learners_that_fit(work.setup, work.cluster.gpu, given, ranks, beside)
    return min(choices, key=lambda memory: work.update(ranks, memory).seconds)


def choose_rank_batch(
    shape: ModelShape,
    config: Config,
    gpu: Gpu,
    ranks: int,
    *,
    has_sampler: bool,
    given: Coefficients = MEASURED,
) -> tuple[int, bool]:
    """Tokens of a rank's micro-batch and whether to compute activations twice, as for one GPU.

    Where the GPU's rates are unknown the largest size, and checkpointing only when none fits
    without. `has_sampler`: a sampler is on the same GPU.
    """
    setup = setup_of(config, shape)
    beside = shared_sampler(setup, gpu, given, ranks) if has_sampler else None
    if gpu.tflops is None or gpu.bandwidth_tbs is None:
        found = learners_that_fit(setup, gpu, given, ranks, beside)[0]
    else:
        work = ClusterWork(setup, make_cluster(gpu, ranks), given, longest_lengths(config))
        found = best_batch(work, given, ranks, beside)
    return found.micro_batch_tokens, found.checkpointing
