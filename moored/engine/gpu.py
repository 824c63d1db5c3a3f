"""The GPU of this machine, as plans describe one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from moored.plan.gpus import GIB, Gpu, known_gpu

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
