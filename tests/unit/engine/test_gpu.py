"""The GPU of this machine, as torch describes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moored.engine import gpu
from moored.engine.gpu import present_gpu

torch = pytest.importorskip("torch")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a driver; its GPU has the name and the memory that are set."""
    monkeypatch.setattr(gpu, "DRIVERS", (str(tmp_path),))
    found = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return found


def test_memory_is_what_torch_says_and_rates_are_of_the_table(machine):
    found = present_gpu()
    assert found is not None
    assert (found.name, found.memory_gib, found.tflops) == ("h200", 140.0, 989.0)


def test_a_gpu_that_is_not_in_the_table_has_memory_only(machine):
    machine.name = "NVIDIA Odd 1"
    found = present_gpu("cuda:0")
    assert found is not None
    assert (found.name, found.memory_gib, found.tflops) == ("NVIDIA Odd 1", 140.0, None)


def test_a_run_on_the_cpu_has_none(machine):
    assert present_gpu("cpu") is None


def test_torch_is_not_asked_where_there_is_no_driver(machine, monkeypatch):
    monkeypatch.setattr(gpu, "DRIVERS", ())
    assert present_gpu() is None
