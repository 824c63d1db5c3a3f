"""Layouts of a cluster: how they are divided, timed and refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moored.config import Config, load_config
from moored.engine.fsdp.whole import Whole
from moored.errors import MooredError
from moored.plan import shape_of
from moored.plan.advice import with_options
from moored.plan.cluster import plan_cluster
from moored.plan.cluster_work import DRIVER_TURNS_PER_S, ClusterWork
from moored.plan.coefficients import MEASURED
from moored.plan.gpus import GPUS
from moored.plan.layouts import IN_TURN, OVERLAPPED, TOGETHER, ClusterPlan
from moored.plan.links import LINK_SHARE, make_cluster
from moored.plan.seconds import Lengths, Work, longest_lengths
from moored.plan.setup import setup_of
from moored.plan.splits import possible_learners
from moored.presets import read_presets

SIZES = {
    "Qwen/Qwen2.5-0.5B": 0.5,
    "Qwen/Qwen2.5-1.5B": 1.5,
    "Qwen/Qwen2.5-3B": 3.0,
    "Qwen/Qwen2.5-7B": 7.6,
    "Qwen/Qwen2.5-14B": 14.8,
    "Qwen/Qwen2.5-32B": 32.8,
    "meta-llama/Llama-3.1-70B": 70.6,
}


def options(model: str, *words: str) -> Config:
    given = ["rollout.num_groups=64", "rollout.max_context=4096", f"model={model}", *words]
    return load_config(read_presets(["sokoban", "grpo"]), given)


def planned(model: str, num_gpus: int, *words: str, gpu: str = "h200", **given) -> ClusterPlan:
    config = options(model, *words)
    cluster = make_cluster(GPUS[gpu], num_gpus)
    lengths = longest_lengths(config, turns=5)
    return plan_cluster(config, shape_of(model), cluster, lengths, **given)


@pytest.mark.parametrize("words", [[], ["engine.kind=ray", "rollout.max_lag=1"]])
def test_the_configuration_takes_the_options_of_every_layout(words):
    found = planned("Qwen/Qwen2.5-7B", 8, *words)
    assert len(found.layouts) == 3
    for layout in found.layouts.values():
        changed = with_options(found.config, layout.options)
        assert changed.engine.kind == layout.options["engine.kind"]


@pytest.mark.parametrize("model", SIZES)
def test_every_size_from_half_a_billion_to_70_is_planned_on_64_gpus(model):
    found = planned(model, 64)
    assert found.setup.shape.num_parameters == pytest.approx(SIZES[model] * 1e9, rel=0.04)
    assert {IN_TURN, OVERLAPPED} <= set(found.layouts)
    for layout in found.layouts.values():
        for memory in (layout.learner, layout.sampler):
            assert memory.peak_bytes <= found.cluster.gpu.memory_bytes
        taken = layout.replicas * layout.ways + layout.idle
        taken += 0 if layout.name == TOGETHER else layout.learners
        assert taken == 64
    json.dumps(found.record())


def test_larger_models_take_longer_steps():
    steps = [planned(model, 64).best.step_s for model in SIZES]
    assert steps == sorted(steps)


def test_whole_weights_of_70_billion_do_not_fit_beside_a_learner():
    found = planned("meta-llama/Llama-3.1-70B", 64)
    assert TOGETHER not in found.layouts
    assert found.misfits[TOGETHER].startswith("a GPU with learner and whole sampler needs 1")
    # 141 GB of bfloat16 weights need more than one H200 for a sampler.
    assert all(layout.ways > 1 for layout in found.layouts.values())


def test_overlap_takes_the_longer_of_rollout_and_learning_and_in_turn_their_sum():
    found = planned("Qwen/Qwen2.5-7B", 64, "engine.ray.publish=direct")
    both, turn = found.layouts[OVERLAPPED], found.layouts[IN_TURN]
    publish = both.seconds["publish"]
    assert both.step_s == pytest.approx(max(both.rollout_s, both.learn_s) + publish)
    assert turn.step_s == pytest.approx(turn.rollout_s + turn.learn_s + turn.seconds["publish"])
    assert found.best is both


def test_no_other_split_of_the_same_gpus_is_faster():
    best = planned("Qwen/Qwen2.5-7B", 16).layouts[OVERLAPPED]
    steps = {}
    for samplers in range(8, 16):
        other = planned("Qwen/Qwen2.5-7B", 16, samplers=samplers).layouts.get(OVERLAPPED)
        if other is not None:
            steps[other.learners] = other.step_s
    assert min(steps.values()) == steps[best.learners] == best.step_s


def test_very_many_small_nodes_are_dealt_out_several_at_a_time():
    """All 16,383 splits of so many nodes took seconds; the best of all has 820 learners."""
    cluster = make_cluster(GPUS["h100"], 16_384, gpus_per_node=1)
    words = ["rollout.num_groups=16384", "collapse.num_pairs=16384"]
    config, shape = options("Qwen/Qwen2.5-7B", *words), shape_of("Qwen/Qwen2.5-7B")
    tried = possible_learners(setup_of(config, shape), cluster, None)
    assert tried == [*range(1, 9), *range(16, 16_384, 8)]
    exact = plan_cluster(config, shape, cluster, longest_lengths(config, turns=5), samplers=15_564)
    steps = [
        plan_cluster(
            config, shape, cluster, longest_lengths(config, turns=5), samplers=16_384 - number
        ).best.step_s
        for number in tried
        if abs(number - 820) < 8
    ]
    assert min(steps) == pytest.approx(exact.best.step_s, rel=1e-3)
    # As many as before where they are few.
    few = make_cluster(GPUS["h100"], 64, gpus_per_node=1)
    assert possible_learners(setup_of(config, shape), few, None) == [*range(1, 64)]


def test_ranks_need_no_more_memory_at_the_start_than_later():
    # They load their own part of 61 GiB of weights, so that the layout with the shortest step fits.
    found = planned("Qwen/Qwen2.5-32B", 64)
    assert found.best is found.layouts[TOGETHER]
    assert found.best.learner.peak_bytes < 139 * 2**30


def test_samplers_have_one_gpu_unless_that_is_too_small():
    for layout in planned("Qwen/Qwen2.5-14B", 64).layouts.values():
        assert layout.ways == 1
    # vLLM has 90 % of a GPU: 35.5 GiB, of which half of the weights leave 4.9.
    for layout in planned("Qwen/Qwen2.5-32B", 64, gpu="a100-40").layouts.values():
        assert layout.ways == 4


def test_given_samplers_and_tensor_parallelism_are_taken():
    found = planned("Qwen/Qwen2.5-7B", 16, samplers=8, ways=4)
    assert TOGETHER not in found.layouts
    for layout in found.layouts.values():
        assert (layout.learners, layout.replicas, layout.ways) == (8, 2, 4)


def test_replicas_stay_within_a_node_and_what_is_left_is_idle():
    # 12 learners fill the first node and half of the second, which has room for one replica of 4.
    found = planned("Qwen/Qwen2.5-7B", 16, samplers=7, ways=4)
    assert {(one.replicas, one.idle) for one in found.layouts.values()} == {(1, 3)}


VLLM = ("engine.sampler=vllm", "optimizer.lora_rank=64")


def test_vllm_beside_a_learner_has_no_more_than_its_share():
    found = planned("Qwen/Qwen2.5-7B", 8, *VLLM, "engine.vllm.memory_share=0.2")
    sampler = found.layouts[TOGETHER].sampler
    # 28.0 GiB: 14.2 of weights, 4.8 to read prompts, 0.9 of CUDA; slots of 0.22 GiB in the rest.
    own = {part: size for part, size in sampler.parts.items() if part != "learner"}
    assert sum(own.values()) == pytest.approx(0.2 * found.cluster.gpu.memory_bytes, rel=1e-6)
    assert sampler.rows == 36


def test_vllm_whose_share_has_no_room_for_its_weights_does_not_fit():
    found = planned("Qwen/Qwen2.5-32B", 8, *VLLM, "engine.vllm.memory_share=0.3")
    assert TOGETHER not in found.layouts
    assert found.misfits[TOGETHER].endswith(" GiB that engine.vllm.memory_share=0.3 leaves")


def test_vllm_on_gpus_of_its_own_is_given_most_of_them():
    found = planned("Qwen/Qwen2.5-7B", 8, *VLLM, samplers=4)
    for layout in found.layouts.values():
        assert layout.options["engine.vllm.memory_share"] == 0.9
        assert layout.options["engine.vllm.tensor_parallel"] == 1
        assert layout.sampler.peak_bytes <= 0.9 * found.cluster.gpu.memory_bytes


def test_one_gpu_is_not_divided():
    with pytest.raises(MooredError, match="there is one only; leave it out, or raise --gpus"):
        planned("Qwen/Qwen2.5-0.5B", 1, samplers=1)


def test_ranks_that_have_a_gpu_each_are_told_to_divide_no_model():
    """`moored train` refuses engine.vllm.tensor_parallel with torchrun."""
    found = planned("Qwen/Qwen2.5-7B", 8, *VLLM, "engine.vllm.tensor_parallel=2")
    changed = with_options(found.config, found.layouts[TOGETHER].options)
    assert changed.engine.vllm.tensor_parallel == 1
    assert changed.engine.vllm.memory_share == found.config.engine.vllm.memory_share


def test_more_gpus_than_groups_say_how_many_groups_would_let_them_work_together():
    found = planned("Qwen/Qwen2.5-7B", 16, "rollout.num_groups=8")
    assert found.misfits[TOGETHER].startswith("16 ranks share 8 groups, so some would have none")
    assert "set rollout.num_groups=16 or more" in found.misfits[TOGETHER]


def test_no_more_ranks_learn_than_there_are_groups():
    found = planned("Qwen/Qwen2.5-7B", 64, "rollout.num_groups=12")
    assert TOGETHER not in found.layouts
    assert all(layout.learners <= 12 for layout in found.layouts.values())


def work(model: str = "Qwen/Qwen2.5-7B", num_gpus: int = 64, *words: str) -> ClusterWork:
    config = options(model, *words)
    lengths = longest_lengths(config, turns=5)
    cluster = make_cluster(GPUS["h200"], num_gpus)
    return ClusterWork(setup_of(config, shape_of(model)), cluster, MEASURED, lengths)


def test_publishing_is_a_gather_a_chain_over_one_card_and_a_copy():
    found, parameters = work(), 7_615_616_512
    gather = found.cluster.gather_s(2 * parameters, 32, calls=28)
    chain = 2 * parameters / (LINK_SHARE * 50e9)
    copy = 2 * 2 * parameters / 4.8e12
    assert found.publish(32, 32, 1, "direct") == pytest.approx(gather + chain + copy)
    # About 15 GB: 0.38 s over a card of 400 Gbit/s, much less within a node.
    assert chain == pytest.approx(0.381, abs=0.001)
    assert found.publish(4, 4, 1, "direct") < 0.1


def test_through_the_object_store_weights_go_by_main_memory_and_from_node_to_node():
    found, num_bytes = work(), 2 * 7_615_616_512
    gather = found.cluster.gather_s(num_bytes, 32, calls=28)
    # Out of a GPU and into one, into the store, and three rounds until all of 8 nodes have them.
    copies, put, sends = 2 * num_bytes / 6e9, num_bytes / 2.5e9, 3 * num_bytes / 1e9
    assert found.publish(32, 32, 1, "store") == pytest.approx(gather + copies + put + sends)
    one_node = found.cluster.gather_s(num_bytes, 4, calls=28) + copies + put
    assert found.publish(4, 4, 1, "store") == pytest.approx(one_node)


def test_the_driver_takes_its_measured_time_for_every_turn():
    assert work().driver() == pytest.approx(1024 * 5 / DRIVER_TURNS_PER_S)


def test_tensor_parallelism_shortens_a_decoding_step_less_than_it_divides_it():
    found = work("Qwen/Qwen2.5-32B")
    one, four = (found.decode_step(64, ways, is_vllm=True) for ways in (1, 4))
    assert one / 4 < four < one


# What `vllm_row_s` says was measured: it is added to steps of moored's own sampler.
@pytest.mark.parametrize(
    ("model", "rows", "measured_ms", "planned_ms"),
    [
        ("0.5B", 128, 4.0, 3.7),
        ("0.5B", 1024, 29, 27),
        ("3B", 128, 4.7, 5.8),
        ("3B", 1024, 39, 40),
    ],
)
def test_steps_of_vllm_are_planned_within_a_quarter_of_the_measured(
    model, rows, measured_ms, planned_ms
):
    name, cluster = f"Qwen/Qwen2.5-{model}", make_cluster(GPUS["h200"], 1)
    lengths = Lengths(prompt=512, reply=128)
    found = ClusterWork(setup_of(options(name), shape_of(name)), cluster, MEASURED, lengths)
    step_ms = 1000 * found.decode_step(rows, 1, is_vllm=True)
    assert step_ms == pytest.approx(measured_ms, rel=0.25)
    assert step_ms == pytest.approx(planned_ms, rel=0.02)


def test_links_bound_updates_where_the_network_is_slow():
    config = options("Qwen/Qwen2.5-7B")
    fast = planned("Qwen/Qwen2.5-7B", 64).layouts[TOGETHER]
    assert fast.update.links_s < fast.update.compute_s
    slow = make_cluster(GPUS["h200"], 64, network_gbits=100.0)
    found = plan_cluster(config, shape_of(config.model), slow, longest_lengths(config, turns=5))
    layout = found.layouts[TOGETHER]
    assert layout.update.links_s > layout.update.compute_s
    assert layout.bound == "links of the update"


def test_every_micro_batch_gathers_weights_twice_and_sums_gradients_once():
    found = work("Qwen/Qwen2.5-7B", 64, "algorithm.kl_coef=0", "optimizer.num_minibatches=1")
    parameters, cluster = 7_615_616_512, found.cluster
    memory = planned("Qwen/Qwen2.5-7B", 64).layouts[TOGETHER].learner
    few = replace(memory, micro_batch_tokens=10**9)
    gather = cluster.gather_s(2 * parameters, 64, calls=28)
    sums = cluster.gather_s(4 * parameters, 64, calls=28)
    assert found.update(64, few).links_s == pytest.approx(2 * gather + sums)
    # 64 prompts of 300 and 1,024 continuations of 2,240 tokens: 36,140 on each of 64 ranks.
    half = replace(memory, micro_batch_tokens=20_000)
    assert found.update(64, half).links_s == pytest.approx(2 * (2 * gather + sums))


def test_episodes_are_not_split_between_micro_batches():
    words = ("algorithm.kl_coef=0", "optimizer.num_minibatches=1")
    found = work("Qwen/Qwen2.5-7B", 64, *words)
    memory = planned("Qwen/Qwen2.5-7B", 64).layouts[TOGETHER].learner
    # 16 episodes of 2,259 tokens on each rank: of 4,000 tokens one at a time, of 5,000 two.
    links = [found.update(64, replace(memory, micro_batch_tokens=n)).links_s for n in (4000, 5000)]
    assert links[0] == pytest.approx(2 * links[1])


def test_launches_of_one_rank_are_those_of_one_gpu_whose_reference_stays_there():
    words = ("algorithm.kl_coef=0.001", "optimizer.num_minibatches=2", "rollout.num_groups=4")
    found = work("Qwen/Qwen2.5-7B", 1, *words)
    stays = replace(MEASURED.speed, released_from=10**12)
    one_gpu = Work(found.setup, GPUS["h200"], stays, found.lengths)
    memory = planned("Qwen/Qwen2.5-7B", 64).layouts[TOGETHER].learner
    for tokens in (2048, 4096, 8192):
        one = replace(memory, micro_batch_tokens=tokens, checkpointing=False)
        update = found.update(1, one)
        assert update.compute_s == pytest.approx(one_gpu.update_passes(tokens, False))


def test_weights_in_float32_are_gathered_in_float32():
    exact, rounded = work("Qwen/Qwen2.5-7B", 8, "engine.dtype=float32"), work("Qwen/Qwen2.5-7B", 8)
    copies = 2 * 2 * 7_615_616_512 / 4.8e12
    gather = 2 * 7_615_616_512 * 7 / 8 / (LINK_SHARE * 450e9)
    both = exact.publish_in_place(8), rounded.publish_in_place(8)
    assert both[0] - both[1] == pytest.approx(gather + copies)


def test_what_is_whole_during_an_update_is_gathered_and_summed_once():
    found = work("Qwen/Qwen2.5-0.5B", 64, "algorithm.kl_coef=0", "optimizer.num_minibatches=1")
    parameters, cluster = 494_032_768, found.cluster
    memory = planned("Qwen/Qwen2.5-0.5B", 64).layouts[TOGETHER].learner
    assert memory.whole == Whole(weights=True, gradients=True)
    pieces = replace(memory, micro_batch_tokens=20_000)
    gather = cluster.gather_s(2 * parameters, 64, calls=1)
    sums = cluster.gather_s(4 * parameters, 64, calls=1)
    update = found.update(64, pieces)
    assert update.links_s == pytest.approx(gather + sums)
    # Nothing is computed meanwhile.
    assert update.seconds == pytest.approx(update.compute_s + update.links_s + update.optimizer_s)
    layers = replace(pieces, whole=Whole(weights=False, gradients=True))
    gather = cluster.gather_s(2 * parameters, 64, calls=24)
    sums = cluster.gather_s(4 * parameters, 64, calls=24)
    assert found.update(64, layers).links_s == pytest.approx(2 * 2 * gather + sums)


def test_a_rank_with_one_sample_more_holds_up_all_others():
    found = work("Qwen/Qwen2.5-7B", 64, "optimizer.num_minibatches=1")
    memory = planned("Qwen/Qwen2.5-7B", 64).layouts[TOGETHER].learner
    even, odd = found.update(512, memory).compute_s, found.update(513, memory).compute_s
    assert odd == pytest.approx(even)


@pytest.mark.parametrize(
    ("given", "words", "message"),
    [
        ({"samplers": 8}, (), "--samplers must leave GPUs to learners: from 1 to 7, got 8"),
        ({"samplers": 0}, (), "--samplers must leave GPUs to learners"),
        ({}, (*VLLM, "engine.vllm.server=http://host:8000"), "engine.vllm.server is for one GPU"),
        ({}, (*VLLM, "engine.vllm.server=start"), "every rank and replica has a vLLM of its own"),
        ({"samplers": -60}, (), "--samplers must leave GPUs to learners: from 1 to 7, got -60"),
        ({}, ("engine.dtype=float32",), "engine.dtype=float32 is not planned for a cluster"),
        ({"ways": 3}, (), "--tensor-parallel must divide the 28 heads of the model, got 3"),
        ({"ways": 14}, (), "more than the 8 GPUs of a node, and a replica stays within one"),
        ({}, ("optimizer.states=host",), "optimizer.kind=adamw_8bit are for one GPU"),
        ({}, ("optimizer.kind=adamw_8bit",), "because several GPUs share the states"),
        ({"samplers": 1}, ("rollout.num_groups=6",), "7 learners share 6 groups, so some would"),
    ],
)
def test_a_split_that_cannot_be_is_refused(given, words, message):
    with pytest.raises(MooredError, match=message):
        planned("Qwen/Qwen2.5-7B", 8, *words, **given)
