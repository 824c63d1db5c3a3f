"""Versions and machine that a result was made with; nothing heavy is imported to tell them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moored import __version__
from moored.cores import num_cores

PACKAGES = ("torch", "transformers", "numpy")
"""Those that numbers depend on."""


def installed_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of moored, Python, and those of the packages that are installed."""
    found = {"moored": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            found[name] = _version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def _version(package: str) -> str:
    """Found once: the whole description of a package is read for it."""
    return version(package)


def describe_machine() -> dict[str, object]:
    """System, processor and cores."""
    return {"system": system_name(), "cpu": cpu_name(), "cores": num_cores()}


def system_name() -> str:
    return f"{sys.platform} {platform.machine()}"


def cpu_name() -> str:
    """As the processor calls itself, where the system tells."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def own_command() -> list[str]:
    """The words this process was started with; of a path to the program only its name."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
