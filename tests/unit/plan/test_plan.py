"""Whole plans: what fits, the choice of micro-batches, and every preset of a real model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moored.config import load_config
from moored.errors import MooredError
from moored.plan import choose_batch, plan, shape_of
from moored.plan.coefficients import MEASURED
from moored.plan.gpus import GIB, GPUS, Gpu
from moored.plan.memory import plan_memory
from moored.plan.plan import BATCH_SIZES
from moored.plan.seconds import Lengths
from moored.plan.setup import setup_of
from moored.presets import preset_kinds, read_presets
from tests.unit.plan.tiny import BARE, config, tiny
from tests.warm import run_warm

MODELS = [name for name, kind in preset_kinds().items() if kind == "model"]


@pytest.mark.parametrize("preset", MODELS)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_every_preset_of_a_real_model_is_planned(preset, algorithm):
    given = load_config(read_presets(["sokoban", algorithm, preset]))
    found = plan(given, shape_of(given.model), GPUS["h200"])
    assert found.setup.has_critic == (algorithm == "ppo")
    # All but PPO of 7 billion parameters fit: its critic has an optimiser and gradients too.
    assert found.fits == ((algorithm, preset) != ("ppo", "qwen2.5-7b"))
    assert (found.seconds is not None) == found.fits
    json.dumps(found.record())


def test_ppo_on_3_billion_parameters_with_kl_stays_below_130_gib_on_an_h200():
    given = load_config(read_presets(["sokoban", "ppo", "qwen2.5-3b"]), ["algorithm.kl_coef=0.001"])
    found = plan(given, shape_of(given.model), GPUS["h200"])
    assert found.memory.peak_bytes < 130 * GIB
    assert found.memory.rows == 128


MANY = ("rollout.group_size=16", "rollout.max_context=1024", "optimizer.num_minibatches=1")
"""32 episodes of 1,024 tokens in one update: more than the largest micro-batch."""
ACTIVATIONS = replace(
    BARE, memory=replace(BARE.memory, prefill_tokens=1, released_from=1_000_000, forward_times=1)
)
"""Nothing that would need more than an update does, which has keys and values beside it."""


def exact_gpu(tokens: int, slack: int = 0) -> Gpu:
    """A GPU that holds exactly the update of micro-batches of `tokens`."""
    setup, large = setup_of(config(*MANY), tiny()), Gpu("large", 1.0)
    found = plan_memory(setup, large, ACTIVATIONS.memory, tokens=tokens, checkpointing=False)
    assert found.peak_phase == "update"
    return Gpu("exact", (found.peak_bytes + slack) / GIB)


def auto():
    """The choice is left open."""
    return config("engine.micro_batch_tokens=null", "engine.gradient_checkpointing=auto", *MANY)


def test_some_memory_is_left_to_spare():
    spare = replace(ACTIVATIONS, memory=replace(ACTIVATIONS.memory, filled_share=0.9))
    gpu = exact_gpu(8192)
    assert choose_batch(tiny(), auto(), gpu, given=spare) == (6144, False)
    larger = Gpu("larger", gpu.memory_gib / 0.89)
    assert choose_batch(tiny(), auto(), larger, given=spare) == (8192, False)


def test_the_largest_micro_batch_that_fits_is_chosen():
    for tokens in BATCH_SIZES:
        assert choose_batch(tiny(), auto(), exact_gpu(tokens), given=ACTIVATIONS) == (tokens, False)


def test_activations_are_computed_twice_only_where_nothing_fits_without():
    gpu = exact_gpu(BATCH_SIZES[-1], slack=-1)
    assert choose_batch(tiny(), auto(), gpu, given=ACTIVATIONS) == (2048, True)


def test_what_the_configuration_sets_is_not_chosen():
    large = Gpu("large", 1.0)
    assert choose_batch(tiny(), config(), large, given=BARE) == (100, False)
    twice = config("engine.gradient_checkpointing=true")
    assert choose_batch(tiny(), twice, large, given=BARE) == (100, True)
    small = Gpu("small", 1e-6)
    open_size = config("engine.micro_batch_tokens=null")
    assert choose_batch(tiny(), open_size, small, given=BARE) == (BATCH_SIZES[-1], False)


def test_activations_are_computed_twice_where_small_micro_batches_would_be_slower():
    """3 B with critic has room for 2,048 tokens without on this GPU: two trajectories at a time."""
    gpu = replace(GPUS["h200"], memory_gib=132.0)
    words = ["algorithm.kl_coef=0.001", "rollout.max_context=1000"]
    given = load_config(read_presets(["sokoban", "ppo", "qwen2.5-3b"]), words)
    tokens, checkpointing = choose_batch(shape_of(given.model), given, gpu)
    assert checkpointing
    assert tokens >= 8192
    unknown = replace(gpu, tflops=None)
    assert choose_batch(shape_of(given.model), given, unknown) == (2048, False)


def test_an_episode_is_never_split():
    given = config("rollout.max_context=3000", "engine.micro_batch_tokens=100")
    assert choose_batch(tiny(), given, Gpu("large", 1.0), given=BARE) == (3000, False)


def test_micro_batches_of_a_large_gpu_are_those_that_the_learner_takes():
    pytest.importorskip("transformers")
    from moored.engine.local.batches import MICRO_BATCH_TOKENS

    assert MICRO_BATCH_TOKENS[1] == BATCH_SIZES[0]


def test_a_plan_fits_up_to_the_last_byte():
    exact, given = exact_gpu(4096), config("engine.micro_batch_tokens=4096", *MANY)
    longest = Lengths(prompt=1, reply=1023)
    assert plan(given, tiny(), exact, longest, given=ACTIVATIONS).fits
    short = Gpu("short", exact.memory_gib * 0.8)
    found = plan(given, tiny(), short, longest, given=ACTIVATIONS)
    assert found.over == pytest.approx(0.25, abs=0.01)
    assert found.seconds is None


def test_a_plan_says_what_main_memory_is_for():
    words = ["algorithm.kl_coef=0.001", "optimizer.states=host"]
    given = load_config(read_presets(["sokoban", "grpo", "qwen2.5-7b"]), words)
    record = plan(given, shape_of(given.model), GPUS["h200"]).record()
    # 12 bytes of 7.616 billion parameters; 2 bytes of them are 14.2 GiB, pinned as 16.
    assert record["host_parts_gib"] == {"optimiser": 85.111, "reference": 16.0}
    assert record["host_gib"] == 101.111


def test_seconds_need_the_rates_of_the_gpu():
    assert plan(config(), tiny(), Gpu("large", 1.0)).seconds is None
    any_size = replace(MEASURED, speed=replace(MEASURED.speed, timed_from=0))
    found = plan(config(), tiny(), GPUS["h200"], given=any_size)
    assert found.seconds is not None
    assert list(found.seconds) == ["prefill", "decode", "advantages", "update", "publish"]
    record = found.record()
    assert record["step_s"] == pytest.approx(sum(found.seconds.values()), abs=1e-4)


def test_vllm_that_cannot_divide_its_heads_is_refused_as_a_run_refuses_it():
    words = ["engine.sampler=vllm", "engine.vllm.tensor_parallel=3"]
    with pytest.raises(MooredError, match="= 3 does not divide the 2 attention heads"):
        plan(config(*words), tiny(), GPUS["h200"])
    assert plan(config(*words), tiny(heads=3, kv_heads=3), GPUS["h200"]).fits


def test_planning_imports_no_torch():
    code = "import sys, moored.plan; moored.plan.shape_of('nano'); print('torch' in sys.modules)"
    done = run_warm([], code=code, slim=True)
    assert done.stdout == "False\n"
