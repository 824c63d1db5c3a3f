"""The GPU of this machine, and the micro-batch that a run begins with on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from moored.config import AlgorithmConfig, Config
from moored.engine.fsdp.whole import WHOLE_SHARE
from moored.engine.local.batches import MICRO_BATCH_TOKENS
from moored.errors import MooredError
from moored.models.shapes import ModelShape, shape_from_config
from moored.names import ALGORITHMS, ESTIMATORS, sampler_for

DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""A machine with a GPU has one of these; looking is seconds faster than importing torch."""
GIB = 2**30
BATCH_SIZES = (MICRO_BATCH_TOKENS[1], 16384, 12288, 8192, 6144, 4096, 2048)
"""Tokens of a micro-batch to choose from; on a GPU more than the largest gains nothing."""
STATE_BYTES = {"adamw": 12, "adamw_8bit": 6}
"""Of a trained parameter: its float32 master weight and the moments of the optimiser."""
WEIGHT_BYTES, GRADIENT_BYTES = 2, 4
OTHER_BYTES = 4 * GIB
"""CUDA and its kernels, logits of a chunk and their derivatives, recorded decoding steps."""
FILLED_SHARE = 0.92
"""Of the memory: an estimate may be a little short."""
CACHE_SHARE, CACHE_KEPT_BELOW = 0.6, 1_000_000_000
"""Most of what is free that keys and values take; parameters from which on updates use it."""


def present_gpu(device: str = "auto") -> tuple[str, int] | None:
    """Name and bytes of memory of the GPU that `engine.device` means; None without one."""
    if device != "auto" and not device.startswith("cuda"):
        return None
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch or not any(Path(path).exists() for path in DRIVERS):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties("cuda" if device == "auto" else device)
    return properties.name, properties.total_memory


def fit_to_gpu(
    config: Config,
    model_config: Mapping[str, object],
    memory_bytes: int | None = None,
    *,
    ranks: int = 1,
    has_sampler: bool = True,
) -> Config:
    """The configuration with a micro-batch and a choice of checkpointing for the GPU's memory.

    What it sets stays as it is; without a GPU, and for models of unknown shape, so does everything.
    Several `ranks` share the states of the learner; `has_sampler` says whether one is on the GPU.
    """
    if memory_bytes is None:
        gpu = present_gpu(config.engine.device)
        if gpu is None:
            return config
        memory_bytes = gpu[1]
    try:
        shape = shape_from_config(model_config, config.model)
    except MooredError:
        return config
    tokens, checkpointing = first_batch(
        config, shape, memory_bytes, ranks=ranks, has_sampler=has_sampler
    )
    chosen = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
    return config.model_copy(update={"engine": config.engine.model_copy(update=chosen)})


def first_batch(
    config: Config, shape: ModelShape, memory_bytes: int, *, ranks: int, has_sampler: bool
) -> tuple[int, bool]:
    """Tokens of the micro-batches that a run begins with, and whether it computes layers twice.

    The largest size whose activations fit beside what every parameter takes, computing layers twice
    where only the smallest would fit without; else the smallest. An episode is never split. Where
    memory runs out all the same, the learner goes on with half as many.
    """
    engine, longest = config.engine, config.rollout.max_context
    again, given = engine.gradient_checkpointing, engine.micro_batch_tokens
    sizes = BATCH_SIZES if given is None else (given,)
    once = sizes if again is False else sizes[:-1] or sizes
    ways = {False: () if again is True else once, True: () if again is False else sizes}
    choices = [(max(size, longest), twice) for twice, own in ways.items() for size in own]
    room = FILLED_SHARE * memory_bytes
    room -= _state_bytes(config, shape, memory_bytes, ranks, has_sampler)
    fitting = (each for each in choices if each[0] * _token_bytes(config, shape, each[1]) <= room)
    return next(fitting, choices[-1])


def _state_bytes(
    config: Config, shape: ModelShape, memory_bytes: int, ranks: int, has_sampler: bool
) -> float:
    """All that an update has on a GPU beside activations."""
    engine, optimizer, rollout = config.engine, config.optimizer, config.rollout
    models = 1 + has_critic(config.algorithm)
    whole, lora = shape.num_parameters, optimizer.lora_rank
    states = 0 if optimizer.states == "host" else STATE_BYTES[optimizer.kind]
    trained = models * (shape.adapter_parameters(lora) if lora else whole)
    weights = WEIGHT_BYTES * whole * (1 if lora else models)
    is_kept = whole < CACHE_KEPT_BELOW
    if config.algorithm.kl_coef and not lora and is_kept:
        weights += WEIGHT_BYTES * whole
    taken = OTHER_BYTES + GRADIENT_BYTES * shape.head_parameters
    learner = weights + (states + GRADIENT_BYTES) * trained
    if ranks > 1:
        learner = learner / ranks + min(WHOLE_SHARE * memory_bytes, weights + 8 * trained)
    taken += learner
    if not has_sampler:
        return taken
    if engine.sampler == "vllm":
        is_elsewhere = (engine.vllm.server or "").startswith("http")
        return taken + (0 if is_elsewhere else engine.vllm.memory_share * memory_bytes)
    is_fast = sampler_for(engine.sampler, is_fast=shape.is_fast) == "fast"
    if lora or ranks > 1 or not is_fast:
        taken += WEIGHT_BYTES * whole
    if is_fast and is_kept:
        # A slot for every episode and for each prompt that four share.
        slots = 1.25 * rollout.num_groups * rollout.group_size / ranks
        cache = slots * rollout.max_context * shape.cache_bytes(WEIGHT_BYTES)
        taken += min(cache, CACHE_SHARE * max(0.0, memory_bytes - taken))
    return taken


def has_critic(options: AlgorithmConfig) -> bool:
    """Whether a critic is trained beside the policy; of known names this asks no torch."""
    name = options.advantage or ("gae" if options.name == "ppo" else "grpo")
    if options.name in ALGORITHMS and name in ESTIMATORS:
        return name in ("gae", "bilevel_gae")
    from moored.training.algorithms import load_algorithm

    return load_algorithm(options).needs_critic


def _token_bytes(config: Config, shape: ModelShape, checkpointing: bool) -> int:
    """What autograd keeps for a token: tensors of each layer's widths, fused or of transformers."""
    attention = 4 * (shape.query_width + shape.key_width)
    is_fused = shape.is_fast and config.engine.learner != "plain" and not config.engine.compile
    layer = 12 * shape.width + 6 * shape.inner if is_fused else 26 * shape.width + 8 * shape.inner
    layer += attention
    layers = 4 * shape.width * shape.layers + layer if checkpointing else layer * shape.layers
    return layers + 20 * shape.width
