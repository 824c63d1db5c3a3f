"""GPUs by name: memory, matrix rate and bandwidth, as far as a plan needs them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from moored.errors import MooredError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Rates are None where only the memory is known; then a plan has no seconds."""

    name: str
    memory_gib: float
    """All that torch reports, a little less than the data sheet's."""
    tflops: float | None = None
    """Dense bfloat16 matrix products with float32 sums, by the data sheet."""
    bandwidth_tbs: float | None = None
    """TB/s between memory and cores, by the data sheet."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.3, 2250.0, 8.0),
        Gpu("h200", 139.8, 989.0, 4.8),
        Gpu("gh200", 94.5, 989.0, 4.0),
        Gpu("h100", 79.1, 989.0, 3.35),
        Gpu("h100-pcie", 79.1, 756.0, 2.0),
        Gpu("a100-80", 79.2, 312.0, 2.04),
        Gpu("a100-40", 39.4, 312.0, 1.555),
        Gpu("l40s", 44.4, 362.0, 0.864),
        Gpu("a6000", 47.5, 155.0, 0.768),
        Gpu("a10g", 22.0, 70.0, 0.6),
        Gpu("l4", 22.0, 121.0, 0.3),
        Gpu("rtx-5090", 31.4, 209.0, 1.79),
        Gpu("rtx-4090", 23.5, 165.0, 1.008),
        Gpu("rtx-3090", 23.7, 71.0, 0.936),
    )
}
ALIASES = {
    "a100": "a100-80",
    "a100-sxm4-80gb": "a100-80",
    "a100-80gb-pcie": "a100-80",
    "a100-sxm4-40gb": "a100-40",
    "a100-pcie-40gb": "a100-40",
    "h100-80gb-hbm3": "h100",
    "gh200-480gb": "gh200",
    "rtx-a6000": "a6000",
    "4090": "rtx-4090",
    "3090": "rtx-3090",
    "5090": "rtx-5090",
}
"""Other names: short ones, and those that drivers report."""


def known_gpu(name: str) -> Gpu | None:
    """A GPU of the table by its name there or by what a driver calls it (`NVIDIA H200`)."""
    short = re.sub(r"[\s_]+", "-", name.strip().lower())
    for word in ("nvidia-", "geforce-"):
        short = short.removeprefix(word)
    return GPUS.get(ALIASES.get(short, short))


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """A GPU by name; with `memory_gib` instead of the table's, or of one that it does not have."""
    known = known_gpu(name)
    if known is None and memory_gib is None:
        close = difflib.get_close_matches(name.lower(), GPUS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(GPUS)}"
        raise MooredError(f"GPU {name!r} is not in the table ({hint}); or give its --memory-gib")
    if known is None:
        known = Gpu(name, 0.0)
    return known if memory_gib is None else replace(known, memory_gib=memory_gib)
