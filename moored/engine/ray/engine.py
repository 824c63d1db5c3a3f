"""The engine of a cluster: one driver; sampler replicas, learner ranks and, where asked for,
environments as Ray actors.

The driver holds no weights. At `publish` they go from the learner's rank 0 to every replica,
through the object store or straight. All nodes must see the run directory and the model under the
same paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moored.config import Config
from moored.engine.base import Event
from moored.engine.check import PlainModel, check_engine, check_positions, check_window
from moored.engine.ray.cluster import Cluster, counted
from moored.engine.ray.env_pool import ActorPool
from moored.engine.ray.replica import MakeSampler, make_sampler
from moored.engine.ray.replicas import ReplicaSampler
from moored.engine.ray.team import MakeWorker, RayTeam
from moored.engine.workers.learner import TeamLearner
from moored.engine.workers.ranks import check_ranks
from moored.errors import require_packages
from moored.rollout.pool import EnvCalls, thread_pool
from moored.rollout.render import Renderer

if TYPE_CHECKING:
    from moored.engine.workers.worker import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What actors are made of; simulations bring their own."""

    make_sampler: MakeSampler = make_sampler
    make_worker: MakeWorker


class RayLearner(TeamLearner):
    """A team's learner whose ranks can be started again."""

    def __init__(self, team: RayTeam) -> None:
        super().__init__(team)
        self.team = team

    def restart(self) -> None:
        self.team.restart()
        self._version = 0


class RayEngine:
    """Sampler and learner on a cluster."""

    def __init__(self, config: Config, *, trains: bool = True, parts: Parts | None = None) -> None:
        check_ranks(config, config.engine.ray.learners, trains=trains)
        if config.engine.sampler == "vllm":
            require_packages("engine.sampler=vllm", ("vllm",))
        self._config = config
        self._renderer: Renderer | None = None
        self.on_event: Callable[[Event], None] = _ignore
        self._sampler: ReplicaSampler | None = None
        self._pool: ActorPool | None = None
        options = config.engine.ray
        num_env_actors = options.env_actors if trains else 0
        self._cluster = Cluster(
            config, num_learners=options.learners, num_env_actors=num_env_actors
        )
        try:
            self._start(parts or _own_parts(), trains=trains)
        except BaseException:
            self.close()
            raise

    def _start(self, parts: Parts, *, trains: bool) -> None:
        team = RayTeam(self._cluster, self._config, parts.make_worker, trains=trains)
        self.scorer = self.learner = RayLearner(team)
        self._sampler = ReplicaSampler(
            self._cluster, self._config, lambda event: self.on_event(event), parts.make_sampler
        )
        team.make_room = self._sampler.shrink
        if trains and self._config.engine.ray.env_actors:
            self._pool = ActorPool(self._cluster, self._config, lambda event: self.on_event(event))

    def make_pool(self) -> EnvCalls[Any]:
        return self._pool or thread_pool(self._config.rollout)

    @property
    def sampler(self) -> ReplicaSampler:
        assert self._sampler is not None
        return self._sampler

    @property
    def renderer(self) -> Renderer:
        if self._renderer is None:
            from moored.models.load import load_tokenizer

            tokenizer = load_tokenizer(self._config.model)
            info = self._info()
            self._renderer = Renderer(tokenizer, vocabulary=info.vocabulary, eos_ids=info.eos_ids)
        return self._renderer

    def describe(self) -> str:
        return f"{self._info().description}, {self.describe_places()}"

    def _info(self) -> WorkerInfo:
        return self.learner.team.call("describe")[0]

    def describe_places(self) -> str:
        nodes = sum(node["Alive"] for node in self._cluster.ray.nodes())
        parts = [counted(len(self.sampler.seats), "sampler replica")]
        if self._pool is not None:
            parts.append(counted(len(self._pool.actors), "environment actor"))
        return f"{' and '.join(parts)} on {counted(nodes, 'Ray node')}"

    def check(self) -> None:
        info = self._info()
        rollout = self._config.rollout
        check_window(info.model_type, info.sliding_window, rollout.max_context)
        check_positions(info.model_type, info.position_limit, rollout.max_context)
        plain = PlainModel(
            kind=f"models of type {info.model_type!r}",
            logprobs=self._plain_logprobs,
            bf16=info.bf16,
        )
        check_engine(self, plain, rollout.temperature)

    def _plain_logprobs(self, prompt_ids: np.ndarray, ids: np.ndarray, bf16: bool) -> np.ndarray:
        return self.learner.team.call("plain_logprobs", None, prompt_ids, ids, bf16)[0]

    def publish(self) -> None:
        team, version = self.learner.team, self.learner.version
        if self._config.engine.ray.publish == "direct":
            self.sampler.publish_direct(team, version)
        else:
            self.sampler.publish(team.put_weights(), version)

    def export(self, folder: Path) -> None:
        self.learner.team.call("export", None, folder)

    def restart_learner(self) -> None:
        """All ranks anew; they hold the shards of one model, so none can go on alone."""
        self.on_event(
            Event(
                kind="learner_lost", text="a learner rank is lost; starting all again", figures={}
            )
        )
        self.learner.restart()

    def close(self) -> None:
        """Leave the cluster; Ray ends what this driver started."""
        try:
            if self._pool is not None:
                self._pool.close()
        finally:
            self._cluster.close()


def _own_parts() -> Parts:
    # Only now: it imports torch.
    from moored.engine.ray.worker import make_worker

    return Parts(make_worker=make_worker)


def _ignore(event: Event) -> None:
    """Until a run listens."""
