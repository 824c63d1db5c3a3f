"""Engines that compute something other than the model does are refused before a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from moored.config import load_config
from moored.engine.base import LockstepStream, Request, SamplingParams
from moored.engine.check import PlainModel, check_context, check_engine
from moored.engine.local.engine import LocalEngine
from moored.engine.passes import OutOfMemoryError, says_out_of_memory
from moored.errors import MooredError
from moored.types import Completion, FinishReason, Prompt, ScoreRequest

EXACT = np.array([-1.0, -0.5, -2.0])
"""What the model says of the three tokens of every reply, in float32."""


class FakeEngine:
    """Replies of three tokens, whose log-probabilities are off by what sampler and learner add."""

    def __init__(self, sampler_off: float = 0.0, learner_off: float = 0.0) -> None:
        self.renderer = SimpleNamespace(start=lambda messages: Prompt(np.array([1, 2])))
        self.sampler = self.scorer = self
        self._sampler_off, self._learner_off = sampler_off, learner_off

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        # Only the last token is off.
        logprobs = EXACT + np.array([0.0, 0.0, self._sampler_off])
        return [Completion(np.array([5, 6, 7]), logprobs, FinishReason.LENGTH) for _ in requests]

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Nothing is kept."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [[EXACT + self._learner_off for _ in r.continuations] for r in requests]


def plain(bf16: bool, off: float = 0.0) -> PlainModel:
    """The model, whose own bfloat16 pass is off by `off` nats."""
    return PlainModel(
        kind="toys",
        logprobs=lambda prompt_ids, ids, in_bf16: EXACT - off if in_bf16 else EXACT,
        bf16=bf16,
    )


def check(engine: FakeEngine, model: PlainModel) -> None:
    check_engine(engine, model, temperature=1.0)  # pyright: ignore[reportArgumentType]


def test_a_sound_engine_passes():
    check(FakeEngine(), plain(bf16=False))
    check(FakeEngine(sampler_off=5e-4, learner_off=-5e-4), plain(bf16=False))


@pytest.mark.parametrize(
    ("engine", "name"),
    [(FakeEngine(sampler_off=0.2), "sampler"), (FakeEngine(learner_off=-0.2), "learner")],
)
def test_in_float32_a_fifth_of_a_nat_is_refused_and_its_part_named(engine, name):
    with pytest.raises(MooredError, match=f"toys do not work .* of the {name} differ .* by 0.2 "):
        check(engine, plain(bf16=False))


def test_in_bfloat16_three_times_the_error_of_the_model_is_rounding_and_more_is_not():
    # The model's own pass is off by 0.25 nats: 0.75 are allowed.
    check(FakeEngine(sampler_off=0.7, learner_off=-0.7), plain(bf16=True, off=0.25))
    with pytest.raises(MooredError, match=r"by 0.8 nats, where 0.75 are rounding"):
        check(FakeEngine(sampler_off=0.8), plain(bf16=True, off=0.25))


def test_in_bfloat16_a_lucky_model_does_not_make_the_check_stricter_than_rounding():
    check(FakeEngine(sampler_off=0.04), plain(bf16=True, off=0.0))
    with pytest.raises(MooredError, match=r"where 0.05 are rounding"):
        check(FakeEngine(sampler_off=0.06), plain(bf16=True, off=0.0))


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(MooredError, match="sampler differ from the model's by nan"):
        check(FakeEngine(sampler_off=float("nan")), plain(bf16=True, off=1.0))


class UnluckyEngine(FakeEngine):
    """As a mixture of experts in bfloat16: rounding sends some tokens of the first replies to other
    experts than those of the exact model."""

    def __init__(self, num_off: int) -> None:
        super().__init__()
        self.left = num_off

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        self._sampler_off = 0.3 if self.left > 0 else 0.0
        self.left -= 1
        return super().generate(requests, params)


def test_in_bfloat16_a_reply_that_is_off_by_chance_is_no_reason_to_refuse():
    check(UnluckyEngine(2), plain(bf16=True))
    with pytest.raises(MooredError, match=r"by 0.3 nats, where 0.05 are rounding"):
        check(UnluckyEngine(100), plain(bf16=True))
    # In float32 nothing is left to chance.
    with pytest.raises(MooredError, match=r"by 0.3 nats, where 0.001 are rounding"):
        check(UnluckyEngine(1), plain(bf16=False))


def failing(error: Exception) -> PlainModel:
    def fail(*_: object) -> np.ndarray:
        raise error

    return PlainModel(kind="toys", logprobs=fail, bf16=True)


def test_a_model_whose_own_pass_fails_is_refused_in_a_sentence():
    with pytest.raises(MooredError, match=r"toys do not work .* \(RuntimeError: expected m1\)"):
        check(FakeEngine(), failing(RuntimeError("expected m1")))


def test_too_little_memory_for_a_models_own_pass_is_told_as_such(checked, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("moored.engine.local.engine.nullcontext", fail)
    with pytest.raises(OutOfMemoryError, match="out of GPU memory in the check of the model"):
        checked("GPT2", n_embd=32, n_layer=2, n_head=2)


class FullSampler(FakeEngine):
    @says_out_of_memory("sampling")
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class FullLearner(FakeEngine):
    @says_out_of_memory("scoring")
    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("kind", "what"), [(FullSampler, "sampling"), (FullLearner, "scoring")])
def test_too_little_memory_is_not_taken_for_an_unknown_model(kind, what):
    with pytest.raises(OutOfMemoryError, match=f"out of GPU memory in {what}") as caught:
        check(kind(), plain(bf16=True))
    assert "do not work" not in str(caught.value)
    assert "engine.micro_batch_tokens" in str(caught.value)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def checked(toy_tokenizer, tmp_path: Path):
    """A function that checks a random model of some configuration, as a run does."""
    tokenizer = toy_tokenizer.make_tokenizer("chatml")

    def check_model(kind: str, max_context: int = 512, **options) -> None:
        config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **options)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        given = {"model": str(tmp_path), "rollout": {"max_context": max_context}}
        LocalEngine(load_config({**given, "engine": {"device": "cpu"}})).check()

    return check_model


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "GPTNeoX", "Gemma"])
def test_models_that_work_pass(checked, kind):
    checked(kind, **SIZES, intermediate_size=64)


def test_gpt2_which_is_not_llama_shaped_passes(checked):
    checked("GPT2", n_embd=32, n_layer=2, n_head=2)


def test_what_an_engine_would_refuse_is_refused_before_it_loads_a_model(tmp_path):
    def check(described: dict[str, object], engine: str = "local") -> None:
        (tmp_path / "config.json").write_text(json.dumps(described))
        given = {"model": str(tmp_path), "rollout": {"max_context": 513}}
        check_context(load_config({**given, "engine": {"kind": engine}}))

    few = {"model_type": "gpt2", "n_positions": 512}
    for engine in ("local", "torchrun", "ray"):
        with pytest.raises(MooredError, match=r"= 513 is longer than the 512 tokens .* this gpt2"):
            check(few, engine)
    with pytest.raises(MooredError, match="a mistral model with layers that look back 512 tokens"):
        check({"model_type": "mistral", "sliding_window": 512})
    # An engine of one's own decides for itself.
    check(few, "my.engine:make")
    check({"model_type": "gpt2", "n_positions": 513})
    check({"model_type": "falcon", "alibi": True, "max_position_embeddings": 512})


def test_a_window_shorter_than_the_dialogues_is_refused(checked):
    mistral = {**SIZES, "intermediate_size": 64, "sliding_window": 256}
    with pytest.raises(MooredError, match="max_context to 256 or less"):
        checked("Mistral", max_context=257, **mistral)
    checked("Mistral", max_context=256, **mistral)


def test_a_model_whose_logits_are_made_otherwise_is_refused(checked):
    with pytest.raises(MooredError, match=r"cohere.* differ from the model's by"):
        checked("Cohere", **SIZES, intermediate_size=64, logit_scale=0.25)


def test_a_model_with_another_cache_is_refused(checked):
    opt = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    with pytest.raises(MooredError, match="'opt' do not work"):
        checked("OPT", **opt)
