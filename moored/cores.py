"""Cores that this process may use, and main memory: a container may get few of many cores."""

from __future__ import annotations

import math
import os
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use at a time, at least 1."""
    here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return max(1, int(min(len(here) or os.cpu_count() or 1, container_cores())))


def container_cores(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that `docker run --cpus` or a pod's limit leaves; infinite without a limit."""
    quota = _words(folder / "cpu.max")
    if not quota:  # before version 2 of control groups
        names = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
        quota = [word for name in names for word in _words(folder / name)]
    if len(quota) != 2 or not quota[0].isdecimal():  # "max", or -1
        return math.inf
    return int(quota[0]) / int(quota[1])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def main_memory_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may use; 16 GiB where the system does not tell."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        whole = 16 * 2**30
    # Before version 2 of control groups a limit had another name.
    words = _words(folder / "memory.max") or _words(folder / "memory/memory.limit_in_bytes")
    return min(whole, int(words[0])) if words and words[0].isdecimal() else whole
