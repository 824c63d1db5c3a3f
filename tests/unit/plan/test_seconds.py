"""Seconds by phase: the work by hand, and the measurements that the coefficients were fitted to."""

from __future__ import annotations

import pytest

from moored.models.shapes import shape_of
from moored.plan import seconds
from moored.plan.gpus import GPUS, Gpu
from moored.plan.seconds import Work, plan_seconds
from moored.plan.setup import Lengths, Setup, longest_lengths
from tests.unit.plan.tiny import config, tiny

PLAIN = {
    "MATRIX_SHARE": 1.0,
    "DECODE_LAYER_S": 0.0,
    "DECODE_MATRIX_SHARE": 1.0,
    "DECODE_CACHE_SHARE": 1.0,
    "DRAW_PASSES": 1.0,
    "PREFILL_SHARE": 1.0,
    "FORWARD_SHARE": 1.0,
    "UPDATE_SHARE": 1.0,
    "UNFUSED_SHARE": 1.0,
    "HALF_SIZE": 0.0,
    "RECORDED_TIMES": 1.0,
    "LAUNCH_LAYER_S": 0.0,
    "OPTIMIZER_SHARE": 1.0,
    "HOST_COPY_BYTES_S": 10.0,
    "HOST_UPDATE_BYTES_S": 20.0,
}
"""Everything at its limit, so that seconds are work over rate."""


@pytest.fixture
def plain(monkeypatch):
    """Set the shares of rates; others are at their limits."""

    def use(**changes: float) -> None:
        for name, value in {**PLAIN, **changes}.items():
            monkeypatch.setattr(seconds, name, value)

    use()
    return use


UNIT = Gpu("unit", 1.0, tflops=1e-12, bandwidth_tbs=1e-12)
"""One operation and one byte a second."""
# Prompt 6, two replies of 3 with 2 tokens between them: 14 in all, 8 after the prompt.
LENGTHS = Lengths(prompt=6, reply=3, turns=2, observation=2)
# Products of two layers and the head: 2 x (2 x 152 + 40); attention 4 x 2 x 4 over 7 tokens.
POLICY_FLOP = 2 * 344 + 4 * 2 * 4 * 7
TRUNK_FLOP = 2 * 304 + 4 * 2 * 4 * 7


def seconds_of(
    *options: str,
    rows: int = 8,
    checkpointing: bool = False,
    gpu: Gpu = UNIT,
):
    setup = Setup(config("optimizer.num_minibatches=2", *options), tiny())
    return plan_seconds(setup, gpu, LENGTHS, rows=rows, tokens=14, checkpointing=checkpointing)


def test_a_trajectory_is_a_prompt_replies_and_what_lies_between():
    assert (LENGTHS.trajectory, LENGTHS.continuation) == (14, 8)


def test_prefill_computes_a_shared_prompt_once_and_observations_of_every_episode(plain):
    # 2 prompts of 6, and 8 episodes with one observation of 2; no logits.
    assert seconds_of()["prefill"] == pytest.approx(TRUNK_FLOP * (12 + 16))


def test_a_decoding_step_reads_weights_cache_and_logits(plain):
    # 8 rows: flop of the products, 2 x 344 x 8, exceed the bytes, 2 x 344. Cache: 16 bytes for each
    # of 6 + 8 / 2 tokens; logits: 10 of 4 bytes. Two turns of 3 steps.
    step = 2 * 344 * 8 + 8 * 10 * 16 + 8 * 10 * 4
    assert seconds_of()["decode"] == pytest.approx(6 * step)
    # With ten times the matrix rate the bytes of weights do not fall below.
    fast = Gpu("fast", 1.0, tflops=1e-10, bandwidth_tbs=1e-12)
    step = 2 * 344 + 8 * 10 * 16 + 8 * 10 * 4
    assert seconds_of(gpu=fast)["decode"] == pytest.approx(6 * step)


def test_episodes_that_do_not_fit_are_written_after_the_others(plain):
    def step(rows):
        return 2 * 344 * rows + rows * 200

    # 8 episodes in slots for 3: 3, 3 and 2.
    assert seconds_of(rows=3)["decode"] == pytest.approx(6 * (2 * step(3) + step(2)))


def test_advantages_score_what_the_algorithm_asks_for(plain):
    # 2 prompts and 8 continuations of 8 tokens.
    assert seconds_of()["advantages"] == 0.0
    assert seconds_of("algorithm.name=ppo")["advantages"] == pytest.approx(TRUNK_FLOP * 76)
    scores = seconds_of("algorithm.old_logprobs=learner")["advantages"]
    assert scores == pytest.approx(POLICY_FLOP * 76)


def test_an_update_is_three_forward_passes_and_the_optimisers_bytes(plain):
    # Each of 2 minibatches has both prompts: 4 x 6 + 8 x 8 tokens.
    passes = 3 * POLICY_FLOP * 88
    # Master, means and gradient are read, all but the gradient and a bfloat16 weight written.
    optimizer = 2 * 348 * (12 + 4 + 12 + 2)
    assert seconds_of()["update"] == pytest.approx(passes + optimizer)
    twice = seconds_of("optimizer.num_epochs=2")["update"]
    assert twice == pytest.approx(2 * (passes + optimizer))
    again = seconds_of(checkpointing=True)["update"]
    assert again == pytest.approx(passes * 4 / 3 + optimizer)
    reference = seconds_of("algorithm.kl_coef=0.1")["update"]
    assert reference == pytest.approx(passes * 4 / 3 + optimizer)
    critic = seconds_of("algorithm.name=ppo")["update"]
    assert critic == pytest.approx(passes + 3 * TRUNK_FLOP * 88 + 2 * optimizer)


def test_a_reference_in_main_memory_is_copied_and_scores_once_in_a_step(plain, monkeypatch):
    kl, epochs, lora = "algorithm.kl_coef=0.1", "optimizer.num_epochs=2", "optimizer.lora_rank=3"
    # Smaller ones score every minibatch of every epoch.
    found = seconds_of(kl, epochs)["update"]
    assert found == pytest.approx(seconds_of(epochs)["update"] + 2 * POLICY_FLOP * 88)
    monkeypatch.setattr("moored.plan.setup.CACHE_KEPT_BELOW", 348)
    # 348 weights of 2 bytes, 10 bytes a second; 2 prompts of 6, and 8 continuations of 8 tokens.
    once = 2 * 348 / 10 + POLICY_FLOP * 76
    for words in ([], [epochs]):
        found = seconds_of(kl, *words)["update"]
        assert found == pytest.approx(seconds_of(*words)["update"] + once)
    # Under LoRA it is the policy without adapters.
    found = seconds_of(kl, lora)["update"]
    assert found == pytest.approx(seconds_of(lora)["update"] + POLICY_FLOP * 88)


def test_lora_computes_no_gradients_of_weights_and_publishes_sums(plain):
    found = seconds_of("optimizer.lora_rank=3")
    adapters = 2 * 3 * 64
    assert found["update"] == pytest.approx(2 * POLICY_FLOP * 88 + 2 * adapters * 30)
    # Read and written, 2 bytes each.
    assert found["publish"] == pytest.approx(4 * 348)
    assert seconds_of()["publish"] == 0.0
    assert seconds_of("engine.sampler=plain")["publish"] == pytest.approx(4 * 348)


def test_states_on_the_host_are_updated_there(plain):
    found = seconds_of("optimizer.states=host")
    # Gradients go down (4), weights come back (2) at 10 bytes a second; 30 bytes at 20.
    optimizer = 2 * 348 * (6 / 10 + 30 / 20)
    assert found["update"] == pytest.approx(3 * POLICY_FLOP * 88 + optimizer)


def on_an_h200(
    model: str,
    lengths: Lengths,
    *words: str,
    groups: int,
    size: int = 16,
    checkpointing: bool = False,
):
    """Seconds of a step in which all episodes are written and trained on at a time."""
    few = [f"rollout.num_groups={groups}", f"rollout.group_size={size}", *words]
    few += ["optimizer.num_minibatches=1", "collapse.every=0"]
    setup = Setup(config(*few), shape_of(f"Qwen/Qwen2.5-{model}"))
    return plan_seconds(
        setup,
        GPUS["h200"],
        lengths,
        rows=groups * size,
        tokens=24576,
        checkpointing=checkpointing,
    )


# benchmarks/results/decode_h200.json; with 128 rows 0.5 B took 1.00 and 1.02 ms on two machines.
@pytest.mark.parametrize(
    ("model", "rows", "measured_ms"),
    [
        ("0.5B", 16, 0.60),
        ("0.5B", 128, 1.01),
        ("0.5B", 1024, 4.33),
        ("1.5B", 16, 1.24),
        ("1.5B", 128, 2.08),
        ("1.5B", 1024, 10.1),
        ("3B", 16, 2.07),
        ("3B", 128, 3.23),
        ("3B", 1024, 16.4),
    ],
)
def test_decoding_steps_are_planned_within_11_percent_of_the_measured(model, rows, measured_ms):
    assert decode_step_ms(f"Qwen/Qwen2.5-{model}", rows) == pytest.approx(measured_ms, rel=0.11)


@pytest.mark.parametrize(("rows", "measured_ms"), [(16, 0.53), (128, 1.19)])
def test_those_of_a_small_model_are_within_15_percent(rows, measured_ms):
    found = decode_step_ms("HuggingFaceTB/SmolLM2-135M", rows)
    assert found == pytest.approx(measured_ms, rel=0.15)


def decode_step_ms(model: str, rows: int) -> float:
    setup = Setup(config(), shape_of(model))
    work = Work(setup, GPUS["h200"], Lengths(prompt=512, reply=128))
    return 1000 * work.decode_step(rows)


@pytest.mark.parametrize(
    ("model", "rows", "measured_s"),
    [("0.5B", 128, 0.106), ("0.5B", 1024, 0.845), ("3B", 128, 0.649), ("3B", 1024, 5.089)],
)
def test_prompts_are_read_within_15_percent_of_the_measured(model, rows, measured_s):
    # Every row has a prompt of its own; episodes of a group would share theirs.
    found = on_an_h200(model, Lengths(prompt=512, reply=1), groups=rows, size=2)
    assert found["prefill"] == pytest.approx(measured_s, rel=0.15)


OWN = "engine.learner=plain"
"""Layers of transformers, as the learner had them before there were fused ones."""


@pytest.mark.parametrize(
    ("model", "groups", "words", "tokens_per_s"),
    [
        ("0.5B", 8, [], 92_070),
        ("3B", 4, [], 22_681),
        ("0.5B", 8, [OWN], 71_638),
        ("3B", 4, [OWN], 18_092),
    ],
)
def test_updates_are_planned_within_5_percent_of_the_measured(model, groups, words, tokens_per_s):
    found = on_an_h200(model, Lengths(prompt=200, reply=800), *words, groups=groups)
    assert groups * (200 + 16 * 800) / found["update"] == pytest.approx(tokens_per_s, rel=0.05)


def test_an_update_with_critic_kl_and_checkpointing_is_planned_within_5_percent(monkeypatch):
    """It was measured with the reference on the GPU in every phase."""
    words = [OWN, "algorithm.name=ppo", "algorithm.kl_coef=0.001"]
    monkeypatch.setattr("moored.plan.setup.CACHE_KEPT_BELOW", 10**12)
    lengths = Lengths(prompt=200, reply=800)
    found = on_an_h200("3B", lengths, *words, groups=4, checkpointing=True)
    assert found["update"] == pytest.approx(7.783, rel=0.05)


@pytest.mark.parametrize(
    ("model", "groups", "tokens_per_s"), [("0.5B", 8, 72_839), ("3B", 4, 21_736)]
)
def test_compiled_updates_are_planned_within_20_percent(model, groups, tokens_per_s):
    lengths = Lengths(prompt=200, reply=800)
    found = on_an_h200(model, lengths, "engine.compile=true", groups=groups)
    assert groups * (200 + 16 * 800) / found["update"] == pytest.approx(tokens_per_s, rel=0.2)


def test_scoring_is_planned_within_5_percent_of_the_measured():
    # 64 reasonings of about 80 tokens after each of 16 prompts of about 300.
    words = ["algorithm.old_logprobs=learner", OWN]
    found = on_an_h200("0.5B", Lengths(prompt=300, reply=80), *words, groups=16, size=64)
    assert 16 * (300 + 64 * 80) / found["advantages"] == pytest.approx(251_600, rel=0.05)


def test_replies_are_as_long_as_the_context_allows():
    given = config("rollout.max_context=1000", "rollout.max_response_tokens=400")
    assert longest_lengths(given, prompt=300).reply == 400
    # 1,000 less the prompt and two observations of 60, over three turns.
    assert longest_lengths(given, prompt=300, turns=3).reply == 193
    assert longest_lengths(given, prompt=300, turns=3, reply=50).trajectory == 300 + 150 + 120
    # Seven turns of 60 tokens and as many replies of 50 would be too long.
    assert longest_lengths(given, prompt=300, turns=7, reply=50).turns == 6
    # A prompt that fills the context leaves room for one token.
    assert longest_lengths(given, prompt=5000, turns=2) == Lengths(prompt=999, reply=1)


def launches(tokens: int, *options: str) -> dict[str, float]:
    fast = Gpu("fast", 1.0, tflops=1e12, bandwidth_tbs=1e12)
    setup = Setup(config("optimizer.num_minibatches=2", *options), tiny())
    return dict(plan_seconds(setup, fast, LENGTHS, rows=8, tokens=tokens, checkpointing=False))


def test_launching_bounds_passes_of_few_tokens(plain, monkeypatch):
    """A layer takes the host one second, and the GPU nothing."""
    plain(LAUNCH_LAYER_S=1.0, HOST_COPY_BYTES_S=1e12)
    monkeypatch.setattr("moored.plan.setup.RECORDED_TO", 0)
    # 8 episodes in 88 tokens, two at a time: 4 passes of 2 layers, forwards once and back twice.
    assert launches(22)["update"] == pytest.approx(4 * 2 * 3)
    assert launches(21)["update"] == pytest.approx(8 * 2 * 3)
    assert launches(22, "algorithm.name=ppo")["update"] == pytest.approx(4 * 2 * 3 * 2)
    # Passes without gradients have four times the tokens: all 8 episodes at once.
    assert launches(22, "algorithm.name=ppo")["advantages"] == pytest.approx(2)
    kl = "algorithm.kl_coef=0.1"
    assert launches(22, kl)["update"] == pytest.approx(4 * 2 * 3 + 2)


def test_recorded_updates_come_nearer_to_the_rate(plain, monkeypatch):
    found = seconds_of()["update"]
    plain(RECORDED_TIMES=2.0)
    optimizer = 2 * 348 * 30
    assert seconds_of()["update"] == pytest.approx((found - optimizer) / 2 + optimizer)
    monkeypatch.setattr("moored.plan.setup.RECORDED_TO", 347)
    assert seconds_of()["update"] == pytest.approx(found)


def test_vllm_takes_longer_for_every_row_of_a_step(plain):
    plain(VLLM_ROW_S=0.5)
    vllm = "engine.sampler=vllm"
    elsewhere = (vllm, "engine.vllm.server=http://127.0.0.1:8000")
    # 8 episodes of two replies of 3 tokens, whether all or 3 of them are written at a time.
    for words in ((vllm,), elsewhere):
        found = seconds_of(*words, rows=3)["decode"]
        assert found == pytest.approx(seconds_of(rows=3)["decode"] + 0.5 * 8 * 2 * 3)


def test_rollouts_of_the_plain_sampler_are_not_planned():
    assert {"prefill", "decode"}.isdisjoint(seconds_of("engine.sampler=plain"))


def test_ranks_share_episodes_and_states_and_gather_layer_by_layer(plain):
    plain(LAYERWISE_TIMES=3.0)
    lone = Setup(config("optimizer.num_minibatches=2", "rollout.num_groups=4"), tiny())
    two = Setup(lone.config, tiny(), ranks=2)
    small = Gpu("small", 1e-6, tflops=1e-12, bandwidth_tbs=1e-12)
    found = plan_seconds(two, small, LENGTHS, rows=8, tokens=14, checkpointing=False)
    half = seconds_of()
    assert found["prefill"] == half["prefill"] and found["decode"] == half["decode"]
    # Each has two of the groups, and updates half of the states.
    optimizer = 2 * 348 * 30
    passes = half["update"] - optimizer
    assert found["update"] == pytest.approx(3.0 * passes + optimizer / 2)
    assert found["publish"] == pytest.approx(4 * 348)
