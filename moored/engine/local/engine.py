"""The engine of one process: a Hugging Face model, trained and sampled on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moored.config import Config
from moored.engine.base import Event, ModelSampler
from moored.engine.check import (
    PlainModel,
    check_engine,
    check_positions,
    check_scores,
    check_window,
)
from moored.engine.device import pick_device, uses_bf16
from moored.engine.fast.sampler import SlotSampler
from moored.engine.gpu import fit_to_gpu
from moored.engine.local.learner import LocalLearner
from moored.engine.local.optimizers import check_optimizer
from moored.engine.local.parking import is_large
from moored.engine.local.state import save_tokenizer
from moored.engine.lora import add_lora, plain_model
from moored.engine.passes import says_out_of_memory
from moored.engine.samplers import make_sampler
from moored.engine.vllm.support import check_vllm
from moored.models.lengths import exact_limit, position_limit, sliding_window, usual_length
from moored.models.load import load_model
from moored.rollout.render import Renderer
from moored.training.algorithms import load_algorithm


class LocalEngine:
    """Sampler and learner over one set of weights."""

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        if trains:
            check_optimizer(config.optimizer)
        if config.engine.sampler == "vllm":
            check_vllm(config)
        device = pick_device(config.engine.device)
        if device.type == "cuda" and device.index is not None:
            # Triton launches kernels on the current GPU, wherever their tensors are.
            torch.cuda.set_device(device)
        loaded = load_model(config.model, device, exact=not uses_bf16(config.engine.dtype, device))
        if trains:
            config = fit_to_gpu(config, loaded.model.config.to_dict())
        self._config = config
        self.model: Any = add_lora(loaded.model, config)
        self.tokenizer = loaded.tokenizer
        if trains:
            algorithm = load_algorithm(config.algorithm)
            self.learner = LocalLearner(
                self.model,
                config,
                with_critic=algorithm.needs_critic,
                loss=algorithm.loss,
            )
        else:
            self.learner = LocalLearner(self.model, config, trains=False)
        self.scorer = self.learner
        self._renderer: Renderer | None = None
        self._sampler: ModelSampler | None = None
        if trains:
            # Before passes are recorded: shared weights move.
            shares = not config.optimizer.lora_rank
            self._sampler = make_sampler(self.model, config, shares=shares)
            if isinstance(self._sampler, SlotSampler) and is_large(self.model):
                self.learner.before_updates = self._sampler.release

    @property
    def on_event(self) -> Callable[[Event], None]:
        return self.learner.on_event

    @on_event.setter
    def on_event(self, note: Callable[[Event], None]) -> None:
        self.learner.on_event = note

    @property
    def renderer(self) -> Renderer:
        """Made on first use: scoring does not need it, nor a chat template."""
        if self._renderer is None:
            self._renderer = Renderer(
                self.tokenizer, vocabulary=self.vocabulary, eos_ids=eos_ids(self.model)
            )
        return self._renderer

    @property
    def sampler(self) -> ModelSampler:
        """Where nothing is trained, made on first use: it holds a copy of the weights."""
        if self._sampler is None:
            self._sampler = make_sampler(self.model, self._config)
        return self._sampler

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return self.model.get_input_embeddings().num_embeddings

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model was made for and is scored exactly, where it says."""
        return usual_length(self.model.config)

    @property
    def exact_limit(self) -> int | None:
        """The same; longer where the model scales its angles, and so reaches beyond."""
        return exact_limit(self.model.config)

    def describe(self) -> str:
        return describe_model(self.model, self._config, self.learner.bf16)

    def check(self) -> None:
        config = self.model.config
        longest = self._config.rollout.max_context
        check_window(config.model_type, sliding_window(config), longest)
        check_positions(config.model_type, position_limit(config), longest)
        check_engine(self, self._plain_model(), self._config.rollout.temperature)

    def check_scores(self) -> None:
        """As `check`, where nothing is written."""
        check_scores(self.scorer, self._plain_model(), self.tokenizer, self.vocabulary)

    def _plain_model(self) -> PlainModel:
        return PlainModel(
            kind=f"models of type {self.model.config.model_type!r}",
            logprobs=self._plain_logprobs,
            bf16=self.learner.bf16,
        )

    @says_out_of_memory("the check of the model")
    @torch.no_grad()
    def _plain_logprobs(self, prompt_ids: np.ndarray, ids: np.ndarray, bf16: bool) -> np.ndarray:
        """Log-probabilities of `ids` by the model's own forward pass."""
        device, temperature = self.learner.device, self._config.rollout.temperature
        whole = torch.from_numpy(np.concatenate([prompt_ids, ids])).to(device)
        exact = nullcontext() if bf16 or not self.learner.bf16 else self.learner.in_float32()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16), exact:
            found = self.model(input_ids=whole[None])
        logits = found.logits[0, len(prompt_ids) - 1 : -1].float()
        logp = torch.log_softmax(logits / temperature, dim=-1)
        return logp.gather(-1, whole[len(prompt_ids) :, None]).squeeze(-1).cpu().numpy()

    def publish(self) -> None:
        self.sampler.load_weights(self.learner.weights(), self.learner.version)

    def export(self, folder: Path) -> None:
        self.learner.export(folder)
        save_tokenizer(self.tokenizer, folder)

    def close(self) -> None:
        """End vLLM where it samples; other memory is freed with the process."""
        close = getattr(self._sampler, "close", None)
        if close is not None:
            close()


def eos_ids(model: Any) -> tuple[int, ...]:
    """Tokens after which a model writes nothing more, as its generation_config.json says."""
    found = plain_model(model).generation_config.eos_token_id
    return tuple(np.atleast_1d([] if found is None else found).tolist())


def describe_model(model: Any, config: Config, bf16: bool) -> str:
    """Its size, where it runs, and in which precision."""
    weights = list(model.parameters())
    size = _size_text(sum(tensor.numel() for tensor in weights))
    trained = sum(tensor.numel() for tensor in weights if tensor.requires_grad)
    lora = f" ({_size_text(trained)} trained)" if config.optimizer.lora_rank else ""
    device = weights[0].device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{size} parameters{lora}, {where}, {'bfloat16' if bf16 else 'float32'}"


def _size_text(count: int) -> str:
    """1.2 million, 7.6 billion."""
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
