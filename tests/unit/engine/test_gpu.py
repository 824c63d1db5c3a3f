"""The GPU of this machine, and the micro-batch that a run begins with on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from moored.config import Config, load_config
from moored.engine import gpu
from moored.engine.gpu import (
    BATCH_SIZES,
    GIB,
    first_batch,
    fit_to_gpu,
    has_critic,
    present_gpu,
)
from moored.errors import MooredError
from moored.models.find import embedded_models
from moored.models.known import KNOWN
from moored.names import ALGORITHMS, ESTIMATORS
from moored.training.algorithms import load_algorithm
from tests.unit.plan.tiny import tiny

torch = pytest.importorskip("torch")
local_engine = pytest.importorskip("moored.engine.local.engine")

H200 = int(139.8 * GIB)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a driver; its GPU has the name and the memory that are set."""
    monkeypatch.setattr(gpu, "DRIVERS", (str(tmp_path),))
    found = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return found


def test_name_and_memory_are_what_torch_says(machine):
    assert present_gpu() == present_gpu("cuda:0") == ("NVIDIA H200", 140 * GIB)


def test_a_run_on_the_cpu_has_none(machine):
    assert present_gpu("cpu") is None


def test_torch_is_not_asked_where_there_is_no_driver(machine, monkeypatch):
    monkeypatch.setattr(gpu, "DRIVERS", ())
    assert present_gpu() is None


def config_of(name: str) -> dict[str, object]:
    if name in KNOWN:
        return asdict(KNOWN[name])
    return json.loads((embedded_models()[name] / "config.json").read_text(encoding="utf-8"))


def chosen(config: Config, model: str, memory_bytes: int = H200, **how) -> tuple[object, object]:
    engine = fit_to_gpu(config, config_of(model), memory_bytes, **how).engine
    return engine.micro_batch_tokens, engine.gradient_checkpointing


@pytest.mark.parametrize(
    ("model", "grpo", "ppo"),
    [
        ("nano", (24576, False), (24576, False)),
        ("mini", (24576, False), (24576, False)),
        ("HuggingFaceTB/SmolLM2-135M", (24576, False), (24576, False)),
        ("Qwen/Qwen2.5-0.5B", (24576, False), (24576, False)),
        # With gradients and AdamW 51.7 GiB are taken, with a critic twice as many.
        ("Qwen/Qwen2.5-3B", (16384, False), (4096, False)),
        ("Qwen/Qwen2.5-7B", (2048, True), (2048, True)),
    ],
)
def test_micro_batches_on_an_h200_are_those_that_were_measured(model, grpo, ppo):
    for name, wanted in (("grpo", grpo), ("ppo", ppo)):
        words = [f"algorithm.name={name}", "algorithm.kl_coef=0.001", "rollout.max_context=2048"]
        assert chosen(load_config({}, words), model) == wanted


def bytes_for(tokens: int) -> int:
    """Memory for micro-batches of so many tokens of the tiny model; worked out by hand."""
    # 348 weights of 2 + 12 + 4 bytes, a head of 40 in float32; keys and values of 1.25 x 8
    # episodes of 16 tokens, 16 bytes each.
    taken = gpu.OTHER_BYTES + 18 * 348 + 4 * 40 + 10 * 16 * 16
    # A fused layer: 12 x 4 + 6 x 8 and 4 bytes of 4 + 2 queries and keys; 20 x 4 behind both.
    return int((taken + tokens * (2 * (48 + 48 + 24) + 80)) / gpu.FILLED_SHARE) + 2


def tiny_config(*options: str) -> Config:
    few = ["rollout.num_groups=2", "rollout.group_size=4", "rollout.max_context=16"]
    few += ["algorithm.name=grpo", "algorithm.kl_coef=0", "rollout.max_response_tokens=4"]
    return load_config({}, [*few, *options])


def first(config: Config, memory_bytes: int) -> tuple[int, bool]:
    return first_batch(config, tiny(), memory_bytes, ranks=1, has_sampler=True)


@pytest.mark.parametrize("tokens", BATCH_SIZES[:-1])
def test_the_largest_micro_batch_that_fits_is_taken(tokens):
    assert first(tiny_config(), bytes_for(tokens)) == (tokens, False)
    assert first(tiny_config(), bytes_for(tokens) - 500) != (tokens, False)


def test_layers_are_computed_twice_where_only_the_smallest_micro_batch_fits_without():
    memory = bytes_for(2048)
    assert first(tiny_config(), memory) == (2048, True)
    assert first(tiny_config("engine.gradient_checkpointing=false"), memory) == (2048, False)
    assert first(tiny_config(), 1) == (2048, True)


def test_an_episode_is_never_split():
    given = tiny_config("rollout.max_context=3000", "engine.micro_batch_tokens=100")
    assert first(given, H200) == (3000, False)


def test_ranks_that_share_the_states_have_larger_micro_batches():
    given = {"algorithm": {"name": "grpo"}, "rollout": {"max_context": 2048, "num_groups": 16}}
    config, model = load_config(given), "Qwen/Qwen2.5-7B"
    assert chosen(config, model) == (2048, True)
    assert chosen(config, model, ranks=2) == (6144, False)
    assert chosen(config, model, ranks=8) == (16384, False)
    assert chosen(config, model, ranks=2, has_sampler=False) == (8192, False)


def test_what_the_configuration_sets_is_not_chosen():
    given = {"engine": {"micro_batch_tokens": 3000, "gradient_checkpointing": True}}
    config = load_config({**given, "rollout": {"max_context": 1024}})
    assert chosen(config, "Qwen/Qwen2.5-0.5B") == (3000, True)


def test_memory_that_others_take_leaves_smaller_micro_batches():
    words = ["algorithm.name=grpo", "rollout.max_context=1024"]
    alone = chosen(load_config({}, words), "Qwen/Qwen2.5-3B")
    vllm = load_config({}, [*words, "engine.sampler=vllm", "engine.vllm.memory_share=0.3"])
    assert chosen(vllm, "Qwen/Qwen2.5-3B") < alone
    host = load_config({}, [*words, "optimizer.states=host"])
    assert chosen(host, "Qwen/Qwen2.5-3B") > alone
    adapters = load_config({}, [*words, "optimizer.lora_rank=64"])
    assert chosen(adapters, "Qwen/Qwen2.5-3B") == (24576, False)


@pytest.mark.parametrize("advantage", [None, *ESTIMATORS])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_who_has_a_critic_is_known_by_name(name, advantage):
    options = load_config({"algorithm": {"name": name, "advantage": advantage}}).algorithm
    assert has_critic(options) == load_algorithm(options).needs_critic


def test_a_model_of_unknown_shape_is_left_to_the_defaults():
    config = load_config({})
    assert fit_to_gpu(config, {"model_type": "odd"}, H200) is config
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
