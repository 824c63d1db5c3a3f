"""Layouts of a cluster: who samples, who learns, what both need and take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from moored.config import Config
from moored.plan.cluster_work import Route, Update
from moored.plan.gpus import GIB
from moored.plan.links import Cluster
from moored.plan.memory import ALONE_SHARE
from moored.plan.seconds import Lengths
from moored.plan.setup import Setup
from moored.plan.sharded import LearnerMemory, SamplerMemory

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
    is_vllm: bool
    """vLLM samples."""
    route: Route

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

    @property
    def options(self) -> dict[str, object]:
        """What makes a configuration run like this."""
        if self.name == TOGETHER:
            places: dict[str, object] = {"engine.kind": "torchrun", "rollout.max_lag": 0}
        else:
            places = {
                "engine.kind": "ray",
                "engine.ray.learners": self.learners,
                "engine.ray.replicas": self.replicas,
                "engine.ray.publish": self.route,
                "rollout.max_lag": int(self.name == OVERLAPPED),
            }
        if self.is_vllm:
            places |= {"engine.sampler": "vllm", "engine.vllm.tensor_parallel": self.ways}
        if self.is_vllm and self.name != TOGETHER:
            places["engine.vllm.memory_share"] = ALONE_SHARE
        return {
            **places,
            "engine.micro_batch_tokens": self.learner.micro_batch_tokens,
            "engine.gradient_checkpointing": self.learner.checkpointing,
        }

    def record(self) -> dict[str, object]:
        """For JSON; memory in GiB."""
        return {
            "options": self.options,
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
    samplers: int | None = None
    """GPUs for samplers, where they were given."""
    ways: int | None = None
    """Tensor parallelism, where it was given."""

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
