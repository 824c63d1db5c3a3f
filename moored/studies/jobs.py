"""How many runs at a time: one per core on a CPU, several on a GPU that is shared through MPS."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moored.errors import ConfigError
from moored.runlog.machine import num_cores
from moored.studies.grid import PlannedRun

RUNS_PER_GPU = 8
"""Of small models through MPS: eight take about as long as two one after the other."""
START_MPS = "nvidia-cuda-mps-control -d"
STOP_MPS = "echo quit | nvidia-cuda-mps-control"


@dataclass(frozen=True, slots=True)
class Jobs:
    """How many runs at a time, and why."""

    count: int
    reason: str


def choose_jobs(given: str, runs: Sequence[PlannedRun]) -> Jobs:
    """A number as it is; `auto` by the device that the runs will use."""
    if given != "auto":
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"--jobs takes auto or a number >= 1, got {given!r}")
        return Jobs(int(given), "as given")
    uses_gpu = any(run.config.engine.device != "cpu" for run in runs) and has_gpu()
    if not uses_gpu:
        return Jobs(num_cores(), "one per core")
    if is_mps_running():
        return Jobs(min(RUNS_PER_GPU, num_cores()), "they share the GPU through MPS")
    return Jobs(
        1,
        f"without MPS runs on one GPU take turns; start it with `{START_MPS}` (and stop it "
        f"afterwards with `{STOP_MPS}`) for {RUNS_PER_GPU} at a time",
    )


def has_gpu() -> bool:
    """True when NVIDIA's driver lists a GPU; asked without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def is_mps_running() -> bool:
    """The MPS daemon has a pipe that programs find it by."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return (Path(folder) / "control").exists()
