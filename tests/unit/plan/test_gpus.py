"""GPUs by the names people and drivers give them."""

from __future__ import annotations

import pytest

from moored.errors import MooredError
from moored.plan.gpus import GPUS, Gpu, find_gpu, known_gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("a100", "a100-80"),
        ("4090", "rtx-4090"),
    ],
)
def test_a_gpu_is_found_by_what_a_driver_or_a_person_calls_it(name, found):
    assert known_gpu(name) == GPUS[found]


def test_a_given_memory_replaces_that_of_the_table_and_is_all_that_another_gpu_needs():
    assert find_gpu("h200", 100.0) == Gpu("h200", 100.0, 989.0, 4.8)
    assert find_gpu("mine", 2.0) == Gpu("mine", 2.0)
    assert find_gpu("mine", 2.0).memory_bytes == 2 * 1024**3


def test_a_gpu_that_is_not_known_asks_for_its_memory():
    with pytest.raises(MooredError, match=r"did you mean 'h200'.*--memory-gib"):
        find_gpu("h2000")
