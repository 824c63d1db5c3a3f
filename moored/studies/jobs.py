"""How many runs at a time: one per core on a CPU; on a GPU that is shared through MPS, as many as
its memory holds."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moored.cores import num_cores
from moored.errors import ConfigError
from moored.plan import Gpu, plan_if_known
from moored.studies.declaration import PlannedRun

RUNS_PER_GPU = 8
"""Of small models through MPS: eight take about as long as two one after the other."""
TAKEN = 1.5
"""Memory that a run takes over what is planned for it: torch keeps pieces for later. 5.0 over 3.3
GiB were measured (benchmarks/results/ppo_step_h200.json)."""
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
    uses_gpu = any(run.config.engine.device != "cpu" for run in runs)
    memory_gib = gpu_memory_gib() if uses_gpu else None
    if memory_gib is None:
        return Jobs(num_cores(), "one per core")
    # The MPS daemon has a pipe that programs find it by.
    if Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists():
        count, fitting = min(RUNS_PER_GPU, num_cores()), num_fitting(runs, memory_gib)
        if fitting < count:
            return Jobs(fitting, "they share the GPU through MPS, and more might not fit it")
        return Jobs(count, "they share the GPU through MPS")
    return Jobs(
        1,
        f"without MPS runs on one GPU take turns; start it with `{START_MPS}` (and stop it "
        f"afterwards with `{STOP_MPS}`) for {RUNS_PER_GPU} at a time",
    )


def gpu_memory_gib() -> float | None:
    """Of the smallest GPU, asked of NVIDIA's driver without torch; infinite when it does not say,
    None without a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        return None
    listed = done.stdout.split()
    return min((int(mib) / 1024 for mib in listed if mib.isdecimal()), default=math.inf)


def num_fitting(runs: Sequence[PlannedRun], memory_gib: float) -> int:
    """How many of the largest run fit a GPU, at least one; those of unknown size count as small."""
    if not runs or math.isinf(memory_gib):
        return RUNS_PER_GPU
    gpu, first = Gpu("this GPU", memory_gib), runs[0].seed
    plans = (plan_if_known(run.config, gpu) for run in runs if run.seed == first)
    largest = max((found.memory.peak_bytes for found in plans if found is not None), default=0)
    return max(1, int(gpu.memory_bytes / (TAKEN * largest))) if largest else RUNS_PER_GPU
