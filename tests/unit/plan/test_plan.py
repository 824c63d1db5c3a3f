"""Whole plans: what fits, and every preset of a real model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moored.config import load_config
from moored.engine.gpu import first_batch
from moored.models.shapes import shape_of
from moored.plan import GPUS, Gpu, Lengths, plan, plan_if_known
from moored.plan.gpus import GIB
from moored.presets import preset_kinds, read_presets
from tests.unit.plan.tiny import config, tiny
from tests.warm import run_warm

MODELS = [name for name, kind in preset_kinds().items() if kind == "model"]


@pytest.mark.parametrize("preset", MODELS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_every_preset_of_a_real_model_is_planned(preset, algorithm):
    given = load_config(read_presets(["sokoban", algorithm, preset]))
    found = plan(given, shape_of(given.model), GPUS["h200"])
    assert found.setup.has_critic == (algorithm == "ppo")
    # All but PPO of 7 billion parameters fit: its critic has an optimiser and gradients too.
    assert (found.over <= 0.0) == ((algorithm, preset) != ("ppo", "qwen2.5-7b"))
    assert (found.seconds is not None) == (found.over <= 0.0)
    json.dumps(found.record())


def test_a_plan_has_the_micro_batch_that_a_run_begins_with():
    given = load_config(read_presets(["sokoban", "ppo", "qwen2.5-3b"]), ["algorithm.kl_coef=0.001"])
    shape, h200 = shape_of(given.model), GPUS["h200"]
    found = plan(given, shape, h200)
    chosen = first_batch(given, shape, h200.memory_bytes, ranks=1, has_sampler=True)
    assert (found.micro_batch_tokens, found.checkpointing) == chosen == (4096, False)
    assert found.memory.peak_bytes < 130 * GIB and found.memory.rows == 128


def test_ranks_share_what_does_not_fit_one_gpu():
    given = load_config(read_presets(["sokoban", "ppo", "qwen2.5-7b"]), ["rollout.num_groups=64"])
    shape, lengths = shape_of(given.model), Lengths(reply=400, turns=5)
    alone, eight = (plan(given, shape, GPUS["h200"], lengths, ranks=n) for n in (1, 8))
    assert alone.over > 0.0 > eight.over
    # 12 bytes of 7.616 billion parameters on 8 GPUs.
    policy = eight.memory.phases["update"]["policy optimiser"] / GIB
    assert policy == pytest.approx(12 * 7.6156 / 8 / 1.0737, abs=0.01)
    assert eight.record()["ranks"] == 8


def test_a_plan_fits_up_to_the_last_byte():
    found = plan(config(), tiny(), Gpu("large", 1.0))
    exact = Gpu("exact", found.memory.peak_bytes / GIB)
    assert plan(config(), tiny(), exact).over <= 0.0
    short = replace(exact, memory_gib=exact.memory_gib * 0.8)
    assert plan(config(), tiny(), short).over == pytest.approx(0.25, abs=0.01)


def test_a_plan_says_what_main_memory_is_for():
    words = ["algorithm.kl_coef=0.001", "optimizer.states=host"]
    given = load_config(read_presets(["sokoban", "grpo", "qwen2.5-7b"]), words)
    record = plan(given, shape_of(given.model), GPUS["h200"]).record()
    # 12 bytes of 7.616 billion parameters; 2 bytes of them are 14.2 GiB, pinned as 16.
    assert record["host_parts_gib"] == {"optimiser": 85.111, "reference": 16.0}


def test_seconds_need_the_rates_of_the_gpu(monkeypatch):
    monkeypatch.setattr("moored.plan.seconds.TIMED_FROM", 0)
    assert plan(config(), tiny(), Gpu("large", 1.0)).seconds is None
    found = plan(config(), tiny(), GPUS["h200"])
    assert found.seconds is not None and found.step_s == sum(found.seconds.values())
    assert list(found.seconds) == ["prefill", "decode", "advantages", "update", "publish"]


def test_no_plan_is_made_of_an_unknown_shape_or_another_engine():
    h200 = GPUS["h200"]
    assert plan_if_known(load_config({"model": "nano"}), h200) is not None
    assert plan_if_known(load_config({"model": "org/unknown"}), h200) is None
    assert plan_if_known(load_config({"engine": {"kind": "endpoint"}}), h200) is None


def test_planning_imports_no_torch():
    code = "import sys, moored.plan; moored.plan.find_gpu('h200'); print('torch' in sys.modules)"
    assert run_warm([], code=code, slim=True).stdout == "False\n"
