"""What holds for every plan, tried on random configurations: the same ones in every run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from moored.config import Config, load_config
from moored.plan import GPUS, Lengths, Plan, advice, plan, shape_of

LENGTHS = Lengths(prompt=100, reply=20, turns=3)
CHOICES: dict[str, tuple[object, ...]] = {
    "model": ("nano", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B"),
    "rollout.num_groups": (1, 8, 64),
    "rollout.group_size": (2, 16),
    "rollout.max_context": (512, 2048, 16384),
    "algorithm.name": ("ppo", "grpo", "dapo"),
    "algorithm.kl_coef": (0, 0.001),
    "optimizer.num_minibatches": (1, 8),
    "optimizer.lora_rank": (0, 0, 64),
    "optimizer.states": ("device", "device", "host"),
    "optimizer.kind": ("adamw", "adamw", "adamw_8bit"),
    "engine.sampler": ("auto", "auto", "plain", "vllm"),
    "engine.dtype": ("bfloat16", "bfloat16", "float32"),
    "engine.micro_batch_tokens": ("null", "null", 100, 50_000),
    "engine.gradient_checkpointing": ("auto", "true", "false"),
    "engine.vllm.memory_share": (0.5,),
    "collapse.every": (0,),
}
MORE = ("rollout.num_groups", "rollout.group_size", "rollout.max_context")


def drawn(seed: int) -> tuple[dict[str, object], float]:
    """Options, and the memory of a GPU that vLLM can start on."""
    rng = random.Random(seed)
    options = {name: rng.choice(values) for name, values in CHOICES.items()}
    return options, rng.choice((34.0, 60.0, 100.0, 200.0))


def planned(options: dict[str, object], memory_gib: float) -> Plan:
    config = config_of(options)
    gpu = replace(GPUS["h200"], memory_gib=memory_gib)
    return plan(config, shape_of(config.model), gpu, LENGTHS)


def config_of(options: dict[str, object], *words: str) -> Config:
    return load_config({}, [*(f"{name}={value}" for name, value in options.items()), *words])


@pytest.mark.parametrize("seed", range(60))
def test_advice_is_taken_as_it_is_typed_and_fits(seed):
    options, memory_gib = drawn(seed)
    found = planned(options, memory_gib)
    for piece in advice(found):
        words = piece.text().partition(" (")[0].split()
        again = plan(config_of(options, *words), found.setup.shape, found.gpu)
        assert again.fits
        assert again.memory.peak_bytes / 2**30 == pytest.approx(piece.peak_gib)


@pytest.mark.parametrize("seed", range(60))
def test_more_to_compute_never_fits_where_less_does_not(seed):
    options, memory_gib = drawn(seed)
    found = planned(options, memory_gib)
    for name in MORE:
        value = options[name]
        assert isinstance(value, int)
        assert planned({**options, name: 2 * value}, memory_gib).fits <= found.fits
    assert planned(options, 1.5 * memory_gib).fits >= found.fits


def is_more(seconds: Mapping[str, float], step_s: float, may_be_same: bool) -> bool:
    found_s = sum(seconds.values())
    return found_s > step_s or (may_be_same and found_s == step_s)


@pytest.mark.parametrize("seed", range(60))
def test_longer_and_more_episodes_never_take_less_time(seed):
    options, memory_gib = drawn(seed)
    found = planned(options, memory_gib)
    config, shape = found.config, found.setup.shape
    if found.seconds is None:
        return
    step_s = sum(found.seconds.values())
    # Updates that the host bounds take as long, and of a plain sampler there is nothing else.
    may_be_same = found.setup.has_plain_sampler
    for name in ("prompt", "reply", "turns"):
        longer = replace(LENGTHS, **{name: 2 * getattr(LENGTHS, name)})
        seconds = plan(config, shape, found.gpu, longer).seconds
        assert seconds is not None
        assert is_more(seconds, step_s, may_be_same)
    for name in MORE[:2]:
        value = options[name]
        assert isinstance(value, int)
        seconds = planned({**options, name: 2 * value}, memory_gib).seconds
        assert seconds is None or is_more(seconds, step_s, may_be_same)
