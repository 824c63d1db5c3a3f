"""LoRA: adapters on a model, and the model as if they had always been in its weights.

The learner trains the adapters; a sampler computes with the sums, so that any sampler takes a model
with adapters, and none pays for them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moored.config import Config
from moored.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = ".base_layer."
"""What peft puts into the name of a weight that it wraps."""


def add_lora(model: PreTrainedModel, config: Config) -> nn.Module:
    """The model as the run trains it: with LoRA layers, or as it is."""
    rank = config.optimizer.lora_rank
    if not rank:
        return model
    width = model.config.get_text_config().hidden_size
    if rank > width:
        raise ConfigError(
            f"optimizer.lora_rank = {rank} is more than the width {width} of the model, so "
            f"adapters would be larger than the weights; lower it, or train all weights with 0"
        )
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=rank,
        lora_alpha=config.optimizer.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), _hollow(model), warnings.catch_warnings():
        # PEFT asks transformers by a name that is deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(config.seed)
        return get_peft_model(model, lora)  # pyright: ignore[reportReturnType]


@contextmanager
def _hollow(model: nn.Module) -> Iterator[None]:
    """Let weights on the meta device be on the CPU inside the block, without memory of their own.

    peft puts adapters where the weights they sit on are, and on the meta device they would lose
    the values that they begin with.
    """
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.is_meta
    ]
    hollow = {
        id(weight): nn.Parameter(torch.zeros(1, dtype=weight.dtype).expand(weight.shape))
        for _, _, weight in places
    }
    for module, name, weight in places:
        module._parameters[name] = hollow[id(weight)]
    try:
        yield
    finally:
        for module, name, weight in places:
            weight.requires_grad_(hollow[id(weight)].requires_grad)
            module._parameters[name] = weight


def plain_model(model: Any) -> Any:
    """The Hugging Face model itself, whether adapters sit in it or not."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def make_reference(model: Any) -> Any:
    """The model that the run began with: a copy, or under LoRA the model without its adapters."""
    return model if hasattr(model, "peft_config") else copy.deepcopy(model).eval()


def without_adapters(model: Any) -> AbstractContextManager[None]:
    """The weights that adapters sit on, inside the block; a plain model is as it is."""
    return model.disable_adapter() if hasattr(model, "peft_config") else nullcontext()


@torch.no_grad()
def plain_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as without adapters; those they sit on are summed one at a time."""
    inner = plain_model(model)
    layers = dict(inner.named_modules())
    for name, tensor in inner.state_dict().items():
        if ".lora_" in name:
            continue
        layer, wrapped, _ = name.rpartition(BASE + "weight")
        if wrapped:
            (adapter,) = layers[layer].active_adapters
            tensor = tensor + layers[layer].get_delta_weight(adapter).to(tensor.dtype)
        yield name.replace(BASE, "."), tensor
