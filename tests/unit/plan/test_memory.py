"""Memory by part, each worked out by hand on a tiny shape."""

from __future__ import annotations

import numpy as np
import pytest

from moored.engine.fsdp.whole import Whole
from moored.models.shapes import shape_of
from moored.plan import memory
from moored.plan.activations import backward_work_bytes, layer_bytes, saved_bytes
from moored.plan.gpus import GIB
from moored.plan.memory import Memory, plan_memory
from moored.plan.setup import Lengths, Setup
from tests.unit.plan.tiny import config, tiny

LARGE = GIB


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Nothing but what follows from shapes, as for large models."""

    def use(kept_below: int = 0, recorded_to: int = 0) -> None:
        monkeypatch.setattr("moored.plan.setup.CACHE_KEPT_BELOW", kept_below)
        monkeypatch.setattr("moored.plan.setup.RECORDED_TO", recorded_to)
        monkeypatch.setattr(memory, "RECORDED_TOKENS", 0)
        monkeypatch.setattr(memory, "RESERVE_SHARE", 0.0)
        monkeypatch.setattr(memory, "CUDA_BYTES", 0)

    use()
    return use


def memory_of(*options: str, size: int = LARGE, tokens: int = 10, **changes) -> Memory:
    setup = Setup(config(*options), tiny(**changes))
    return plan_memory(setup, size, tokens=tokens, checkpointing=False)


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


def test_a_reference_is_bfloat16_weights_alone(bare):
    bare(kept_below=349)
    found = memory_of(KL)
    assert list(found.phases) == ["rollout", "scoring", "update"]
    for parts in found.phases.values():
        assert parts["reference weights"] == 2 * 348
    assert not found.host


def test_the_reference_of_a_large_model_is_on_the_gpu_only_while_it_scores(monkeypatch):
    monkeypatch.setattr(memory, "RECORDED_TOKENS", 8)
    found, alone = memory_of(KL), memory_of()
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


def test_vllm_takes_its_share_at_the_start_and_holds_weights_keys_and_values_in_it():
    found = memory_of("engine.sampler=vllm", "engine.vllm.memory_share=0.1", size=20_000)
    for parts in found.phases.values():
        assert parts["vLLM"] == 2_000
        assert {"sampler weights", "keys and values"}.isdisjoint(parts)
    assert "activations" not in found.phases["rollout"]
    # An episode of 16 tokens has 256 bytes of keys and values: 2,000 - 2 x 348 hold five of eight.
    assert found.rows == 5
    server = "engine.vllm.server=http://127.0.0.1:8000"
    assert "vLLM" not in memory_of("engine.sampler=vllm", server).phases["update"]


def test_the_plain_sampler_has_a_copy_in_bfloat16_only():
    plain = "engine.sampler=plain"
    assert memory_of(plain).phases["scoring"]["sampler weights"] == 2 * 348
    assert memory_of(is_fast=False).phases["scoring"]["sampler weights"] == 2 * 348
    assert "sampler weights" not in memory_of(plain, "engine.dtype=float32").phases["scoring"]


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
    assert found.host == {"optimiser": 12 * 348}
    # There float32 weights have masters too.
    assert memory_of("optimizer.states=host", "engine.dtype=float32").host == found.host


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
    assert memory_of("rollout.num_groups=8", size=size).rows == 15


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


def test_keys_and_values_are_released_before_updates_of_large_models(bare):
    found = memory_of().phases
    assert "keys and values" in found["scoring"]
    assert "keys and values" not in found["update"]
    bare(kept_below=349)
    assert "keys and values" in memory_of().phases["update"]
    # The plain sampler forgets its sessions when they end.
    plain = memory_of("engine.sampler=plain").phases
    assert [phase for phase in plain if "keys and values" in plain[phase]] == ["rollout"]


def test_recorded_passes_keep_their_memory_and_gradients(bare):
    bare(recorded_to=348)
    found = memory_of()
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
    assert "recorded passes" not in memory_of("engine.learner=plain").phases["rollout"]


def test_recorded_models_score_all_at_once_where_that_keeps_the_gpu_busy(bare, monkeypatch):
    # 8 episodes of 16 tokens and 348 parameters; four times the tokens of an update at most.
    bare(recorded_to=348)

    def scored(busy_work: float, tokens: int) -> int:
        monkeypatch.setattr(memory, "BUSY_WORK", busy_work)
        return memory_of(tokens=tokens).phases["scoring"]["activations"]

    assert scored(8 * 16 * 348, 30) == 4 * 30 * 128
    assert scored(8 * 16 * 348, 40) == 8 * 16 * 128
    assert scored(8 * 16 * 348 + 1, 30) == 30 * 128


def test_peak_and_allocated_bytes_are_sums(monkeypatch):
    monkeypatch.setattr(memory, "RESERVE_SHARE", 0.04)
    monkeypatch.setattr(memory, "CUDA_BYTES", 1000)
    found = memory_of()
    update = found.phases["update"]
    own = update["gradients"] + update["activations"] + update["backward pass"]
    assert (update["CUDA"], update["reserve"]) == (1000, int(0.04 * own))
    assert found.allocated_bytes("update") == own + 14 * 348
    assert found.peak_phase == "rollout"
    assert found.peak_bytes == sum(found.phases["rollout"].values())


def test_ppo_on_3_billion_parameters_with_critic_and_kl_by_hand():
    words = ["algorithm.name=ppo", "algorithm.kl_coef=0.001", "rollout.num_groups=8"]
    words += ["rollout.group_size=16", "rollout.max_context=4096"]
    shape = shape_of("Qwen/Qwen2.5-3B-Instruct")
    setup, h200 = Setup(config(*words), shape), int(139.8 * GIB)
    found = plan_memory(setup, h200, tokens=24576, checkpointing=True)
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
    setup = Setup(config("rollout.max_context=8192", *words), shape_of("Qwen/Qwen2.5-3B"))
    found = plan_memory(setup, int(139.8 * GIB), tokens=7774, checkpointing=True)
    with_reference = found.allocated_bytes("update") + 2 * setup.shape.num_parameters
    assert with_reference / GIB == pytest.approx(115.1, rel=0.01)


def test_constants_are_those_of_the_engine():
    pytest.importorskip("transformers")
    from moored.engine.fast import graphs, rows, sampler, slots, stream
    from moored.engine.gpu import CACHE_KEPT_BELOW, CACHE_SHARE
    from moored.engine.local.parking import RELEASED_FROM
    from moored.engine.passes import LOGITS_PER_CHUNK
    from moored.plan import activations

    assert LOGITS_PER_CHUNK["cuda"] == activations.LOGITS_PER_CHUNK
    assert RELEASED_FROM == CACHE_KEPT_BELOW
    assert memory.PREFILL_TOKENS == stream.PREFILL_TOKENS
    assert rows.MAX_RECORDED_TOKENS == 8192
    for name in ("BUSY_WORK", "MOST_PADDING", "MIN_PROMPT_TOKENS", "MIN_CONTINUATION_TOKENS"):
        assert getattr(memory, name) == getattr(graphs, name)
    assert memory.MIN_SHARERS == slots.MIN_SHARERS
    assert (CACHE_SHARE, memory.MIN_ROWS) == (sampler.CACHE_SHARE, sampler.MIN_ROWS)


def test_slots_are_as_many_as_the_sampler_makes():
    pytest.importorskip("transformers")
    from moored.engine.fast.slots import Slots

    for rows in (8, 12, 96, 128):
        found = memory_of("rollout.num_groups=1", f"rollout.group_size={rows}")
        assert found.phases["rollout"]["keys and values"] == (Slots(rows).idle + 1) * 256


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


LENGTHS = Lengths(prompt=3, reply=13)


def two_updates(*options: str) -> Setup:
    """8 episodes of two prompts, of up to 16 tokens each, in two updates."""
    return Setup(config("optimizer.num_minibatches=2", *options), tiny())


def test_without_lengths_an_update_is_as_long_as_may_be_and_shares_nothing():
    # 4 episodes of 16 tokens.
    assert memory._micro_batches(two_updates(), 64, None) == (64, 0)
    assert memory._micro_batches(two_updates(), 100, None) == (64, 0)
    assert memory._micro_batches(two_updates(), 63, None) == (63, 63)


def test_with_lengths_an_update_has_each_prompt_once():
    # 2 prompts of 3 tokens and 4 replies of 13: 58 tokens, a row of 29 for each prompt.
    assert memory._micro_batches(two_updates(), 58, LENGTHS) == (58, 0)
    # The row that does not fit goes to the second one: 57 tokens leave 1, and it has 29 more.
    assert memory._micro_batches(two_updates(), 57, LENGTHS) == (57, 30)
    assert memory._micro_batches(two_updates(), 20, LENGTHS) == (20, 20)
    # The model's own code may share no prompts.
    assert memory._micro_batches(two_updates("engine.learner=plain"), 58, LENGTHS) == (58, 58)


def update_of(first: int, later: int, *options: str) -> dict[str, int]:
    whole = Whole(weights=False, gradients=False)
    return memory._update(two_updates(*options), (first, later), whole, False)


def parts_at(tokens: int, gradients: int) -> dict[str, int]:
    kind = two_updates().layer_kind
    work = backward_work_bytes(tiny(), tokens, kind, checkpointing=False)
    saved = saved_bytes(tiny(), tokens, kind, checkpointing=False)
    return {"gradients": 4 * gradients, "activations": saved, "backward pass": work}


def test_the_first_micro_batch_has_no_gradients_beside_it_and_the_second_has_all(bare):
    # A token has 348 bytes of activations and 96 in the backward pass; gradients have 1,392, which
    # is more than three tokens and less than four.
    assert update_of(57, 54) == parts_at(54, 348)
    expected = parts_at(57, 0)
    del expected["gradients"]
    assert update_of(57, 53) == expected
    # At the end of a backward pass one layer is left beside all gradients.
    layer = 2 * layer_bytes(tiny(), two_updates().layer_kind)
    assert update_of(2, 0) == parts_at(2, 348) | {"activations": layer}
    # The passes of a critic begin when the policy has gradients.
    assert update_of(57, 0, "algorithm.name=ppo") == parts_at(57, 348)
    # Those of recorded passes are there from the start.
    bare(recorded_to=348)
    assert update_of(57, 0) == parts_at(57, 348)


ALL, LAYER, OUTER = 348, 152, 44
"""Parameters: of the tiny model, of a layer, and of embedding and last norm."""


def rank_of(*options: str, size: int = 100, ranks: int = 4) -> Memory:
    """On 100 bytes nothing is whole during an update."""
    setup = Setup(config(*options), tiny(), ranks)
    return plan_memory(setup, size, tokens=10, checkpointing=False)


def test_a_rank_keeps_its_share_of_weights_moments_and_gradients():
    update = rank_of().phases["update"]
    # float32 weights and two moments: 12 bytes of each parameter over 4 ranks.
    assert "policy weights" not in update
    assert update["policy optimiser"] == 12 * ALL // 4
    assert update["gradients"] == 4 * ALL // 4
    # Whole in bfloat16: two layers, and embedding with norm; and the sampler's own.
    assert update["gathered weights"] == 2 * (2 * LAYER + OUTER)
    assert update["gathered gradients"] == 6 * LAYER
    assert update["sampler weights"] == 2 * ALL


def test_what_is_whole_during_an_update_is_counted_on_every_rank():
    # Rounded weights, float32 gradients and a copy of these are 10 bytes of each parameter, of a
    # tenth of the memory.
    update = rank_of(size=100 * ALL).phases["update"]
    assert update["gradients"] == 4 * ALL
    assert update["gathered weights"] == update["gathered gradients"] == 2 * ALL
    # Gradients alone leave weights in layers.
    update = rank_of(size=50 * ALL).phases["update"]
    assert update["gradients"] == 4 * ALL
    assert update["gathered gradients"] == 6 * LAYER


def test_critic_reference_and_the_base_of_adapters_are_sharded_too():
    update = rank_of("algorithm.name=ppo", KL, ranks=2).phases["update"]
    assert update["critic optimiser"] == 12 * ALL // 2
    assert update["reference weights"] == 2 * ALL // 2
    assert update["gradients"] == 4 * 2 * ALL // 2
    adapters = tiny().adapter_parameters(2)
    update = rank_of("optimizer.lora_rank=2", ranks=2).phases["update"]
    assert update["policy weights"] == (2 * ALL + 2 * adapters) // 2
    assert update["policy optimiser"] == 12 * adapters // 2
    assert update["gathered gradients"] == 0


def test_more_ranks_need_less_of_a_gpu_each():
    peaks = [rank_of("rollout.num_groups=8", ranks=n).peak_bytes for n in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
