"""Learning rates follow the size of the model, unless they are set."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from moored.config import load_config
from moored.models.rates import count_parameters, with_rates


def rates(*options: str) -> tuple[float | None, float | None]:
    found = with_rates(load_config(None, options)).optimizer
    return found.lr, found.critic_lr


def test_embedded_models_get_rates_that_learn_and_large_ones_the_papers():
    assert rates("model=nano") == rates("model=mini") == (1e-4, 3e-4)
    assert rates("model=smollm2") == rates("model=Qwen/Qwen2.5-3B-Instruct") == (1e-6, 1e-5)


def test_a_rate_that_is_set_stays():
    assert rates("model=nano", "optimizer.lr=3e-5") == (3e-5, 3e-4)
    assert rates("model=org/name", "optimizer.critic_lr=3e-5") == (1e-6, 3e-5)


def test_the_size_of_a_folder_is_read_from_the_headers_of_its_weights(tmp_path):
    assert count_parameters("nano") == 1_197_440
    assert count_parameters("mini") == 5_377_280
    save_file({"a": np.zeros((3, 5), np.float32)}, tmp_path / "model-1-of-2.safetensors")
    assert count_parameters(str(tmp_path)) == 15
    save_file({"b": np.zeros(7, np.float16)}, tmp_path / "model-2-of-2.safetensors")
    assert count_parameters(str(tmp_path)) == 22


@pytest.mark.parametrize(
    "content", [b"", b"\x05", b"\xff" * 8 + b"{}", b"\x02" + 7 * b"\0" + b"[]"]
)
def test_weights_that_cannot_be_read_count_as_large(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert count_parameters(str(tmp_path)) is None
    assert rates(f"model={tmp_path}") == (1e-6, 1e-5)
