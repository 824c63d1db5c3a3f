"""Gradients of single terms and groups against plain autograd, on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch

from moored.algo.gradients import decompose, rank_buckets
from moored.config import load_config
from moored.engine import gradients as kept_gradients
from moored.engine.base import Request, SamplingParams
from moored.engine.gradients import ProjectedGradients, StoredGradients, chosen_weights
from moored.engine.local.learner import LocalLearner
from moored.engine.local.sampler import LocalSampler
from moored.engine.passes import compute_layers_twice, evaluation_mode
from moored.errors import MooredError
from moored.training.algorithms import load_algorithm
from moored.training.gradients import measure_gradients, projection_error, update_by_group
from moored.training.samples import score_groups, select_samples
from moored.training.update import estimate_advantages, update
from moored.types import Group, Prompt, StopReason, Trajectory, Turn
from tests.tiny_model import tiny_model

VOCABULARY = 48
NUM_GROUPS = 6
ALGORITHMS = ["ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo"]


def small_model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return tiny_model(scale=2.0, vocab_size=VOCABULARY, **sizes)


def config_of(name: str = "grpo", *overrides: str):
    base = [f"algorithm.name={name}", "algorithm.kl_coef=0.05", "algorithm.entropy_coef=0.02"]
    base += ["optimizer.num_minibatches=1", "rollout.max_response_tokens=12", "filter.rule=none"]
    return load_config({}, [*base, *overrides])


@cache
def groups_of() -> list[Group]:
    """Six groups of four replies of unequal length; the first and the fourth have RV 0."""
    rng = np.random.default_rng(0)
    sampler = LocalSampler(small_model())
    params = SamplingParams(max_tokens=9, stop_ids=(1, 2, 3))
    groups = []
    for number in range(NUM_GROUPS):
        prompt = Prompt(rng.integers(4, VOCABULARY, size=4 + number))
        requests = [
            Request(session=10 * number + i, prompt=prompt, seed=10 * number + i) for i in range(4)
        ]
        rewards = [1.0] * 4 if number % 3 == 0 else rng.integers(0, 3, size=4)
        members = [
            Trajectory(
                env="toy",
                task_seed=number,
                episode_seed=place,
                turns=(
                    Turn(
                        prompt=prompt,
                        completion_ids=reply.token_ids,
                        logprobs=reply.logprobs,
                        reply="",
                        reward=float(rewards[place]),
                    ),
                ),
                stop=StopReason.DONE,
            )
            for place, reply in enumerate(sampler.generate(requests, params))
        ]
        groups.append(
            Group(group_id=number, env="toy", task_seed=number, trajectories=tuple(members))
        )
    return groups


def learner_of(name: str = "grpo", *overrides: str) -> LocalLearner:
    """A learner whose policy has moved away from its reference, and a little from the sampler."""
    config = config_of(name, *overrides)
    algorithm = load_algorithm(config.algorithm)
    learner = LocalLearner(
        small_model(),
        config,
        with_critic=algorithm.needs_critic,
        loss=algorithm.loss,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in learner.model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
    return learner


def parts_of(learner: LocalLearner):
    config = learner.config
    return update_by_group(config, load_algorithm(config.algorithm), learner, groups_of())


def flat(gradients: Sequence[torch.Tensor | None], weights) -> np.ndarray:
    pairs = zip(gradients, weights, strict=True)
    parts = [torch.zeros_like(w) if g is None else g for g, w in pairs]
    return torch.cat([part.reshape(-1) for part in parts]).double().numpy()


class Remembered(StoredGradients):
    """Keeps the sums where a test can see them."""

    last: Remembered

    def products(self) -> np.ndarray:
        type(self).last = self
        return super().products()


@pytest.fixture
def stored(monkeypatch):
    """The gradients (T, P, D) that a measurement stores."""
    monkeypatch.setattr(kept_gradients, "StoredGradients", Remembered)

    def read() -> np.ndarray:
        return Remembered.last._sums_TPD.astype(float)

    return read


@pytest.mark.parametrize("name", ALGORITHMS)
def test_terms_and_groups_add_up_to_the_gradient_that_an_update_applies(name, stored, monkeypatch):
    learner = learner_of(name, "optimizer.grad_clip=1e9")
    found = learner.term_gradients(parts_of(learner))
    total = stored().sum(axis=(0, 1))
    applied = []
    monkeypatch.setattr(
        learner._trained[0].optimizer,
        "step",
        lambda: applied.append([w.grad for w in learner._trained[0].weights]),
    )
    config, algorithm = learner.config, load_algorithm(learner.config.algorithm)
    selection = score_groups(config.filter, groups_of())
    samples = select_samples(config, groups_of(), selection)
    advantages = estimate_advantages(config, algorithm, learner, groups_of(), samples)
    update(config, algorithm, learner, samples, advantages, selection, 1)
    (gradient,) = [flat(grads, learner._trained[0].weights) for grads in applied]
    assert found.terms == ("task", "kl", "entropy")
    assert np.linalg.norm(gradient) > 0.01
    assert np.abs(total - gradient).max() < 1e-6 * max(1.0, np.abs(gradient).max())


def plain_terms(learner: LocalLearner, samples) -> list[torch.Tensor]:
    """Task, KL and entropy of a loss, sample by sample through the model's own forward pass."""
    options = learner.config.algorithm
    task = kl = entropy = torch.zeros(())
    for given in samples:
        prompt, ids = given.sample.prompt.ids, given.sample.ids_T
        whole = torch.from_numpy(np.concatenate([prompt, ids]))[None]
        at = slice(len(prompt) - 1, -1)
        log_p = torch.log_softmax(learner.model(whole).logits[0, at], dim=-1)
        with torch.no_grad():
            assert learner.reference is not None
            ref = torch.log_softmax(learner.reference(whole).logits[0, at], dim=-1)
        rows = np.arange(len(ids))
        logp, ref_logp = log_p[rows, ids], ref[rows, ids]
        old, advantages, weights, means = (
            torch.from_numpy(array).float()
            for array in (
                *(given.sample.old_logprobs_T, given.advantages_T),
                *(given.weights_T, given.mean_weights_T),
            )
        )
        ratio = torch.exp(logp - old)
        clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        bounded = torch.minimum(loss, -advantages * (options.dual_clip or 1e9))
        loss = torch.where(advantages < 0, bounded, loss)
        task = task + (weights * loss).sum()
        d = logp - ref_logp
        kl = kl + options.kl_coef * (means * (torch.exp(-d) - 1 + d)).sum()
        bonus = (means * -(log_p.exp() * log_p).sum(dim=-1)).sum()
        entropy = entropy - options.entropy_coef * bonus
    return [task, kl, entropy]


@pytest.mark.parametrize("name", ["grpo", "ppo", "dr_grpo"])
def test_the_decomposition_is_autograd_of_the_full_loss_on_each_bucket(name):
    learner = learner_of(name)
    parts = parts_of(learner)
    weights = chosen_weights(learner.model, "all")
    rv = [np.var([t.reward for t in group.trajectories]) for group in groups_of()]
    tokens = [sum(given.sample.num_loss_tokens for given in part) for part in parts]
    found = learner.term_gradients(parts)
    figures = decompose(
        found.products_TPTP,
        found.terms,
        rv=rv,
        num_tokens=tokens,
        num_samples=[4] * NUM_GROUPS,
        num_buckets=3,
    )
    for members, bucket in zip(rank_buckets(rv, 3), figures.buckets, strict=True):
        joined = [given for index in members for given in parts[index]]
        terms = plain_terms(learner, joined)
        gradients = [
            flat(torch.autograd.grad(x, weights, retain_graph=True), weights) for x in terms
        ]
        scale = sum(tokens) / sum(tokens[index] for index in members)
        for term, gradient in zip(found.terms, gradients, strict=True):
            expected = scale * np.linalg.norm(gradient)
            assert bucket.terms[term].norm == pytest.approx(expected, rel=1e-6, abs=1e-6)
        full = flat(torch.autograd.grad(terms[0] + terms[1] + terms[2], weights), weights)
        inner = found.products_TPTP[:, members][:, :, :, members].sum()
        assert inner**0.5 == pytest.approx(np.linalg.norm(full), rel=1e-6, abs=1e-6)
        length = np.linalg.norm(gradients[0]) * np.linalg.norm(gradients[2])
        if length > 0.0:
            cosine = gradients[0] @ gradients[2] / length
            assert bucket.cosines["task_entropy"] == pytest.approx(cosine, abs=1e-6)


def test_micro_batches_change_no_figure():
    groups, config = groups_of(), config_of()
    records = []
    for tokens in (16, 64, 4096):
        learner = learner_of("grpo", f"engine.micro_batch_tokens={tokens}")
        algorithm = load_algorithm(config.algorithm)
        options = config.gradients.model_copy(update={"num_buckets": 3})
        records.append(measure_gradients(learner.config, algorithm, learner, groups, options))
    norms = [
        [b["terms"][t]["norm"] for b in r["buckets"] for t in ("task", "kl", "entropy")]
        for r in records
    ]
    assert norms[0] == pytest.approx(norms[2], rel=1e-5, abs=1e-8)
    assert norms[1] == pytest.approx(norms[2], rel=1e-5, abs=1e-8)


def test_groups_without_reward_variance_have_no_task_gradient_but_regularisers_pull():
    learner = learner_of("grpo")
    found = learner.term_gradients(parts_of(learner))
    squares = np.einsum("tptp->tp", found.products_TPTP)
    assert squares[0, [0, 3]].tolist() == [0.0, 0.0]
    assert (squares[0, [1, 2, 4, 5]] > 1e-6).all()
    assert (squares[1:] > 0.0).all()


def test_measuring_leaves_weights_gradients_and_random_numbers_as_they_are():
    learner = learner_of("ppo")
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    state = torch.get_rng_state()
    learner.term_gradients(parts_of(learner), max_numbers=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in learner.model.parameters())
    assert not learner._trained[0].optimizer.state
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_projection_keeps_norms_and_cosines_within_the_stated_error():
    learner = learner_of("grpo")
    parts = parts_of(learner)
    exact = learner.term_gradients(parts)
    projected = learner.term_gradients(parts, max_numbers=1000)
    assert exact.dimensions is None and projected.dimensions == kept_gradients.DIMENSIONS
    error = projection_error(kept_gradients.DIMENSIONS)
    assert error == pytest.approx(3 / (2**15) ** 0.5) and error < 0.02
    arguments = {
        "rv": np.arange(NUM_GROUPS),
        "num_tokens": [1] * NUM_GROUPS,
        "num_samples": [1] * NUM_GROUPS,
        "num_buckets": 3,
    }
    pairs = zip(
        decompose(exact.products_TPTP, exact.terms, **arguments).buckets,
        decompose(projected.products_TPTP, exact.terms, **arguments).buckets,
        strict=True,
    )
    for right, close in pairs:
        for term in exact.terms:
            assert close.terms[term].norm == pytest.approx(right.terms[term].norm, rel=error)
        for name, cosine in right.cosines.items():
            assert close.cosines[name] == pytest.approx(cosine, abs=2 * error)
    again = learner.term_gradients(parts, max_numbers=1000)
    assert np.array_equal(again.products_TPTP, projected.products_TPTP)


def test_the_stated_error_of_a_projection_holds_for_nearly_all_gradients():
    weights = [torch.nn.Parameter(torch.zeros(50, 40)), torch.nn.Parameter(torch.zeros(700))]
    kept = ProjectedGradients(weights, 1, 300, dimensions=256)
    generator = torch.Generator().manual_seed(0)
    norms = []
    for group in range(300):
        drawn = [torch.randn(weight.shape, generator=generator) for weight in weights]
        norms.append(float(sum((d**2).sum() for d in drawn)) ** 0.5)
        kept.add(0, group, drawn)
    found = np.sqrt(np.diagonal(kept.products()[0, :, 0, :]))
    off = np.abs(found / np.array(norms) - 1.0)
    assert (off < projection_error(256)).mean() > 0.98
    # And it is not stated far too large.
    assert (off < projection_error(256) / 3).mean() < 0.9


def test_the_last_block_has_its_own_weights_alone_and_the_same_gradients(stored):
    learner = learner_of("grpo")
    parts = parts_of(learner)
    last = learner.model.get_submodule("model.layers.1")
    own = chosen_weights(learner.model, "last-block")
    assert [id(w) for w in own] == [id(w) for w in last.parameters()]
    learner.term_gradients(parts, params="last-block")
    cheap = stored()
    learner.term_gradients(parts)
    names = [name for name, _ in learner.model.named_parameters()]
    sizes = [weight.numel() for weight in learner.model.parameters()]
    stops = np.cumsum(sizes)
    columns = np.concatenate(
        [
            np.arange(stop - size, stop)
            for name, size, stop in zip(names, sizes, stops, strict=True)
            if name.startswith("model.layers.1.")
        ]
    )
    assert np.allclose(cheap, stored()[:, :, columns], rtol=1e-6, atol=1e-9)


def test_lora_weights_are_refused_where_there_are_none_and_chosen_where_there_are():
    pytest.importorskip("peft")
    from moored.engine.local.engine import add_lora

    with pytest.raises(MooredError, match="no LoRA weights"):
        chosen_weights(small_model(), "lora")
    model = add_lora(small_model(), load_config({}, ["optimizer.lora_rank=2"]))
    lora = chosen_weights(model, "lora")
    assert len(lora) == 2 * 7 * 2
    assert [id(w) for w in lora] == [id(w) for w in chosen_weights(model, "all")]
    assert len(chosen_weights(model, "last-block")) == 7 * 2


def test_a_group_whose_episodes_all_ended_in_errors_counts_nothing():
    broken = [
        Trajectory(env="toy", task_seed=9, episode_seed=i, turns=(), stop=StopReason.ENV_ERROR)
        for i in range(4)
    ]
    group = Group(group_id=9, env="toy", task_seed=9, trajectories=tuple(broken))
    learner = learner_of("grpo")
    options = learner.config.gradients.model_copy(update={"num_buckets": 1})
    algorithm = load_algorithm(learner.config.algorithm)
    groups = [*groups_of(), group]
    with_it, without = (
        cast(dict[str, Any], measure_gradients(learner.config, algorithm, learner, given, options))
        for given in (groups, groups_of())
    )
    # As a gradient of 0 it would add to the scatter over groups, and fill a place of a bucket.
    for name in ("norm", "noise", "snr"):
        figures = [record["whole"]["terms"]["kl"][name] for record in (with_it, without)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-6), name
    sizes = [[bucket["num_groups"] for bucket in x["buckets"]] for x in (with_it, without)]
    assert sizes[0] == sizes[1]
    assert with_it["num_groups"] == 6


def test_layers_and_heads_that_are_computed_again_give_the_same_gradients():
    plain = learner_of("grpo")
    again = learner_of("grpo")
    compute_layers_twice(again.model)
    again._checkpointed = evaluation_mode([again.model])
    assert again._checkpointed
    # A head with scaled logits has no derivatives written out: its chunks are computed again.
    again.model.config.logits_scaling = 1.0  # pyright: ignore
    found, expected = (x.term_gradients(parts_of(x)).products_TPTP for x in (again, plain))
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-9)
