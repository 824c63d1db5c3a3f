"""How many runs at a time."""

from __future__ import annotations

import math

import pytest

from moored.errors import ConfigError
from moored.plan import Gpu, plan_if_known
from moored.studies import jobs
from moored.studies.declaration import plan_runs, read_study
from moored.studies.jobs import choose_jobs, num_fitting


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 12 cores, with or without a GPU and MPS."""

    def make(*, gpu: bool, mps: bool = False, memory_gib: float = 139.8) -> None:
        monkeypatch.setattr(jobs, "num_cores", lambda: 12)
        monkeypatch.setattr(jobs, "gpu_memory_gib", lambda: memory_gib if gpu else None)
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        if mps:
            (tmp_path / "control").touch()

    return make


def test_a_cpu_runs_one_per_core(machine):
    machine(gpu=False)
    assert choose_jobs("auto", plan_runs(read_study("compute"))).count == 12


def test_a_gpu_is_shared_through_mps_only_if_it_runs(machine):
    runs = plan_runs(read_study("compute"))
    machine(gpu=True)
    alone = choose_jobs("auto", runs)
    assert alone.count == 1 and "start it with `nvidia-cuda-mps-control -d`" in alone.reason
    machine(gpu=True, mps=True)
    assert choose_jobs("auto", runs).count == 8
    on_cpu = plan_runs(read_study("compute"), ["engine.device=cpu"])
    assert choose_jobs("auto", on_cpu).count == 12


def test_a_number_is_taken_as_it_is_and_nonsense_is_refused():
    assert choose_jobs("3", []).count == 3
    for wrong in ("0", "many", "-1", "1.5"):
        with pytest.raises(ConfigError, match="auto or a number"):
            choose_jobs(wrong, [])


def test_no_more_runs_share_a_gpu_than_its_memory_holds(machine):
    runs = plan_runs(read_study("real_model"), ["model=smollm2"])
    plans = (plan_if_known(run.config, Gpu("h200", 139.8)) for run in runs)
    largest = max(found.memory.peak_bytes for found in plans if found is not None)
    assert num_fitting(runs, 139.8) == int(139.8 * 2**30 / (1.5 * largest)) > 1
    machine(gpu=True, mps=True, memory_gib=22.0)
    few = choose_jobs("auto", runs)
    assert few.count == 1 and "more might not fit it" in few.reason
    assert num_fitting(plan_runs(read_study("compute")), math.inf) == 8
