"""Training in bfloat16: one rounded copy to compute with, float32 where things add up."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import peft
import pytest
import torch

from moored.config import load_config
from moored.engine.fast.sampler import SlotSampler
from moored.engine.local.learner import LocalLearner
from moored.engine.local.precision import compute_in_bfloat16
from moored.training.samples import LossSample, Sample
from moored.types import Prompt
from tests.tiny_model import tiny_model

BF16 = {"engine": {"dtype": "bfloat16"}}


def with_lora(model):
    options = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, options)


def samples(num: int = 4) -> list[LossSample]:
    """Continuations of 6 tokens, half of them to be made likelier."""
    rng = np.random.default_rng(0)
    found = []
    for index in range(num):
        sample = Sample(
            prompt=Prompt(rng.integers(0, 64, size=9)),
            ids_T=rng.integers(0, 64, size=6),
            loss_mask_T=np.ones(6, dtype=bool),
            old_logprobs_T=np.full(6, -4.0),
            turn_ends_T=np.arange(6) == 5,
            rewards_T=np.zeros(6),
            group=index,
            trajectory=index,
        )
        found.append(
            LossSample(
                sample=sample,
                advantages_T=np.full(6, 1.0 if index % 2 else -0.5),
                weights_T=np.full(6, 1.0 / (6 * num)),
                mean_weights_T=np.full(6, 1.0 / (6 * num)),
                returns_T=np.linspace(0.0, 1.0, 6),
                old_values_T=np.zeros(6),
            )
        )
    return found


def learner_of(model, options=None, **kwargs) -> LocalLearner:
    return LocalLearner(model, load_config({**BF16, **(options or {})}), **kwargs)


def storage_bytes(*modules: torch.nn.Module) -> int:
    """Each storage once."""
    found = {}
    for module in modules:
        for weight in module.parameters():
            storage = weight.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_matrices_are_kept_once_in_bfloat16_and_vectors_in_float32():
    model = tiny_model()
    learner_of(model)
    kinds = {name: weight.dtype for name, weight in model.named_parameters()}
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16
    assert kinds["model.layers.0.mlp.down_proj.weight"] == torch.bfloat16
    assert kinds["model.layers.0.input_layernorm.weight"] == torch.float32


def test_updates_smaller_than_the_rounding_add_up():
    model = tiny_model()
    learner = learner_of(model, {"optimizer": {"lr": 1e-6}})
    (trained,) = learner._trained
    before = [master.detach().clone() for master in trained.masters]
    rounded = [weight.detach().clone() for weight in trained.weights]
    for _ in range(3):
        next(learner.step([samples()]))
    # Adam moves every weight by about the rate, of which bfloat16 shows nothing at 0.02.
    moved = [(m - b).abs().max().item() for m, b in zip(trained.masters, before, strict=True)]
    assert all(1e-6 < each < 4e-6 for each in moved)
    matrices = [(w, r) for w, r in zip(trained.weights, rounded, strict=True) if w.ndim > 1]
    share = [(w != r).float().mean().item() for w, r in matrices]
    assert max(share) < 0.2


def test_gradients_equal_those_of_autocast_over_float32_weights():
    ours = learner_of(tiny_model(), {"optimizer": {"grad_clip": 1e9}})
    with torch.no_grad():
        # What the rounded copy computes is what autocast makes of weights that are rounded alike.
        model = tiny_model()
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16) if weight.ndim > 1 else weight)
    theirs = LocalLearner(model, load_config({"optimizer": {"grad_clip": 1e9}}))
    theirs.bf16, theirs._uses_tree = True, ours._uses_tree
    found = []
    for learner in (ours, theirs):
        (trained,) = learner._trained
        learner._add_up(learner._prepare(samples()))
        found.append(trained.gradients())
    for mine, plain in zip(*found, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - plain).norm() <= 0.02 * plain.norm()


def test_micro_batches_add_up_in_float32():
    found = []
    for tokens in (10_000, 1):
        learner = learner_of(
            tiny_model(), {"engine": {"dtype": "bfloat16", "micro_batch_tokens": tokens}}
        )
        learner._add_up(learner._prepare(samples(16)))
        found.append(learner._trained[0].gradients())
    for whole, pieces in zip(*found, strict=True):
        # Sixteen roundings of 2^-9 at random, where a sum in bfloat16 would lose small parts.
        assert (whole - pieces).norm() <= 0.02 * whole.norm()


def test_no_gradient_of_a_micro_batch_outlives_it():
    learner = learner_of(tiny_model(), with_critic=True)
    learner._add_up(learner._prepare(samples()))
    assert all(weight.grad is None for weight in learner.model.parameters())
    next(learner.step([samples()]))
    assert not any(trained.gradients() for trained in learner._trained)


def test_a_learner_that_is_dropped_leaves_no_weights_behind():
    learner = learner_of(tiny_model())
    next(learner.step([samples()]))
    (trained,) = learner._trained
    left = [weakref.ref(each) for each in (*trained.masters, *trained.weights)]
    del learner, trained
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


def test_a_resumed_run_goes_on_with_the_exact_master_weights(tmp_path):
    first = learner_of(tiny_model(), {"optimizer": {"lr": 1e-5}}, with_critic=True)
    next(first.step([samples()]))
    first.save(tmp_path)
    second = learner_of(tiny_model(), {"optimizer": {"lr": 1e-5}}, with_critic=True)
    second.load(tmp_path)
    for learner in (first, second):
        next(learner.step([samples()]))
    for one, other in zip(first._trained, second._trained, strict=True):
        for mine, theirs in zip(one.masters, other.masters, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_fast_sampler_writes_with_the_learners_own_matrices(dtype, is_tied):
    model = tiny_model(tie_word_embeddings=is_tied)
    expected = tiny_model(tie_word_embeddings=is_tied).state_dict()
    if dtype == torch.bfloat16:
        compute_in_bfloat16(model)
    sampler = SlotSampler(model, dtype=dtype, max_context=64, shares=True)
    decoder, layer = sampler.decoder, model.model.layers[1]
    assert decoder.layers[1]["qkv"].data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    assert decoder.layers[1]["down"].data_ptr() == layer.mlp.down_proj.weight.data_ptr()
    assert decoder.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert decoder.head.data_ptr() == model.lm_head.weight.data_ptr()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name
    with torch.no_grad():
        layer.self_attn.v_proj.weight.fill_(0.5)
    assert (decoder.layers[1]["qkv"][-16:] == 0.5).all()
    assert (decoder.layers[1]["qkv"][:-16] != 0.5).any()


def test_shared_weights_are_saved_and_loaded_as_others(tmp_path):
    model = tiny_model()
    learner = LocalLearner(model)
    SlotSampler(model, dtype=torch.float32, max_context=64, shares=True)
    next(learner.step([samples()]))
    learner.save(tmp_path)
    other = LocalLearner(tiny_model())
    other.load(tmp_path)
    for name, weight in other.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_under_lora_reference_and_critic_add_no_copy_of_the_base():
    model = with_lora(tiny_model())
    learner = learner_of(model, {"algorithm": {"kl_coef": 0.1}}, with_critic=True)
    assert learner.reference is model
    assert learner.critic is not None
    adapters = [w for w in model.parameters() if w.requires_grad]
    own = sum(w.nbytes for w in adapters) + 33 * 4
    assert storage_bytes(model, learner.critic) - storage_bytes(model) <= own


def test_the_reference_of_a_lora_run_is_the_model_without_adapters():
    model = with_lora(tiny_model())
    learner = LocalLearner(model, load_config({"algorithm": {"kl_coef": 0.1}}))
    given = [each.sample for each in samples()]
    before = learner.reference_logprobs(given)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    for mine, theirs in zip(learner.reference_logprobs(given), before, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert all(w.requires_grad for n, w in model.named_parameters() if "lora_" in n)


def test_embeddings_that_scale_by_their_own_precision_stay_exact():
    model = tiny_model("gemma3_text", head_dim=16)
    compute_in_bfloat16(model)
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16


@pytest.mark.gpu
def test_states_on_the_host_give_the_same_updates():
    found = []
    for states in ("device", "host"):
        learner = learner_of(tiny_model().cuda(), {"optimizer": {"states": states, "lr": 1e-4}})
        for _ in range(3):
            next(learner.step([samples()]))
        (trained,) = learner._trained
        assert {m.device.type for m in trained.masters} == {"cuda" if states == "device" else "cpu"}
        found.append([master.detach().cpu() for master in trained.masters])
    for device, host in zip(*found, strict=True):
        torch.testing.assert_close(device, host, rtol=0, atol=1e-6)


IDS = torch.arange(3, 12)[None]


def logits(model: Any, *, bf16: bool) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("family", "lora"),
    [(family, False) for family in ("llama", "gemma2", "gpt2", "olmoe", "qwen3")]
    # peft has warnings for other layers than these.
    + [(family, True) for family in ("llama", "gemma2")],
)
def test_layer_by_layer_in_float32_it_is_the_model_that_was_rounded(family, lora):
    exact = tiny_model(family, scale=2.0).eval()
    expected = logits(exact, bf16=False)
    learner = learner_of(with_lora(exact) if lora else exact)
    if lora:  # nobody trains the base: it has no other weights than the rounded ones
        weights = {name: w.detach().float() for name, w in learner.model.named_parameters()}
        asked = {"input_ids": IDS}
        expected = torch.func.functional_call(learner.model, weights, kwargs=asked).logits
    rounded = logits(learner.model, bf16=True)
    with learner.in_float32():
        found = logits(learner.model, bf16=False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
    assert (found - rounded).abs().max() > 1e-3
    torch.testing.assert_close(logits(learner.model, bf16=True), rounded, atol=0.0, rtol=0.0)


def test_only_the_layer_that_runs_has_float32_weights():
    learner = learner_of(tiny_model(num_hidden_layers=3))
    model: Any = learner.model
    before = {name: (w.dtype, w.data_ptr()) for name, w in model.named_parameters()}
    seen = []

    def note(*_: object) -> None:
        seen.append([layer.mlp.up_proj.weight.dtype for layer in model.model.layers])

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(note)
    with learner.in_float32():
        logits(model, bf16=False)
    wide, narrow = torch.float32, torch.bfloat16
    assert seen == [[wide, narrow, narrow], [narrow, wide, narrow], [narrow, narrow, wide]]
    assert {name: (w.dtype, w.data_ptr()) for name, w in model.named_parameters()} == before


def test_a_pass_in_float32_that_fails_leaves_the_weights_as_they_were():
    learner = learner_of(tiny_model())
    model: Any = learner.model

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"), learner.in_float32():
        logits(model, bf16=False)
    hook.remove()
    assert model.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16
    assert logits(model, bf16=True).isfinite().all()
