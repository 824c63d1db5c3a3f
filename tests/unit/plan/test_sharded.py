"""Memory of a learner's rank and of a sampler's GPU, counted by hand."""

from __future__ import annotations

from dataclasses import replace

from moored.engine.fsdp.whole import Whole
from moored.plan.coefficients import MemoryCoefficients
from moored.plan.gpus import GIB, Gpu
from moored.plan.setup import Setup, setup_of
from moored.plan.sharded import (
    LearnerMemory,
    learner_choices,
    resident_bytes,
    sampler_bytes_kept,
    sampler_memory,
    whole_of,
)
from tests.unit.plan.tiny import BARE, config, tiny

LARGE, SMALL = Gpu("large", 1.0), Gpu("small", 100 / GIB)
"""On the small one nothing is whole during an update."""
LAYER = 4 * (4 + 2 * 2) + 4 * 4 + 3 * 4 * 8 + 2 * 4
"""Queries, keys and values, out; gated units; two norms."""
OUTER = 10 * 4 + 4
ALL = 2 * LAYER + OUTER


def setup(*options: str) -> Setup:
    return replace(setup_of(config(*options), tiny()), has_fast_learner=False)


def learner_memory(own: Setup, gpu: Gpu, given: MemoryCoefficients, *, ranks: int) -> LearnerMemory:
    """Of the first choice: the largest micro-batch."""
    return learner_choices(own, gpu, given, ranks=ranks)[0]


def test_a_rank_keeps_its_share_of_weights_moments_and_gradients():
    assert tiny().num_parameters == ALL
    found = learner_memory(setup(), SMALL, BARE.memory, ranks=4)
    assert found.whole == Whole(weights=False, gradients=False)
    update = found.phases["update"]
    # float32 weights and two moments: 12 bytes of each parameter over 4 ranks.
    assert update["policy"] == 12 * ALL // 4
    assert update["gradients"] == 4 * ALL // 4
    # Whole in bfloat16: two layers, and embedding with norm.
    assert update["gathered weights"] == 2 * (2 * LAYER + OUTER)
    assert update["gathered gradients"] == 6 * LAYER
    assert resident_bytes(setup(), BARE.memory, 4) == 12 * ALL // 4


def test_a_single_rank_gives_no_weights_back():
    update = learner_memory(setup(), SMALL, BARE.memory, ranks=1).phases["update"]
    assert update["gathered weights"] == 2 * ALL


def test_what_is_whole_during_an_update_has_a_tenth_of_the_memory():
    # Rounded weights, float32 gradients and a copy of these: 10 bytes of each parameter.
    whole = Gpu("whole", 100 * ALL / GIB)
    assert whole_of(setup(), whole) == Whole(weights=True, gradients=True)
    less = Gpu("less", (100 * ALL - 10) / GIB)
    assert whole_of(setup(), less) == Whole(weights=False, gradients=True)
    assert whole_of(setup(), Gpu("least", (40 * ALL - 10) / GIB)).gradients is False
    # Weights of both are whole, the critic's without a head of its own.
    two = Gpu("two", 200 * ALL / GIB)
    assert whole_of(setup("algorithm.name=ppo"), two).weights
    assert not whole_of(setup("algorithm.name=ppo"), whole).weights
    adapters = tiny().adapter_parameters(2)
    frozen = Gpu("frozen", 10 * (2 * (ALL + adapters) + 8 * adapters) / GIB)
    assert whole_of(setup("optimizer.lora_rank=2"), frozen).weights


def test_whole_weights_and_gradients_are_counted_on_every_rank():
    found = learner_memory(setup(), LARGE, BARE.memory, ranks=4)
    update, end = found.phases["update"], found.phases["sum over ranks"]
    assert update["policy"] == 12 * ALL // 4
    assert update["gradients"] == end["gradients"] == 4 * ALL
    assert update["gathered weights"] == end["gathered weights"] == 2 * ALL
    # Rounded until the pass ends; then sums in the order of ranks, when activations are gone.
    assert update["gathered gradients"] == 2 * ALL
    assert end["gathered gradients"] == 4 * ALL
    assert "activations" not in end


def test_whole_gradients_alone_leave_weights_in_layers():
    gpu = Gpu("between", 50 * ALL / GIB)
    phases = learner_memory(setup(), gpu, BARE.memory, ranks=4).phases
    assert phases["update"]["gradients"] == 4 * ALL
    assert phases["update"]["gathered weights"] == 2 * (2 * LAYER + OUTER)
    assert phases["update"]["gathered gradients"] == 6 * LAYER
    assert "sum over ranks" not in phases


def test_critic_and_reference_are_sharded_too():
    with_both = setup("algorithm.name=ppo", "algorithm.kl_coef=0.1")
    update = learner_memory(with_both, SMALL, BARE.memory, ranks=2).phases["update"]
    # The head is the embedding here, so the critic has as many parameters.
    assert update["critic"] == 12 * ALL // 2
    # Frozen, so it is kept as it is used.
    assert update["reference"] == 2 * ALL // 2
    assert update["gradients"] == 4 * 2 * ALL // 2


def test_under_lora_the_base_is_frozen_and_rounded():
    adapters = tiny().adapter_parameters(2)
    update = learner_memory(setup("optimizer.lora_rank=2"), SMALL, BARE.memory, ranks=2).phases[
        "update"
    ]
    assert update["policy"] == (2 * ALL + 12 * adapters) // 2
    assert update["gathered gradients"] == 0


def test_more_ranks_need_less_of_a_gpu_each():
    peaks = [learner_memory(setup(), LARGE, BARE.memory, ranks=n).peak_bytes for n in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_micro_batches_shrink_until_they_fit():
    open_size = setup(
        "engine.micro_batch_tokens=null",
        "rollout.max_context=2048",
        "rollout.num_groups=64",
        "optimizer.num_minibatches=1",
    )
    large = learner_memory(open_size, LARGE, BARE.memory, ranks=2)
    assert large.micro_batch_tokens == 24576
    exact = Gpu("exact", large.peak_bytes * 0.9 / GIB)
    assert learner_memory(open_size, exact, BARE.memory, ranks=2).micro_batch_tokens == 16384


def test_a_sampler_gpu_has_its_share_of_weights_and_whole_rows():
    found = sampler_memory(setup(), LARGE, BARE.memory, ways=1, wanted_rows=5)
    assert found.rows == 5
    # 2 layers x (keys + values) of width 2 x 2 bytes = 16 bytes a token, 16 tokens.
    assert found.parts["keys and values"] == 5 * 16 * 16
    assert found.parts["weights"] == 2 * ALL
    two = sampler_memory(setup(), LARGE, BARE.memory, ways=2, wanted_rows=5)
    assert two.parts["weights"] == ALL
    # One head of keys cannot be divided.
    assert two.parts["keys and values"] == found.parts["keys and values"]


def test_a_sampler_takes_as_many_rows_as_fit_but_no_fewer_than_eight():
    many = sampler_memory(setup(), LARGE, BARE.memory, ways=1, wanted_rows=100)
    fixed = many.peak_bytes - 100 * (16 * 16 + 40)
    exact = Gpu("exact", (fixed + 30 * (16 * 16 + 40)) / GIB)
    found = sampler_memory(setup(), exact, BARE.memory, ways=1, wanted_rows=100)
    assert found.rows == 30
    assert found.peak_bytes <= exact.memory_bytes
    small = sampler_memory(setup(), Gpu("small", 1e-6), BARE.memory, ways=1, wanted_rows=100)
    assert small.rows == 8
    assert small.peak_bytes > 1e-6 * GIB


def test_the_plain_sampler_writes_all_rows_at_once_and_copies_them_between_turns():
    plain, small = setup("engine.sampler=plain"), Gpu("small", 1e-6)
    found = sampler_memory(plain, small, BARE.memory, ways=1, wanted_rows=100)
    assert found.rows == 100
    assert found.parts["keys and values"] == 2 * 100 * 16 * 16
    assert not found.fits
    # With several GPUs, or where it was chosen, vLLM writes instead.
    vllm = sampler_memory(plain, small, BARE.memory, ways=2, wanted_rows=100, vllm_share=0.9)
    assert vllm.rows == 8


def test_during_updates_a_sampler_keeps_weights_and_of_small_models_keys_and_values():
    kept = sampler_bytes_kept(setup(), LARGE, BARE.memory, 1000)
    assert kept == 2 * ALL
    small = replace(BARE.memory, released_from=10**9)
    assert sampler_bytes_kept(setup(), LARGE, small, 1000) == 2 * ALL + 1000
    assert sampler_bytes_kept(setup("engine.sampler=plain"), LARGE, small, 1000) == 2 * ALL
    vllm = setup("engine.sampler=vllm", "engine.vllm.memory_share=0.25")
    assert sampler_bytes_kept(vllm, LARGE, BARE.memory, 1000) == GIB // 4
