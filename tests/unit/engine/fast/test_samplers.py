"""Both samplers against plain forward passes of the same model, and against each other."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from moored.config import load_config
from moored.engine.base import Request, SamplingParams
from moored.engine.fast import lockstep
from moored.engine.fast import sampler as samplers
from moored.engine.fast.decoder import Decoder, can_decode
from moored.engine.fast.plain_ops import uniforms
from moored.engine.fast.sampler import SlotSampler
from moored.engine.local.learner import LocalLearner
from moored.engine.local.sampler import LocalSampler
from moored.engine.samplers import make_sampler
from moored.errors import MooredError
from moored.types import Prompt

VOCABULARY = 64
STOPS = (1, 2)
SHAPES = {
    "llama": (transformers.LlamaConfig, {}),
    "grouped": (transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "biased": (transformers.LlamaConfig, {"attention_bias": True}),
    "untied": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "scaled_angles": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"num_key_value_heads": 2, "sliding_window": None}),
}
SAMPLERS = {
    "slots": partial(SlotSampler, dtype=torch.float32, max_context=256),
    "local": LocalSampler,
}
both = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def tiny_model(shape: str = "llama"):
    torch.manual_seed(0)
    kind, options = SHAPES[shape]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**settings, **options}))
    with torch.no_grad():  # far from a fresh model, so that mistakes show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08).mul_(2.0)
    return model.eval()


def with_lora(model):
    """Adapters on every linear layer, as if they had been trained."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, options)
    train_lora(wrapped)
    return wrapped.eval()


def train_lora(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)


def plain_logprobs(model, prompt: np.ndarray, reply: np.ndarray, temperature=1.0) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, reply]))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
    return logp[np.arange(len(prompt) - 1, len(ids[0]) - 1), reply].numpy()


def dialogues(sampler, num=20, turns=3, temperature=1.0, dies=()):
    """Turns of dialogues over a shared, a rare and several single first prompts."""
    rng = np.random.default_rng(0)
    shared, rare = (rng.integers(3, VOCABULARY, size=n) for n in (9, 14))
    single = [rng.integers(3, VOCABULARY, size=5 + i) for i in range(num)]
    streams = {i: [shared, rare, shared, single[i]][i % 4 if i < 8 else 0] for i in range(num)}
    params = SamplingParams(max_tokens=24, temperature=temperature, stop_ids=STOPS)
    records = []
    for turn in range(turns):
        for i in dies[turn - 1] if turn and dies else ():
            del streams[i]
        requests = [
            Request(session=i, prompt=Prompt(s), seed=100 * turn + i) for i, s in streams.items()
        ]
        for request, completion in zip(requests, sampler.generate(requests, params), strict=True):
            records.append((request.prompt.ids, completion))
            seen = rng.integers(3, VOCABULARY, size=rng.integers(1, 6))
            streams[request.session] = np.concatenate(
                [request.prompt.ids, completion.token_ids, seen]
            )
    return records


@pytest.mark.parametrize(
    ("temperature", "shape"),
    # Temperature divides the logits, whatever shape they come from.
    [*((1.0, shape) for shape in SHAPES), (0.7, "llama"), (0.7, "grouped")],
)
def test_logprobs_over_cached_turns_equal_a_plain_forward_pass(shape, temperature):
    model = tiny_model(shape)
    assert can_decode(model)
    sampler = SAMPLERS["slots"](model)
    lengths = set()
    for prompt, completion in dialogues(sampler, temperature=temperature):
        expected = plain_logprobs(model, prompt, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        lengths.add(len(completion.token_ids))
    assert len(lengths) > 3  # rows stopped at different times, so running rows were moved


@pytest.mark.parametrize("shape", ["untied", "biased", "qwen3"])
def test_adapters_are_a_part_of_the_weights_that_the_fast_sampler_computes_with(shape):
    model = with_lora(tiny_model(shape))
    learner = LocalLearner(model)
    sampler = make_sampler(model, load_config({}, ["rollout.max_context=256"]))
    assert isinstance(sampler, SlotSampler)
    for _ in range(2):
        for prompt, completion in dialogues(sampler, num=6, turns=2):
            expected = plain_logprobs(model, prompt, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        train_lora(model)
        sampler.load_weights(learner.weights(), version=1)


def test_the_sampler_for_any_model_in_bfloat16_takes_over_trained_adapters():
    model = with_lora(tiny_model())
    options = ["engine.dtype=bfloat16", "engine.sampler=plain"]
    sampler = make_sampler(model, load_config({}, options))
    train_lora(model)
    sampler.load_weights(LocalLearner(model).weights(), version=1)
    assert isinstance(sampler, LocalSampler)
    merged = model.merge_and_unload().state_dict()
    for name, tensor in sampler.model.state_dict().items():
        assert torch.equal(tensor, merged[name].bfloat16()), name


@pytest.mark.parametrize("shape", ["llama", "grouped"])
def test_the_sampler_for_any_model_gives_logprobs_of_a_plain_forward_pass(shape):
    model = tiny_model(shape)
    for prompt, completion in dialogues(LocalSampler(model)):
        expected = plain_logprobs(model, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_both_samplers_write_the_same_replies():
    model = tiny_model("grouped")
    ways = [dialogues(make(model)) for make in SAMPLERS.values()]
    for (_, a), (_, b) in zip(*ways, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        assert a.finish_reason == b.finish_reason


def test_slots_of_ended_episodes_are_used_again_and_others_keep_theirs():
    model = tiny_model()
    sampler = SAMPLERS["slots"](model)
    dies = [[0, 5, 19], [1, 2, 3, 4, 6, 7, 8, 9, 10]]
    for prompt, completion in dialogues(sampler, dies=dies):
        expected = plain_logprobs(model, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    sampler.end_sessions(range(20))
    assert sampler.slots.num_free == (24, 6)


def test_more_requests_than_slots_take_turns(monkeypatch):
    model = tiny_model()
    free = dialogues(SAMPLERS["slots"](model))
    sampler = SAMPLERS["slots"](model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 7)
    for (_, a), (_, b) in zip(free, dialogues(sampler), strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_a_cpu_has_slots_for_no_more_rows_than_fit_into_main_memory(monkeypatch):
    # 1,000 rows of 256 tokens, 2 x 2 layers of 64 numbers in float32, would need 320 MB.
    model, prompts = tiny_model(), [Prompt(np.array([5, 6, 7, 3 + i % 9])) for i in range(1000)]
    requests = [Request(session=i, prompt=p, seed=i) for i, p in enumerate(prompts)]
    params = SamplingParams(max_tokens=3, temperature=1.0)
    whole = SAMPLERS["slots"](model).generate(requests, params)
    monkeypatch.setattr(samplers, "main_memory_bytes", lambda: 50_000_000)
    small = SAMPLERS["slots"](model)
    found = small.generate(requests, params)
    assert small.cache.nbytes < 0.6 * 50_000_000
    for mine, other in zip(found, whole, strict=True):
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)


def test_ranks_close_also_when_the_running_rows_stand_in_front():
    model = tiny_model()
    prompt = Prompt(np.array([5, 6, 7]))
    params = SamplingParams(max_tokens=24, stop_ids=STOPS)
    one = [
        SAMPLERS["slots"](model).generate([Request(session=0, prompt=prompt, seed=s)], params)
        for s in range(30)
    ]
    order = np.argsort([-len(reply[0].token_ids) for reply in one])
    requests = [Request(session=int(s), prompt=prompt, seed=int(s)) for s in order]
    for seed, reply in zip(order, SAMPLERS["slots"](model).generate(requests, params), strict=True):
        np.testing.assert_array_equal(reply.token_ids, one[seed][0].token_ids)


def test_prompts_longer_than_expected_make_the_cache_grow():
    model = tiny_model()
    sampler = SlotSampler(model, dtype=torch.float32, max_context=8)
    for prompt, completion in dialogues(sampler, num=4):
        expected = plain_logprobs(model, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_one_long_prompt_among_short_ones_is_computed_apart(monkeypatch):
    widths = []
    forward = Decoder.forward

    def watched(self, cache, ids, rows):
        widths.append(len(rows.slots) * rows.max_count)
        return forward(self, cache, ids, rows)

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(lockstep, "PREFILL_TOKENS", 300)
    lengths = [200, *range(3, 23)]
    rng, model = np.random.default_rng(0), tiny_model()
    requests = [
        Request(session=i, prompt=Prompt(rng.integers(3, VOCABULARY, size=n)), seed=i)
        for i, n in enumerate(lengths)
    ]
    replies = SAMPLERS["slots"](model).generate(requests, SamplingParams(max_tokens=1))
    assert max(widths) <= 300
    for request, reply in zip(requests, replies, strict=True):
        expected = plain_logprobs(model, request.prompt.ids, reply.token_ids)
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


def test_prefill_in_small_pieces_changes_nothing(monkeypatch):
    model = tiny_model()
    whole = dialogues(SAMPLERS["slots"](model))
    monkeypatch.setattr(lockstep, "PREFILL_TOKENS", 10)
    for (_, a), (_, b) in zip(whole, dialogues(SAMPLERS["slots"](model)), strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


@both
def test_a_reply_depends_on_its_own_seed_and_prompt_alone(make):
    model, rng = tiny_model(), np.random.default_rng(1)
    prompts = [Prompt(rng.integers(3, VOCABULARY, size=7)) for _ in range(9)]
    requests = [Request(session=i, prompt=p, seed=i) for i, p in enumerate(prompts)]
    params = SamplingParams(max_tokens=12, stop_ids=STOPS)
    together = make(model).generate(requests, params)
    alone = [make(model).generate([request], params)[0] for request in requests]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    again = make(model).generate([Request(session=0, prompt=prompts[0], seed=77)], params)[0]
    assert not np.array_equal(again.token_ids, together[0].token_ids)


@both
def test_tokens_are_drawn_from_the_models_distribution(make):
    model = tiny_model()
    requests = [Request(session=i, prompt=Prompt(np.array([5, 6, 7])), seed=i) for i in range(4000)]
    drawn = make(model).generate(requests, SamplingParams(max_tokens=1))
    counts = np.bincount([c.token_ids[0] for c in drawn], minlength=VOCABULARY) / 4000
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    np.testing.assert_allclose(counts, torch.softmax(logits, -1).numpy(), atol=0.03)


@both
def test_temperature_zero_takes_the_likeliest_token_and_stops_are_kept(make):
    model = tiny_model()
    prompt = np.array([5, 6, 7])
    params = SamplingParams(max_tokens=20, temperature=0.0, stop_ids=STOPS)
    reply = make(model).generate([Request(session=0, prompt=Prompt(prompt), seed=0)], params)[0]
    ids = torch.from_numpy(prompt)[None]
    for token in reply.token_ids:
        with torch.no_grad():
            assert int(model(ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    assert (reply.finish_reason == "stop") == (reply.token_ids[-1] in STOPS)


@both
def test_a_session_whose_history_was_rewritten_is_computed_afresh(make):
    model = tiny_model()
    sampler = make(model)
    params = SamplingParams(max_tokens=6, stop_ids=STOPS)
    sampler.generate([Request(session=0, prompt=Prompt(np.array([5, 6, 7])), seed=0)], params)
    other = np.array([5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9])
    reply = sampler.generate([Request(session=0, prompt=Prompt(other), seed=1)], params)[0]
    expected = plain_logprobs(model, other, reply.token_ids)
    np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)


@both
def test_new_weights_are_used_from_the_next_reply_on(make):
    model = tiny_model()
    sampler = make(model)
    params = SamplingParams(max_tokens=6, stop_ids=STOPS)
    requests = [Request(session=i, prompt=Prompt(np.array([5, 6, 7])), seed=i) for i in range(6)]
    first = sampler.generate(requests, params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    sampler.load_weights(model.state_dict().items(), 3)
    # The old replies go on: what was computed for them with the old weights must be forgotten.
    longer = [np.concatenate([[5, 6, 7], reply.token_ids, [9]]) for reply in first]
    requests = [Request(session=i, prompt=Prompt(ids), seed=i) for i, ids in enumerate(longer)]
    for request, reply in zip(requests, sampler.generate(requests, params), strict=True):
        expected = plain_logprobs(model, request.prompt.ids, reply.token_ids)
        np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)
        assert reply.policy_version == 3


@both
@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5], []], {}, "at least one token"),
        ([[5], [5]], {"sessions": [0, 0]}, "same session"),
        ([[5]], {"temperature": -1.0}, "temperature"),
        ([[5]], {"max_tokens": 0}, "max_tokens"),
    ],
    ids=["empty prompt", "one session twice", "negative temperature", "no tokens"],
)
def test_requests_that_cannot_be_answered_are_named(make, prompts, options, message):
    sessions = options.get("sessions", range(len(prompts)))
    settings = {"max_tokens": 2, **options}
    settings.pop("sessions", None)
    pairs = zip(sessions, prompts, strict=True)
    requests = [
        Request(session=s, prompt=Prompt(np.array(p, dtype=np.int64)), seed=0) for s, p in pairs
    ]
    with pytest.raises(MooredError, match=message):
        make(tiny_model()).generate(requests, SamplingParams(**settings))


@both
def test_weights_that_are_not_finite_are_reported(make):
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(MooredError, match="not finite"):
        make(model).generate(
            [Request(session=0, prompt=Prompt(np.array([5])), seed=0)], SamplingParams(max_tokens=2)
        )


def test_uniform_numbers_are_splitmix64_worked_out_with_whole_numbers():
    def by_hand(seed: int, count: int) -> float:
        z = (seed + (count + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        return ((z >> 40) + 0.5) / 2**24

    seeds, counts = torch.tensor([0, 1, 2**62 + 12345]), torch.tensor([0, 7, 399])
    expected = [by_hand(int(s), int(c)) for s, c in zip(seeds, counts, strict=True)]
    np.testing.assert_allclose(uniforms(seeds, counts).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "dynamic"}},
    ],
    ids=str,
)
def test_other_shapes_are_left_to_the_models_own_code(change):
    model = tiny_model()
    for name, value in change.items():
        setattr(model.config, name, value)
    assert not can_decode(model)
