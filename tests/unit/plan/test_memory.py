"""Memory by part, each worked out by hand on a tiny shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moored.models.shapes import shape_of
from moored.plan import memory
from moored.plan.coefficients import FORWARD_TOKENS, MEASURED, MemoryCoefficients
from moored.plan.gpus import GIB, Gpu
from moored.plan.memory import Memory, plan_memory
from moored.plan.setup import setup_of
from tests.unit.plan.tiny import BARE, config, tiny

LARGE = Gpu("large", 1.0)


def memory_of(
    *options: str,
    gpu: Gpu = LARGE,
    tokens: int = 10,
    given: MemoryCoefficients = BARE.memory,
    **changes,
) -> Memory:
    setup = setup_of(config(*options), tiny(**changes))
    return plan_memory(setup, gpu, given, tokens=tokens, checkpointing=False)


def test_bfloat16_weights_are_held_once_and_the_optimiser_has_float32_masters():
    update = memory_of().phases["update"]
    # 348 parameters: 2 bytes of weight, master and two means of 4 bytes, a gradient of 4.
    assert update["policy weights"] == 2 * 348
    assert update["policy optimiser"] == 12 * 348
    assert update["gradients"] == 4 * 348
    assert {"critic weights", "reference weights", "sampler weights"}.isdisjoint(update)


def test_float32_needs_no_masters():
    update = memory_of("engine.dtype=float32").phases["update"]
    assert update["policy weights"] == 4 * 348
    assert update["policy optimiser"] == 8 * 348
    assert update["gradients"] == 4 * 348


def test_a_critic_is_a_trunk_of_its_own():
    found = memory_of("algorithm.name=ppo", is_tied=False).phases
    assert found["rollout"]["critic weights"] == 2 * 348
    assert found["rollout"]["critic optimiser"] == 12 * 348
    assert found["rollout"]["policy weights"] == 2 * 388
    assert found["update"]["gradients"] == 4 * (388 + 348)
    # Activations are of one of the two at a time.
    alone = memory_of(is_tied=False).phases["update"]
    assert found["update"]["activations"] == alone["activations"]


KL = "algorithm.kl_coef=0.1"


def test_a_reference_is_bfloat16_weights_alone():
    found = memory_of(KL, given=replace(BARE.memory, released_from=349))
    assert list(found.phases) == ["rollout", "scoring", "update"]
    for parts in found.phases.values():
        assert parts["reference weights"] == 2 * 348
    assert found.host_bytes == 0


def test_the_reference_of_a_large_model_is_on_the_gpu_only_while_it_scores():
    given = replace(BARE.memory, released_from=348, recorded_tokens=8)
    found, alone = memory_of(KL, given=given), memory_of(given=given)
    assert list(found.phases) == ["rollout", "scoring", "reference", "update"]
    assert {phase: found.phases[phase] for phase in alone.phases} == alone.phases
    # Weights of 2 bytes, and passes of 40 tokens without gradients: 128 bytes for each, 4 for each
    # of its 10 logits. Of keys and values only what is recorded is left: 8 tokens of 104 bytes.
    own = {"reference weights": 2 * 348, "activations": 40 * 128, "logits": 4 * 400}
    resident = {"policy weights": 2 * 348, "policy optimiser": 12 * 348}
    outside = {"recorded steps": 8 * 104, "CUDA": 0, "reserve": 0}
    assert found.phases["reference"] == own | resident | outside
    assert found.allocated_bytes("reference") == sum(own.values()) + sum(resident.values())
    # Its 696 bytes of pinned memory are taken as 1,024.
    assert (found.host, alone.host) == ({"reference": 1024}, {})


def test_while_a_reference_scores_other_samplers_keep_what_is_theirs():
    plain = memory_of(KL, "engine.sampler=plain").phases["reference"]
    assert plain["sampler weights"] == 2 * 348
    assert {"keys and values", "recorded steps"}.isdisjoint(plain)
    share = ("engine.sampler=vllm", "engine.vllm.memory_share=0.1")
    assert memory_of(KL, *share, gpu=Gpu("small", 20_000 / GIB)).phases["reference"]["vLLM"] == 2000


@pytest.mark.parametrize(("model", "gib"), [("0.5B", None), ("1.5B", 4), ("3B", 8), ("7B", 16)])
def test_references_from_a_billion_parameters_on_wait_in_main_memory(model, gib):
    def planned(*words: str) -> Memory:
        setup = setup_of(config(KL, *words), shape_of(f"Qwen/Qwen2.5-{model}"))
        return plan_memory(setup, LARGE, MEASURED.memory, tokens=4096, checkpointing=True)

    found, adapters = planned(), planned("optimizer.lora_rank=8")
    # Pinned memory is a power of two: of 3.1, 6.2 and 15.2 GB.
    assert found.host == ({} if gib is None else {"reference": gib * GIB})
    waits = [phase for phase, parts in found.phases.items() if "reference weights" in parts]
    assert waits == (["rollout", "scoring", "update"] if gib is None else ["reference"])
    assert adapters.host == {}
    assert list(adapters.phases) == ["rollout", "scoring", "update"]
    assert not any("reference weights" in parts for parts in adapters.phases.values())
    both = planned("optimizer.states=host")
    assert both.host_bytes == both.host["optimiser"] + found.host_bytes


def test_the_plain_sampler_has_a_copy_in_bfloat16_only():
    plain = "engine.sampler=plain"
    assert memory_of(plain).phases["scoring"]["sampler weights"] == 2 * 348
    assert memory_of(is_fast=False).phases["scoring"]["sampler weights"] == 2 * 348
    assert "sampler weights" not in memory_of(plain, "engine.dtype=float32").phases["scoring"]


def test_vllm_takes_its_share_at_the_start_and_holds_weights_keys_and_values_in_it():
    gpu = Gpu("small", 20_000 / GIB)
    found = memory_of("engine.sampler=vllm", "engine.vllm.memory_share=0.1", gpu=gpu)
    for parts in found.phases.values():
        assert parts["vLLM"] == 2_000
        assert {"sampler weights", "keys and values"}.isdisjoint(parts)
    assert "activations" not in found.phases["rollout"]
    # An episode of 16 tokens has 256 bytes of keys and values: 2,000 - 2 x 348 hold five of eight.
    assert found.rows == 5


def test_lora_trains_adapters_over_one_base_of_policy_critic_and_reference():
    words = ("optimizer.lora_rank=3", "algorithm.name=ppo", KL)
    found = memory_of(*words)
    assert "reference" not in found.phases
    update = found.phases["update"]
    # 384 adapter parameters, of policy and of critic.
    assert update["policy weights"] == 2 * (348 + 384)
    assert update["critic weights"] == 2 * 384
    assert update["policy optimiser"] == update["critic optimiser"] == 12 * 384
    assert update["gradients"] == 4 * 2 * 384
    assert "reference weights" not in update
    # Replies are written with the sums of base and adapters.
    assert update["sampler weights"] == 2 * 348
    exact = memory_of("engine.dtype=float32", *words).phases["update"]
    assert exact["sampler weights"] == 4 * 348


def test_states_on_the_host_leave_the_gpu():
    found = memory_of("optimizer.states=host")
    assert found.phases["update"]["policy optimiser"] == 0
    assert found.host_bytes == 12 * 348
    # There float32 weights have masters too.
    assert memory_of("optimizer.states=host", "engine.dtype=float32").host_bytes == 12 * 348


def test_8_bit_moments_are_two_bytes_and_their_scales():
    update = memory_of("optimizer.kind=adamw_8bit").phases["update"]
    # Master 4, two bytes of moments, and two float32 scales for 256 parameters.
    assert update["policy optimiser"] == int((4 + 2 + 8 / 256) * 348)


def test_a_slot_for_every_row_every_fourth_prompt_and_the_idle_ones():
    rollout = memory_of().phases["rollout"]
    # 8 rows, 2 shared prompts and 1: slots of 16 tokens of 16 bytes.
    assert rollout["keys and values"] == 11 * 16 * 16
    # 8 x 16 tokens at most: 104 bytes each, as counted for prefill.
    assert rollout["activations"] == 8 * 16 * 104
    assert rollout["logits"] == 8 * 10 * 4


def test_rows_are_padded_as_the_sampler_pads_them():
    # 3 x 6 = 18 episodes: the next of 8, 12, 16, 24.
    found = memory_of("rollout.num_groups=3", "rollout.group_size=6")
    assert found.rows == 24
    assert found.phases["rollout"]["keys and values"] == (24 + 6 + 1) * 256


def test_a_gpu_with_little_memory_writes_fewer_rows_at_a_time():
    # Beside 14 bytes for each parameter, room for 20 slots of 256 bytes in 60 % of the rest.
    size = 14 * 348 + int(20 * 256 / 0.6) + 1
    # 20 slots are those of 15 rows: 20 x 4 / 5 - 1.
    found = memory_of("rollout.num_groups=8", gpu=Gpu("small", size / GIB))
    assert found.rows == 15


def test_an_evaluation_is_written_with_more_rows():
    assert memory_of("evaluation.every=5", "evaluation.num_tasks=16").rows == 16


def test_scoring_and_updating_have_the_activations_of_a_micro_batch():
    found = memory_of(tokens=10).phases
    # Without gradients 4 times the tokens: 128 bytes for each, and 4 for each of its 10 logits.
    assert found["scoring"]["activations"] == 40 * 128
    assert found["scoring"]["logits"] == 4 * 400
    # Two fused layers of 136 bytes and 76 outside of them.
    assert found["update"]["activations"] == 10 * (2 * 136 + 76)
    # 8 bytes for each logit, float32 gradients of the head and of the hidden states.
    assert found["update"]["backward pass"] == 8 * 100 + 4 * 40 + 10 * 16


@pytest.mark.parametrize(
    ("option", "layer"), [("compile=true", 208), ("learner=plain", 208), ("dtype=float32", 288)]
)
def test_layers_are_fused_unless_compiled_plain_or_in_float32(option, layer):
    found = memory_of(f"engine.{option}", tokens=10).phases["update"]
    assert found["activations"] == 10 * (2 * layer + 76)


def test_a_micro_batch_is_not_larger_than_what_there_is():
    # 8 episodes of up to 16 tokens are scored; each of 4 minibatches has 2 of them.
    found = memory_of(tokens=1000).phases
    assert found["scoring"]["activations"] == 128 * 128
    assert found["update"]["activations"] == 32 * (2 * 136 + 76)


def test_keys_and_values_are_released_before_updates_of_large_models():
    found = memory_of().phases
    assert "keys and values" in found["scoring"]
    assert "keys and values" not in found["update"]
    kept = replace(BARE.memory, released_from=349)
    assert "keys and values" in memory_of(given=kept).phases["update"]
    # The plain sampler forgets its sessions when they end.
    plain = memory_of("engine.sampler=plain", given=kept).phases
    assert [phase for phase in plain if "keys and values" in plain[phase]] == ["rollout"]


def test_recorded_passes_keep_their_memory_and_gradients():
    recorded = replace(BARE.memory, recorded_to=348)
    found = memory_of(given=recorded)
    update = found.phases["update"]
    passes = update["activations"] + update["backward pass"]
    for phase in ("rollout", "scoring"):
        assert found.phases[phase]["gradients"] == 4 * 348
        assert found.phases[phase]["recorded passes"] == passes
    assert "recorded passes" not in update
    # Torch does not count what a graph keeps.
    whole = sum(found.phases["rollout"].values())
    assert found.allocated_bytes("rollout") == whole - passes
    # Only with the fast learner.
    plain = memory_of("engine.learner=plain", given=recorded).phases["rollout"]
    assert "recorded passes" not in plain


def test_peak_and_allocated_bytes_are_sums():
    measured = replace(MEASURED.memory, recorded_to=0, released_from=0, recorded_tokens=8)
    found = memory_of(given=measured)
    update = found.phases["update"]
    # 8 tokens of 104 bytes, as counted for prefill.
    assert update["recorded steps"] == 8 * 104
    # 0.6 GiB for the context and 0.25 GiB of workspace.
    assert update["CUDA"] == int(0.6 * GIB) + GIB // 4
    own = update["gradients"] + update["activations"] + update["backward pass"]
    assert update["reserve"] == int(0.04 * (own + update["recorded steps"]))
    assert found.allocated_bytes("update") == own + 14 * 348
    assert found.peak_phase == "rollout"
    assert found.peak_bytes == sum(found.phases["rollout"].values())


def test_ppo_on_3_billion_parameters_with_critic_and_kl_by_hand():
    words = ["algorithm.name=ppo", "algorithm.kl_coef=0.001", "rollout.num_groups=8"]
    words += ["rollout.group_size=16", "rollout.max_context=4096"]
    shape = shape_of("Qwen/Qwen2.5-3B-Instruct")
    setup = setup_of(config(*words), shape)
    found = plan_memory(setup, Gpu("h200", 139.8), BARE.memory, tokens=24576, checkpointing=True)
    n = 3_085_938_688  # the head is tied, so that the critic's trunk has as many
    # Policy and critic 14 bytes: 28 bytes a parameter, 80.5 GiB.
    resident = 28 * n
    # 36 layers with 2 KV heads of 128: 36,864 bytes a token; 128 + 32 + 1 slots of 4,096.
    cache = 161 * 4096 * 36_864
    # 32,768 tokens: 4 x 2,048 + 2 x (2 x 2,048 + 2 x 2,048 + 2 x 256 + 3 x 11,008); 128 rows of
    # 151,936 logits.
    rollout = resident + cache + 32_768 * 91_648 + 128 * 151_936 * 4
    assert found.allocated_bytes("rollout") == rollout
    # The reference has 2 bytes a parameter, passes of 24,576 tokens (3 x 4 x 2,048 + 4 x 2,048 +
    # 3 x 2 x 11,008 + 2 x 4 x 128 bytes each) and 2**28 logits of 4 bytes.
    reference = resident + 2 * n + 24_576 * 99_840 + 4 * 2**28
    assert found.allocated_bytes("reference") == reference
    # 24,576 tokens: 36 inputs of 8,192; outside ids 8, angles 1,024, norm 16,388, hidden 8,192.
    saved = 24_576 * (36 * 8_192 + 8 + 1_024 + 16_388 + 8_192)
    # Most is needed at the head: gradients of hidden states and, in float32, of its weights; 2**28
    # logits of 4 bytes with derivatives of 2 bytes twice. A layer computed again needs less:
    # 12 x 2,048 + 4 x 2,048 + 4 x 256 + 6 x 11,008 + 4 x 16 + 8 bytes for each token, less its
    # input; backwards 4 x 11,008 + 4 x 2,048; norm and hidden states are gone.
    work = 24_576 * 8_192 + 4 * 151_936 * 2_048 + 8 * 2**28
    layer = 12 * 2_048 + 4 * 2_048 + 4 * 256 + 6 * 11_008 + 4 * 16 + 8 - 8_192
    backwards = 4 * 11_008 + 4 * 2_048 - 16_388 - 8_192
    assert 24_576 * (layer + backwards) + 2 * 151_936 * 2_048 < work
    # Policy and critic have float32 gradients.
    assert found.allocated_bytes("update") == resident + 8 * n + saved + work
    assert found.allocated_bytes("rollout") / GIB == pytest.approx(105.9, abs=0.1)
    assert found.allocated_bytes("reference") / GIB == pytest.approx(89.5, abs=0.1)
    assert found.allocated_bytes("update") / GIB == pytest.approx(114.2, abs=0.1)
    # 6.2 GB of pinned memory are taken as 8 GiB.
    assert found.host == {"reference": 2**33}


def test_ppo_on_3_billion_parameters_is_planned_within_1_percent_of_the_measured():
    """benchmarks/results/sizes_h200.json: critic and KL, checkpointing, layers of transformers.

    The reference was on the GPU in every phase, with 2 bytes a parameter.
    """
    words = ["algorithm.name=ppo", "algorithm.kl_coef=0.001", "engine.learner=plain"]
    setup = setup_of(config("rollout.max_context=8192", *words), shape_of("Qwen/Qwen2.5-3B"))
    gpu = Gpu("h200", 139.8)
    found = plan_memory(setup, gpu, MEASURED.memory, tokens=7774, checkpointing=True)
    with_reference = found.allocated_bytes("update") + 2 * setup.shape.num_parameters
    assert with_reference / GIB == pytest.approx(115.1, rel=0.01)


def test_coefficients_are_those_of_the_engine():
    pytest.importorskip("transformers")
    from moored.engine.fast import graphs, rows, sampler, slots, stream
    from moored.engine.local.batches import FORWARD_TIMES, MICRO_BATCH_TOKENS
    from moored.engine.local.parking import RELEASED_FROM
    from moored.engine.passes import LOGITS_PER_CHUNK

    given = MEASURED.memory
    assert given.logits_per_chunk == LOGITS_PER_CHUNK["cuda"]
    assert (given.recorded_to, given.busy_work) == (graphs.MAX_RECORDED, graphs.BUSY_WORK)
    assert given.released_from == RELEASED_FROM
    assert given.prefill_tokens == stream.PREFILL_TOKENS
    assert given.recorded_tokens == rows.MAX_RECORDED_TOKENS
    assert (given.forward_times, FORWARD_TOKENS) == (FORWARD_TIMES, MICRO_BATCH_TOKENS[1])
    padding = memory.MOST_PADDING, memory.MIN_PROMPT_TOKENS, memory.MIN_CONTINUATION_TOKENS
    assert padding == (
        graphs.MOST_PADDING,
        graphs.MIN_PROMPT_TOKENS,
        graphs.MIN_CONTINUATION_TOKENS,
    )
    assert given.min_sharers == slots.MIN_SHARERS
    assert (given.cache_share, given.min_rows) == (sampler.CACHE_SHARE, sampler.MIN_ROWS)


def test_slots_are_as_many_as_the_sampler_makes():
    pytest.importorskip("transformers")
    from moored.engine.fast.slots import Slots

    for rows in (8, 12, 96, 128):
        found = memory_of("rollout.num_groups=1", f"rollout.group_size={rows}")
        assert found.phases["rollout"]["keys and values"] == (Slots(rows).idle + 1) * 256


def test_recorded_models_score_all_at_once_where_that_keeps_the_gpu_busy():
    # 8 episodes of 16 tokens and 348 parameters; four times the tokens of an update at most.
    def scored(busy_work, tokens):
        given = replace(BARE.memory, recorded_to=348, busy_work=busy_work)
        return memory_of(given=given, tokens=tokens).phases["scoring"]["activations"]

    assert scored(8 * 16 * 348, 30) == 4 * 30 * 128
    assert scored(8 * 16 * 348, 40) == 8 * 16 * 128
    assert scored(8 * 16 * 348 + 1, 30) == 30 * 128


@pytest.mark.parametrize("tokens", [3072, 12288, 24576])
def test_padded_batches_are_as_large_as_planned_at_most(tokens):
    pytest.importorskip("transformers")
    import torch

    from moored.engine.fast.graphs import pad
    from moored.engine.packing import TokenBatch, pack, to_line
    from moored.types import Prompt

    most, largest = int(tokens / memory.MOST_PADDING), 0
    edges = [size for power in range(10, 15) for size in (2**power, 3 * 2 ** (power - 1))]
    for replies in {edge + more for edge in edges for more in (-1, 0, 1)}:
        if not 9 <= replies < most - 9:
            continue
        # Nine prompts, whose continuations are about equally long.
        sizes = np.diff(np.linspace(0, [replies, most - replies], 10).astype(int), axis=0)
        ids = [np.ones(reply, dtype=int) for reply, _ in sizes]
        prompts = [Prompt(np.full(size, number)) for number, (_, size) in enumerate(sizes)]
        rows = pack(prompts, [len(each) for each in ids], max_tokens=most)
        packed = to_line(rows, ids, torch.device("cpu"))
        _, shape = pad(TokenBatch(packed))
        largest = max(largest, shape.prompt_tokens + shape.continuation_tokens)
    assert 0.8 * memory._padded(tokens) <= largest <= memory._padded(tokens)
