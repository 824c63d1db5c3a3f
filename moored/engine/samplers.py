"""What `engine.sampler` names: functions that make a sampler of a Hugging Face model.

Without `weights` the model is the learner's own; with `shares` updates change it in place, so that
a sampler may write with the very tensors. With `weights`, names and whole tensors, a sampler makes
a copy of them, and the model, which may be in shards or empty, gives only the shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from moored.config import Config
from moored.engine.base import ModelSampler
from moored.engine.device import uses_bf16
from moored.engine.fast.decoder import can_decode
from moored.engine.fast.sampler import SlotSampler
from moored.engine.fsdp.export import empty_twin, plain_twin
from moored.engine.local.parking import is_large
from moored.engine.local.precision import remove_float_hook
from moored.engine.local.sampler import LocalSampler
from moored.errors import MooredError
from moored.names import SAMPLERS, sampler_for

Weights = Iterable[tuple[str, torch.Tensor]]


def make_sampler(
    model: Any, config: Config, *, weights: Weights | None = None, shares: bool = False
) -> ModelSampler:
    """The sampler of a run, by the name in its configuration."""
    make = cast(Callable[..., ModelSampler], SAMPLERS.get_object(config.engine.sampler))
    return make(model, config, weights=weights, shares=shares)


def auto(
    model: Any, config: Config, *, weights: Weights | None = None, shares: bool = False
) -> ModelSampler:
    """The fast sampler for models of its shape, the plain one for others."""
    is_fast = sampler_for("auto", is_fast=can_decode(model)) == "fast"
    return (fast if is_fast else plain)(model, config, weights=weights, shares=shares)


def fast(
    model: Any, config: Config, *, weights: Weights | None = None, shares: bool = False
) -> SlotSampler:
    """On slots, for Llama-shaped models."""
    if not can_decode(model):
        raise MooredError(
            f"the fast sampler knows no models of type {model.config.model_type!r} (or not with "
            f"these options); set engine.sampler to auto"
        )
    sampler = SlotSampler(
        model if weights is None else empty_twin(model),
        dtype=_dtype(model, config),
        max_context=config.rollout.max_context,
        shares=shares,
        lends=is_large(model),
        device=None if weights is None else model.device,
    )
    if weights is not None:
        sampler.load_weights(weights, 0)
    return sampler


def plain(
    model: Any, config: Config, *, weights: Weights | None = None, shares: bool = False
) -> LocalSampler:
    """On the model's own code: with the learner's weights in float32, else with a copy."""
    dtype = _dtype(model, config)
    if weights is not None:
        return LocalSampler(plain_twin(model, weights, dtype, model.device), shares_weights=False)
    if dtype == torch.float32:
        return LocalSampler(model)
    twin = copy.deepcopy(model)
    if hasattr(twin, "merge_and_unload"):
        twin = twin.merge_and_unload()
    remove_float_hook(twin)
    return LocalSampler(twin.to(dtype).requires_grad_(False), shares_weights=False)


def _dtype(model: Any, config: Config) -> torch.dtype:
    bf16 = uses_bf16(config.engine.dtype, model.device)
    return torch.bfloat16 if bf16 else torch.float32
