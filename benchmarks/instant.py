"""An engine that costs nothing: replies are stored before the run, and the learner does nothing.

`engine.kind=instant:InstantEngine`, with this folder on the path, runs `moored train` with the real
environments, tokenizer, rollouts and logs; what is left of a step's time is the driver's own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

from moored.config import Config
from moored.engine.base import Request, SamplingParams, Stream
from moored.envs.mix import EnvMix
from moored.models.load import load_model
from moored.rollout.render import Renderer
from moored.sft.demonstrations import play
from moored.training.samples import LossSample, Sample
from moored.types import Completion, FinishReason, ScoreRequest

NUM_REPLIES = 2048
MALFORMED_SHARE = 0.05


class InstantStream(Stream):
    """Replies in the order of their requests, at most `per_poll` at a time, at once.

    A sampler on a GPU returns the replies that ended in the last few decoding steps; so episodes
    spread over their turns, and the driver handles small batches.
    """

    is_lockstep = False

    def __init__(self, replies: Sequence[Completion], per_poll: int) -> None:
        self._replies = replies
        self._per_poll = per_poll
        self._waiting: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        num_ready = min(self._per_poll, len(self._waiting))
        requests = [self._waiting.popleft() for _ in range(num_ready)]
        return [(r.session, self._replies[r.seed % len(self._replies)]) for r in requests]

    def close(self) -> None:
        self._waiting.clear()


class InstantSampler:
    """Gives one of many stored replies, chosen by the request's seed."""

    def __init__(self, replies: Sequence[Completion]) -> None:
        self.replies = replies
        self.per_poll = 64

    def stream(self, params: SamplingParams) -> InstantStream:
        return InstantStream(self.replies, self.per_poll)


class InstantLearner:
    """Answers with zeros."""

    version = 0

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [[np.zeros(len(ids)) for ids in request.continuations] for request in requests]

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.zeros(len(sample.ids_T) + 1) for sample in samples]

    def damaged_weights(self) -> list[str]:
        return []

    def step(
        self, minibatches: Iterable[Sequence[LossSample]], *, lr_factor: float = 1.0
    ) -> Iterator[dict[str, float]]:
        for _ in minibatches:
            self.version += 1
            yield {"policy_loss": 0.0}

    def save(self, folder: Path) -> None:
        raise NotImplementedError("this learner has nothing to save; measure without checkpoints")

    def load(self, folder: Path, *, policy_only: bool = False) -> None:
        raise NotImplementedError("this learner has nothing to load")


class InstantEngine:
    """The tokenizer of `config.model`, and stored replies to the environments of `config.env`."""

    def __init__(self, config: Config, *, trains: bool) -> None:
        loaded = load_model(config.model, torch.device("cpu"))
        self.renderer = Renderer(loaded.tokenizer)
        texts = islice(write_replies(EnvMix(config.env)), NUM_REPLIES)
        self.sampler = InstantSampler([_completion(self.renderer, text) for text in texts])
        self.learner = self.scorer = InstantLearner()

    def describe(self) -> str:
        return f"{len(self.sampler.replies)} stored replies"

    def check(self) -> None:
        """There is no model to compare with."""

    def publish(self) -> None:
        """There are no weights."""

    def export(self, folder: Path) -> None:
        raise NotImplementedError("this engine has no policy to export")

    def close(self) -> None:
        """Nothing is held."""


def write_replies(mix: EnvMix) -> Iterator[str]:
    """Replies as a half-trained model writes them: facts, spoilt answers, some malformed."""
    rng, envs = random.Random(0), [make() for make in mix.makers]
    for task_seed in count():
        env = envs[task_seed % len(envs)]
        episode = play(env, task_seed, rng, kind="noised", noise=0.7)
        for message in episode.messages:
            if message.role == "assistant":
                is_malformed = rng.random() < MALFORMED_SHARE
                yield message.text.replace("</think>", "") if is_malformed else message.text


def _completion(renderer: Renderer, text: str) -> Completion:
    ids = renderer.reply_ids(text)
    return Completion(ids, np.full(len(ids), -1.0, dtype=np.float32), FinishReason.STOP)
