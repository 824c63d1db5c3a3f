"""A Ray engine whose sampler and learner compute with numpy and take as long as they are told.

`engine.kind=toy_cluster:ToyEngine`, with this folder on the path, runs `moored train` with real
actors, real weights in the object store and real checkpoints, without torch in any of them: they
start in a moment, and can be killed often. A reply depends on weights, prompt and seed, and the
weights on every token of every update: whatever is lost, doubled or late changes the metrics.

Seconds come from the environment: `TOY_REPLY_S` for a batch of replies, `TOY_UPDATE_S` for an
update.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moored.config import Config
from moored.engine.base import LockstepStream, Request, SamplingParams
from moored.engine.ray.engine import Parts, RayEngine
from moored.engine.workers.ranks import Rank
from moored.models.load import load_tokenizer
from moored.rollout.render import Renderer
from moored.training.samples import LossSample, Sample
from moored.types import Completion, FinishReason, ScoreRequest

NUM_WORDS = 9
"""Token ids of the toy model of the tests."""
LOGP = -float(np.log(NUM_WORDS))
FIRST_WEIGHT = 0.5
VARIABLES = ("TOY_REPLY_S", "TOY_UPDATE_S")


class ToySampler:
    """Every token is equally likely; which one comes depends on weights, prompt and seed."""

    def __init__(self, config: Config, *, wait_s: float = 0.0) -> None:
        self.version = 0
        self._weight = FIRST_WEIGHT
        self._wait_s = wait_s

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self._weight = float(dict(weights)["weight"][0])
        self.version = version

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        time.sleep(self._wait_s)
        return [self._reply(request, params) for request in requests]

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Nothing is kept."""

    def _reply(self, request: Request, params: SamplingParams) -> Completion:
        key = [request.seed, int(self._weight * 1e6), int(request.prompt.ids.sum())]
        ids = np.random.default_rng(key).integers(0, NUM_WORDS, params.max_tokens)
        logprobs = np.full(len(ids), LOGP, dtype=np.float32)
        return Completion(ids, logprobs, FinishReason.LENGTH, self.version)


class ToyWorker:
    """One rank, whose only weight is a checksum of all updates."""

    def __init__(self, *, wait_s: float) -> None:
        self.version, self.weight = 0, FIRST_WEIGHT
        self._wait_s = wait_s

    def weights(self) -> Iterable[tuple[str, np.ndarray]]:
        yield "weight", np.array([self.weight])

    def describe(self) -> str:
        return "a toy"

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [[np.full(len(ids), LOGP) for ids in r.continuations] for r in requests]

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.zeros(len(sample.ids_T) + 1) for sample in samples]

    def damaged_weights(self) -> list[str]:
        return []

    def step(
        self, minibatches: Sequence[Sequence[LossSample]], lr_factor: float
    ) -> tuple[list[Mapping[str, float]], int]:
        found = []
        for samples in minibatches:
            time.sleep(self._wait_s)
            total = sum(float(s.sample.ids_T.sum()) + float(s.advantages_T.sum()) for s in samples)
            self.weight = float((self.weight * 7.13 + total) % 1.0)
            self.version += 1
            found.append({"policy_loss": self.weight})
        return found, self.version

    def save(self, folder: Path) -> None:
        state = {"version": self.version, "weight": self.weight}
        (folder / "toy.json").write_text(json.dumps(state))

    def load(self, folder: Path, policy_only: bool) -> int:
        state = json.loads((folder / "toy.json").read_text())
        self.version, self.weight = state["version"], state["weight"]
        return self.version

    def export(self, folder: Path) -> None:
        self.save(folder)


def make_worker(
    config: Config, rank: Rank, address: tuple[str, int], *, trains: bool, wait_s: float
) -> ToyWorker:
    return ToyWorker(wait_s=wait_s)


class ToyEngine(RayEngine):
    """Ranks of one learner would have to agree on the checksum: use one."""

    def __init__(self, config: Config, *, trains: bool) -> None:
        reply_s, update_s = (float(os.environ.get(name, "0")) for name in VARIABLES)
        parts = Parts(
            make_sampler=partial(ToySampler, wait_s=reply_s),
            make_worker=partial(make_worker, wait_s=update_s),
        )
        super().__init__(config, trains=trains, parts=parts)

    @property
    def renderer(self) -> Renderer:
        """Of the model's tokenizer; there is no model that it would have to fit."""
        if self._renderer is None:
            self._renderer = Renderer(load_tokenizer(self._config.model))
        return self._renderer

    def check(self) -> None:
        """There is no model to compare with."""

    def describe(self) -> str:
        return f"a toy, {self.describe_places()}"
