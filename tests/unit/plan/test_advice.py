"""Advice makes a plan fit, with the least harm first; what clearly cannot fit is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moored.config import load_config
from moored.errors import MooredError
from moored.plan import Plan, advice, plan, refuse_what_cannot_fit, remedy, shape_of, verdict
from moored.plan.advice import with_options
from moored.plan.coefficients import MEASURED
from moored.plan.gpus import GPUS, Gpu
from moored.presets import read_presets


def planned(*words: str, gpu: str = "h200", preset: str = "qwen2.5-7b") -> Plan:
    given = load_config(read_presets(["sokoban", preset]), list(words))
    return plan(given, shape_of(given.model), GPUS[gpu])


def test_a_plan_that_fits_needs_no_advice():
    found = planned(preset="qwen2.5-0.5b")
    assert advice(found) == []
    assert re.fullmatch(
        r"fits: \d+\.\d GiB in the update phase, \d+ % of the 139\.8 GiB of h200", verdict(found)
    )


def test_every_piece_of_advice_fits_when_it_is_followed():
    pieces = 0
    for gpu in ("h200", "h100", "a100-40"):
        for words in (["algorithm.name=ppo"], ["algorithm.name=grpo"]):
            found = planned(*words, gpu=gpu)
            for piece in advice(found):
                changed = with_options(found.config, piece.options)
                assert plan(changed, found.setup.shape, found.gpu).fits
                pieces += 1
    assert pieces >= 6


def test_a_micro_batch_that_is_too_large_is_the_first_to_change():
    words = ["engine.micro_batch_tokens=500000", "engine.gradient_checkpointing=false"]
    found = planned(*words, preset="qwen2.5-0.5b")
    assert not found.fits
    pieces = advice(found)
    assert dict(pieces[0].options) == {"engine.micro_batch_tokens": 24576}
    assert dict(pieces[1].options) == {"engine.gradient_checkpointing": True}
    assert pieces[1].text().startswith("engine.gradient_checkpointing=true (")


def test_several_options_are_changed_together_where_none_helps_alone():
    words = ["algorithm.name=ppo", "engine.micro_batch_tokens=500000"]
    found = planned(*words, preset="qwen2.5-3b", gpu="l40s")
    pieces = advice(found)
    assert len(pieces) == 1
    # Neither would do alone; less harm is done by the optimiser on the host than by adapters.
    assert dict(pieces[0].options) == {
        "engine.micro_batch_tokens": 2048,
        "optimizer.states": "host",
    }
    assert plan(with_options(found.config, pieces[0].options), found.setup.shape, found.gpu).fits


def test_advice_holds_for_what_is_typed():
    """`algorithm.name=grpo` brings a KL term, and so a reference, unless the advice says not to."""
    words = ["sokoban", "ppo", "qwen2.5-7b"]
    given = load_config(read_presets(words))
    found = plan(given, shape_of(given.model), GPUS["h200"])
    pieces = advice(found)
    assert any("algorithm.name" in piece.options for piece in pieces)
    for piece in pieces:
        typed = piece.text().partition(" (")[0].split()
        again = load_config(read_presets(words), typed)
        planned_again = plan(again, found.setup.shape, found.gpu)
        assert planned_again.memory.peak_bytes / 2**30 == pytest.approx(piece.peak_gib)


def test_a_model_without_a_fast_sampler_is_told_to_have_vllm_write_some_episodes_at_a_time():
    """Gemma 2 has layers of another kind; all its episodes at once need more than the GPU has."""
    words = ["optimizer.lora_rank=8", "rollout.num_groups=64", "algorithm.kl_coef=0"]
    given = load_config(read_presets(["sokoban", "grpo", "qwen2.5-7b"]), words)
    other = replace(shape_of(given.model), is_fast=False)
    found = plan(given, other, GPUS["h100"])
    assert found.memory.peak_phase == "rollout"
    assert not found.fits
    (piece,) = [piece for piece in advice(found) if "engine.sampler" in piece.options]
    # 0.65 of 79.1 GiB: 14.2 for the weights, and 170 times 4,096 tokens of 56 KiB.
    assert piece.text().startswith("engine.sampler=vllm engine.vllm.memory_share=0.65 (")
    changed = load_config(given.model_dump(), piece.text().partition(" (")[0].split())
    again = plan(changed, other, found.gpu)
    most = MEASURED.memory.filled_share * found.gpu.memory_bytes
    assert again.memory.peak_bytes <= most
    assert f"vLLM writes {again.memory.rows} of 1024 episodes at a time" in piece.why
    assert again.memory.rows == 170
    larger = {"engine.vllm.memory_share": changed.engine.vllm.memory_share + 0.05}
    assert plan(with_options(changed, larger), other, found.gpu).memory.peak_bytes > most


def test_no_share_is_named_that_leaves_nothing_beside_vllm():
    """0.95 of a GPU was, which would leave the learner 1.6 GiB."""
    words = ["model=Qwen/Qwen2.5-14B", "optimizer.lora_rank=8", "engine.sampler=vllm"]
    given = load_config({}, [*words, "rollout.max_context=16384", "collapse.every=0"])
    gpu, shape = GPUS["a100-40"], shape_of(given.model)
    with pytest.raises(MooredError, match=r"one episode take 30.5 GiB; set it to 0.78 or more"):
        plan(given, shape, gpu)
    with pytest.raises(MooredError, match=r"one episode take 30.5 GiB; take a smaller model"):
        plan(given, shape, replace(gpu, memory_gib=32.4))


def test_vllm_is_not_advised_where_moored_has_a_sampler_of_its_own():
    for words in ([], ["optimizer.lora_rank=8", "rollout.num_groups=64"], ["algorithm.name=ppo"]):
        for gpu in ("h100", "a100-40", "rtx-4090"):
            assert not any("engine.sampler" in p.options for p in advice(planned(*words, gpu=gpu)))
    plain = planned("engine.sampler=plain", "optimizer.lora_rank=8", "rollout.num_groups=64")
    assert {"engine.sampler": "auto"} in [dict(piece.options) for piece in advice(plain)]


def test_vllm_that_cannot_divide_the_heads_keeps_no_other_advice_back():
    """engine.vllm.tensor_parallel counts for nothing until vLLM samples, and was refused then."""
    words = ["model=Qwen/Qwen2.5-1.5B", "algorithm.name=ppo", "rollout.max_context=4096"]
    words += ["engine.gradient_checkpointing=false", "engine.vllm.tensor_parallel=7"]
    given = load_config({}, words)
    found = plan(given, replace(shape_of(given.model), is_fast=False), GPUS["rtx-4090"])
    assert not found.fits
    (piece,) = advice(found)
    assert len(piece.options) > 1
    assert "engine.sampler" not in piece.options
    changed = with_options(found.config, piece.options)
    assert plan(changed, found.setup.shape, found.gpu).fits


def test_a_server_that_runs_already_is_not_told_its_share():
    words = ["model=Qwen/Qwen2.5-7B", "optimizer.lora_rank=8", "rollout.num_groups=64"]
    words += ["collapse.every=0", "engine.vllm.server=http://host:8000"]
    given = load_config({}, words)
    found = plan(given, replace(shape_of(given.model), is_fast=False), GPUS["h100"])
    assert not found.fits
    assert not any("engine.sampler" in piece.options for piece in advice(found))


def test_where_nothing_helps_the_gpu_is_too_small():
    found = planned(gpu="a10g")
    assert not found.fits
    assert advice(found) == []
    assert remedy(found) == (
        "none of the changes that `moored plan` tries makes it fit; take a smaller model or a "
        "larger GPU"
    )


def test_smaller_adapters_and_fewer_prompts_are_tried():
    found = planned("optimizer.lora_rank=64", preset="qwen2.5-3b", gpu="a10g")
    assert {"optimizer.lora_rank": 8} in [dict(piece.options) for piece in advice(found)]
    words = ["algorithm.name=grpo", "engine.dtype=float32"]
    found = planned(*words, preset="qwen2.5-0.5b", gpu="rtx-4090")
    assert {"rollout.num_groups": 4} in [dict(piece.options) for piece in advice(found)]


def test_what_the_configuration_refuses_is_not_advised():
    """Four groups would leave two of six buckets of the gradients empty."""
    words = ["algorithm.name=grpo", "engine.dtype=float32", "gradients.every=1"]
    found = planned(*words, preset="qwen2.5-0.5b", gpu="rtx-4090")
    assert advice(found)
    assert not any("rollout.num_groups" in piece.options for piece in advice(found))


def test_what_clearly_cannot_fit_is_refused_with_the_advice():
    given = planned("algorithm.name=ppo").config
    with pytest.raises(MooredError) as refused:
        refuse_what_cannot_fit(given, GPUS["h200"])
    text = str(refused.value)
    assert text.startswith("Qwen/Qwen2.5-7B-Instruct does not fit: ")
    assert "% more than the 139.8 GiB of h200; set " in text
    assert "optimizer.lora_rank=64 (" in text
    assert text.endswith("; `moored plan` shows every part")
    assert "\n" not in text


def test_a_plan_that_is_over_by_less_than_10_percent_is_tried():
    found = planned(preset="qwen2.5-0.5b")
    needed = found.memory.peak_bytes / 2**30
    # Where the choice of micro-batches is open a smaller GPU would do.
    assert refuse_what_cannot_fit(found.config, Gpu("close", needed / 1.09)) is None
    fixed = with_options(
        found.config,
        {"engine.micro_batch_tokens": 24576, "engine.gradient_checkpointing": False},
    )
    with pytest.raises(MooredError, match="does not fit"):
        refuse_what_cannot_fit(fixed, Gpu("short", needed / 1.2))
    close = Gpu("close", needed / 1.05)
    over = plan(fixed, found.setup.shape, close)
    assert 0.0 < over.over < 0.1
    assert refuse_what_cannot_fit(fixed, close) == (
        f"by plan {fixed.model} {verdict(over)}; plans may be 10 % off, so it is tried, and may "
        f"end for lack of memory; to be safe, set {advice(over)[0].text()}"
    )
    assert refuse_what_cannot_fit(fixed, Gpu("enough", needed * 1.01)) is None


def test_models_of_unknown_shape_and_other_engines_are_let_through():
    small = Gpu("small", 0.001)
    given = load_config({}, ["model=org/unknown"])
    refuse_what_cannot_fit(given, small)
    refuse_what_cannot_fit(load_config({}, ["model=nano", "engine.kind=endpoint"]), small)
    with pytest.raises(MooredError, match="nano does not fit"):
        refuse_what_cannot_fit(load_config({}, ["model=nano"]), small)
