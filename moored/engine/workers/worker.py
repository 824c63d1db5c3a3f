"""What one rank does: holds its shard of policy, critic and reference, and a sampler of its own.

Every method is called on all ranks at once, because most are collectives. Anything that crosses the
seam can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moored.config import Config
from moored.engine.base import ModelSampler, Request, SamplingParams, Stream
from moored.engine.device import pick_device, uses_bf16
from moored.engine.fast.sampler import SlotSampler
from moored.engine.fsdp.export import plain_twin
from moored.engine.fsdp.learner import ShardedLearner
from moored.engine.fsdp.load import load_empty
from moored.engine.gpu import fit_to_gpu
from moored.engine.local.engine import describe_model, eos_ids
from moored.engine.local.parking import is_large
from moored.engine.local.state import save_plain, save_tokenizer
from moored.engine.lora import add_lora, plain_model
from moored.engine.passes import says_out_of_memory
from moored.engine.samplers import make_sampler
from moored.engine.workers.ranks import Rank, check_gpus, ranks_text
from moored.models.lengths import exact_limit, position_limit, sliding_window, usual_length
from moored.models.load import load_tokenizer
from moored.training.algorithms import load_algorithm
from moored.training.samples import LossSample, Sample
from moored.types import Completion, ScoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a driver needs to know of its workers."""

    description: str
    model_type: str
    vocabulary: int
    eos_ids: tuple[int, ...]
    max_positions: int | None
    exact_limit: int | None
    position_limit: int | None
    sliding_window: int | None
    bf16: bool
    streams: bool
    """Samplers write replies as a stream instead of in lockstep."""


class RankWorker:
    """One rank of a team. The default process group has to be there."""

    has_sampler = True
    """False where replies are written elsewhere."""

    def __init__(self, config: Config, rank: Rank, *, trains: bool = True) -> None:
        self.rank = rank
        device = pick_device(rank_device(config, rank))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Its collectives wait for no device.
        counts = dist.new_group(backend="gloo")
        assert isinstance(counts, dist.ProcessGroup)
        mesh = init_device_mesh(device.type, (rank.size,))
        bf16 = uses_bf16(config.engine.dtype, device)
        empty = load_empty(config.model, counts, exact=not bf16)
        if trains:
            config = fit_to_gpu(
                config,
                empty.model.config.to_dict(),
                ranks=rank.size,
                has_sampler=self.has_sampler,
            )
        self._config = config
        # Rank 0 gives it to the driver, and writes it beside weights.
        self._tokenizer = load_tokenizer(config.model) if rank.rank == 0 else None
        model: Any = add_lora(empty.model, config)
        self._model = plain_model(model)
        self._generation = self._model.generation_config
        algorithm = load_algorithm(config.algorithm)
        self.learner = ShardedLearner(
            model,
            config,
            mesh=mesh,
            counts=counts,
            weights=empty.weights,
            with_critic=algorithm.needs_critic,
            loss=algorithm.loss,
            trains=trains,
        )
        self.info = _describe(model, config, bf16, rank.size)
        self._streams: dict[int, Stream] = {}
        self._sampler: Any = self._make_sampler() if trains and self.has_sampler else None
        if isinstance(self._sampler, SlotSampler) and is_large(self._model):
            self.learner.before_updates = self._sampler.release

    def _make_sampler(self) -> ModelSampler:
        """A sampler with a copy of the weights, which it is given one tensor at a time."""
        return make_sampler(self._model, self._config, weights=self.learner.weights())

    def describe(self) -> WorkerInfo:
        return self.info

    def tokenizer(self) -> Any:
        """From rank 0; None from the others."""
        return self._tokenizer

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return self.learner.score(requests)

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self.learner.values(samples)

    def damaged_weights(self) -> list[str]:
        return self.learner.damaged_weights()

    def step(
        self, minibatches: Sequence[Sequence[LossSample]], lr_factor: float
    ) -> tuple[list[Mapping[str, float]], int]:
        """This rank's part of each update; the figures, up to one that is not finite, and how many
        updates there were in all."""
        found: list[Mapping[str, float]] = []
        for stats in self.learner.step(minibatches, lr_factor=lr_factor):
            found.append(stats)
            if not all(map(math.isfinite, stats.values())):
                break
        return found, self.learner.version

    def save(self, folder: Path) -> None:
        self.learner.save(folder)

    def load(self, folder: Path, policy_only: bool) -> int:
        self.learner.load(folder, policy_only=policy_only)
        return self.learner.version

    def publish(self) -> None:
        """Whole weights, one tensor at a time, into the copy that the sampler writes with."""
        self.sampler.load_weights(self.learner.weights(), self.learner.version)

    @property
    def sampler(self) -> Any:
        """Where nothing is trained, made on first use: it holds a copy of the weights."""
        if self._sampler is None:
            self._sampler = self._make_sampler()
        return self._sampler

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        sampler = self.sampler
        return sampler.generate(requests, params) if requests else []

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.sampler.end_sessions(sessions)

    def open_stream(self, number: int, params: SamplingParams) -> None:
        self._streams[number] = self.sampler.stream(params)

    def poll_stream(
        self, requests: Sequence[Request], ended: Sequence[int], number: int, wait_s: float
    ) -> list[tuple[int, Completion]]:
        stream = self._streams[number]
        stream.end(ended)
        for request in requests:
            stream.submit(request)
        return stream.poll(wait_s)

    def close_stream(self, number: int) -> None:
        self._streams.pop(number).close()

    @says_out_of_memory("the check of the model")
    @torch.no_grad()
    def plain_logprobs(self, prompt_ids: np.ndarray, ids: np.ndarray, bf16: bool) -> np.ndarray:
        """Log-probabilities of `ids` by the model's own forward pass."""
        whole = torch.from_numpy(np.concatenate([prompt_ids, ids])).to(self.learner.device)
        logits = self.learner.plain_logits(whole, bf16=bf16)[len(prompt_ids) - 1 : -1]
        logp = torch.log_softmax(logits / self._config.rollout.temperature, dim=-1)
        return logp.gather(-1, whole[len(prompt_ids) :, None]).squeeze(-1).cpu().numpy()

    def export(self, folder: Path) -> None:
        """Write the policy and its tokenizer in Hugging Face format, by rank 0."""
        dtype = torch.bfloat16 if self.info.bf16 else torch.float32
        weights, keeps = self.learner.exact_weights(), self.rank.rank == 0
        twin = plain_twin(self._model, weights, dtype, torch.device("cpu"), keeps=keeps)
        if twin is not None:
            twin.generation_config = self._generation
            save_plain(twin, folder)
            assert self._tokenizer is not None
            save_tokenizer(self._tokenizer, folder)


def _describe(model: Any, config: Config, bf16: bool, size: int) -> WorkerInfo:
    """Of a model that was divided among ranks."""
    return WorkerInfo(
        description=f"{describe_model(model, config, bf16)}, {ranks_text(size)}",
        model_type=model.config.model_type,
        vocabulary=model.get_input_embeddings().num_embeddings,
        eos_ids=eos_ids(model),
        max_positions=usual_length(model.config),
        exact_limit=exact_limit(model.config),
        position_limit=position_limit(model.config),
        sliding_window=sliding_window(model.config),
        bf16=bf16,
        streams=next(model.parameters()).is_cuda,
    )


def rank_device(config: Config, rank: Rank) -> str:
    """The device of a rank; raises when it is not there."""
    return check_gpus(rank, config.engine.device, torch.cuda.device_count())
