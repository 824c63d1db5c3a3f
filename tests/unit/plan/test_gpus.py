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
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("a100", "a100-80"),
        ("4090", "rtx-4090"),
    ],
)
def test_a_gpu_is_found_by_what_a_driver_or_a_person_calls_it(name, found):
    assert known_gpu(name) == GPUS[found]


def test_given_figures_replace_those_of_the_table():
    assert find_gpu("h200", memory_gib=100.0) == Gpu("h200", 100.0, 989.0, 4.8)
    assert find_gpu("mine", memory_gib=10.0, tflops=20.0, bandwidth_tbs=0.5).memory_gib == 10.0


def test_a_gpu_that_is_not_known_asks_for_its_figures():
    with pytest.raises(MooredError) as asked:
        find_gpu("h2000", memory_gib=80.0)
    assert str(asked.value) == (
        "GPU 'h2000' is not in the table (did you mean 'h200'?); give its --memory-gib, --tflops "
        "(dense bfloat16) and --bandwidth (TB/s)"
    )


def test_only_a_typo_is_corrected():
    # Another family, not a typo of h100.
    with pytest.raises(MooredError, match=r"'v100' is not in the table \(choose one of a100-40, "):
        find_gpu("v100")


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e-10, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("figure", "option"),
    [("memory_gib", "--memory-gib"), ("tflops", "--tflops"), ("bandwidth_tbs", "--bandwidth")],
)
def test_figures_must_be_those_of_a_gpu(figure, option, wrong):
    with pytest.raises(MooredError, match=f"^{option} must be from 0.* to .*, got "):
        find_gpu("h200", **{figure: wrong})


def test_memory_is_in_gibibytes():
    assert Gpu("x", 2.0).memory_bytes == 2 * 1024**3
