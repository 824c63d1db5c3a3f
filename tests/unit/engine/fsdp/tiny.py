"""A tiny model and samples for it, which ranks and one process train alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from moored.config import Config, load_config
from moored.engine.local.learner import LocalLearner
from moored.engine.lora import add_lora
from moored.training.samples import LossSample, Sample
from moored.types import Prompt, ScoreRequest
from tests.tiny_model import tiny_model

MICRO = ["engine.micro_batch_tokens=5", "engine.row_tokens=5"]
"""Of tokens: each sample of this file is a micro-batch."""


def make_model(width: int = 16) -> LlamaForCausalLM:
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(vocab_size=11, hidden_size=width, **sizes)


def sample(*ids: int) -> LossSample:
    length = len(ids)
    return LossSample(
        sample=Sample(
            prompt=Prompt(np.array([1, 2])),
            ids_T=np.array(ids),
            loss_mask_T=np.ones(length, dtype=bool),
            old_logprobs_T=np.full(length, -2.0),
            turn_ends_T=np.arange(length) == length - 1,
            rewards_T=np.zeros(length),
            group=0,
            trajectory=0,
        ),
        advantages_T=np.ones(length),
        weights_T=np.full(length, 1.0 / length),
        mean_weights_T=np.full(length, 1.0 / length),
        returns_T=np.ones(length),
        old_values_T=np.zeros(length),
    )


def logprobs(learner: LocalLearner) -> np.ndarray:
    return learner.score([ScoreRequest(Prompt(np.array([1, 2])), [np.array([3, 4, 5])])])[0][0]


def prepare(*options: str) -> tuple[Any, Config]:
    """The model, with adapters where options say so, and a configuration."""
    config = load_config({"env": "bandit"}, ["algorithm.kl_coef=0.1", *MICRO, *options])
    model = make_model()
    torch.manual_seed(1)
    return add_lora(model, config), config


def own_samples(rank: int = 0, size: int = 1) -> list[LossSample]:
    """Five samples in all. Rank 0 has most; of three ranks, the last has none."""
    given = [sample(3, 4), sample(5, 6, 7), sample(8, 9), sample(2, 1), sample(10, 3)]
    if size == 1:
        return given
    return {0: given[:3], 1: given[3:]}.get(rank, [])


def trained_numbers(
    learner: LocalLearner, whole: Callable[[torch.Tensor], torch.Tensor]
) -> list[float]:
    """All trained weights of policy and critic, one after the other."""
    modules = [module for module in (learner.model, learner.critic) if module is not None]
    return [
        number
        for module in modules
        for weight in module.parameters()
        if weight.requires_grad
        for number in whole(weight.detach()).flatten().tolist()
    ]
