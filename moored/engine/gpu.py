"""The GPU of this machine, as plans describe one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from moored.config import Config
from moored.errors import MooredError
from moored.models.shapes import shape_from_config
from moored.plan.cluster import choose_rank_batch
from moored.plan.gpus import GIB, Gpu, known_gpu
from moored.plan.plan import choose_batch

DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Where there is none of these, torch need not be asked, which takes seconds."""


def present_gpu(device: str = "auto") -> Gpu | None:
    """The GPU that `engine.device` means; None without one. Its rates are None where unknown."""
    if device != "auto" and not device.startswith("cuda"):
        return None
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch or not any(Path(path).exists() for path in DRIVERS):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties("cuda" if device == "auto" else device)
    memory_gib = properties.total_memory / GIB
    known = known_gpu(properties.name)
    if known is None:
        return Gpu(properties.name, memory_gib)
    return replace(known, memory_gib=memory_gib)


def fit_to_gpu(
    config: Config,
    model_config: Mapping[str, object],
    gpu: Gpu | None = None,
    *,
    ranks: int = 1,
    has_sampler: bool = True,
) -> Config:
    """The configuration with a micro-batch and a choice of checkpointing that fit the memory.

    What it sets stays as it is; without a GPU, and for models of unknown shape, so does everything.
    Several `ranks` share the states of the learner; `has_sampler` says whether one is on the GPU.
    """
    gpu = gpu or present_gpu(config.engine.device)
    if gpu is None:
        return config
    try:
        shape = shape_from_config(model_config, config.model)
    except MooredError:
        return config
    if ranks > 1:
        chosen_batch = choose_rank_batch(shape, config, gpu, ranks, has_sampler=has_sampler)
    else:
        chosen_batch = choose_batch(shape, config, gpu)
    tokens, checkpointing = chosen_batch
    chosen = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
    return config.model_copy(update={"engine": config.engine.model_copy(update=chosen)})
