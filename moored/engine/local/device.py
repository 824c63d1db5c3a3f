"""Where a model runs and in which precision, and what to say when memory runs out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from moored.errors import MooredError

P = ParamSpec("P")
T = TypeVar("T")


class OutOfMemoryError(MooredError):
    """The GPU has too little memory for what was requested."""


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MooredError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MooredError("engine.device is cuda, but no GPU is visible; use cpu or auto")
    return device


def uses_bf16(dtype: str, device: torch.device) -> bool:
    """`auto` computes in bfloat16 on a GPU."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")


def says_out_of_memory(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: torch's error about memory becomes one sentence with a remedy."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(_explain(what)) from error

        return wrapped

    return decorate


def _explain(what: str) -> str:
    used = ""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = f" ({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are in use)"
    return (
        f"out of GPU memory in {what}{used}; lower engine.micro_batch_tokens, rollout.max_context "
        f"or rollout.group_size, set engine.gradient_checkpointing=true, or train with "
        f"optimizer.lora_rank"
    )
