"""Where a model runs, and in which precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moored.errors import MooredError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MooredError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MooredError("engine.device is cuda, but no GPU is visible; use cpu or auto")
    if device.type not in ("cpu", "cuda"):
        _check_usable(device)
    return device


def _check_usable(device: torch.device) -> None:
    """Refuse what torch knows by name, but cannot compute on here."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        raise MooredError(
            f"engine.device is {device.type}, which torch cannot use on this machine; use auto, "
            f"cpu or cuda"
        ) from error


def uses_bf16(dtype: str, device: torch.device) -> bool:
    """`auto` computes in bfloat16 on a GPU."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
