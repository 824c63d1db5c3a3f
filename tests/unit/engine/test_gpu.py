"""The GPU of this machine, as torch describes it."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from moored.config import load_config
from moored.engine import gpu
from moored.engine.gpu import fit_to_gpu, present_gpu
from moored.errors import MooredError
from moored.models.known import KNOWN
from moored.plan.gpus import GPUS

torch = pytest.importorskip("torch")
local_engine = pytest.importorskip("moored.engine.local.engine")


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


def config_of(name: str) -> dict[str, object]:
    return asdict(KNOWN[name])


def test_a_small_model_has_large_micro_batches_and_a_large_one_what_fits():
    config = load_config({"algorithm": {"name": "ppo"}, "rollout": {"max_context": 2048}})
    small = fit_to_gpu(config, config_of("Qwen/Qwen2.5-0.5B"), GPUS["h200"]).engine
    large = fit_to_gpu(config, config_of("Qwen/Qwen2.5-3B"), GPUS["h200"]).engine
    assert (small.micro_batch_tokens, small.gradient_checkpointing) == (24576, False)
    assert large.micro_batch_tokens is not None
    assert large.micro_batch_tokens < 24576 or large.gradient_checkpointing is True


def test_ranks_that_share_the_states_have_larger_micro_batches():
    given = {"algorithm": {"name": "grpo"}, "rollout": {"max_context": 2048, "num_groups": 16}}
    config, model = load_config(given), config_of("Qwen/Qwen2.5-7B")
    alone = fit_to_gpu(config, model, GPUS["h200"]).engine
    shared = fit_to_gpu(config, model, GPUS["h200"], ranks=8).engine
    assert alone.gradient_checkpointing is True
    assert shared.gradient_checkpointing is False
    apart = fit_to_gpu(config, model, GPUS["h200"], ranks=8, has_sampler=False).engine
    assert shared.micro_batch_tokens is not None and apart.micro_batch_tokens is not None
    assert alone.micro_batch_tokens is not None
    assert 2048 < shared.micro_batch_tokens <= apart.micro_batch_tokens


def test_what_the_configuration_sets_is_not_chosen():
    given = {"engine": {"micro_batch_tokens": 3000, "gradient_checkpointing": True}}
    config = load_config({**given, "rollout": {"max_context": 1024}})
    engine = fit_to_gpu(config, config_of("Qwen/Qwen2.5-0.5B"), GPUS["h200"]).engine
    assert (engine.micro_batch_tokens, engine.gradient_checkpointing) == (3000, True)


def test_a_model_of_unknown_shape_is_left_to_the_defaults():
    config = load_config({})
    assert fit_to_gpu(config, {"model_type": "odd"}, GPUS["h200"]) is config
    assert fit_to_gpu(config, config_of("Qwen/Qwen2.5-0.5B")) is config


@pytest.mark.parametrize(("name", "chosen"), [("cuda:1", ["cuda:1"]), ("cuda", [])])
def test_a_gpu_that_is_named_becomes_the_current_one(machine, monkeypatch, name, chosen):
    """Kernels are launched there; without a number it is the current one already."""
    found = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(str(device)))

    def load_model(*_, **__):
        raise MooredError("no model")

    monkeypatch.setattr(local_engine, "load_model", load_model)
    with pytest.raises(MooredError, match="no model"):
        local_engine.LocalEngine(load_config({"engine": {"device": name}}))
    assert found == chosen
