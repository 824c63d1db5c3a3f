"""Padded micro-batches change nothing, and so do CUDA graphs of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moored.config import load_config
from moored.engine.fast.buckets import bucket
from moored.engine.fast.capture import HostBuffers
from moored.engine.fast.graphs import ALIGNMENT_BYTES, DeviceBatch, _tensors, _with_bounds, pad
from moored.engine.local.learner import LocalLearner
from moored.engine.packing import loss_batch, micro_batches, pack, to_line
from moored.training.losses import cispo, gspo, imitation, ppo_clip
from moored.training.samples import LossSample, Sample
from moored.types import Prompt, ScoreRequest
from tests.tiny_model import tiny_model


def untied_model():
    return tiny_model(tie_word_embeddings=False).eval()


def make_samples(lengths=((5, (7, 3)), (9, (4, 11, 2))), seed=0) -> list[LossSample]:
    """(prompt tokens, continuations of it): every third token is an observation."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, (size, members) in enumerate(lengths):
        prompt = Prompt(rng.integers(1, 64, size))
        for count in members:
            mask = np.arange(count) % 3 != 2
            sample = Sample(
                prompt=prompt,
                ids_T=rng.integers(1, 64, count),
                loss_mask_T=mask,
                old_logprobs_T=np.where(mask, -4.0 + rng.normal(size=count) / 4, 0.0),
                turn_ends_T=np.zeros(count, dtype=bool),
                rewards_T=np.zeros(count),
                group=group,
                trajectory=len(samples),
            )
            samples.append(
                LossSample(
                    sample=sample,
                    advantages_T=rng.normal(size=count) * mask,
                    weights_T=mask / 17.0,
                    mean_weights_T=mask / 20.0,
                    returns_T=rng.normal(size=count) * mask,
                    old_values_T=rng.normal(size=count) * mask,
                )
            )
    return samples


def host_batch(samples, reference=None, most=4096):
    ids = [given.sample.ids_T for given in samples]
    prompts = [given.sample.prompt for given in samples]
    rows = pack(prompts, [len(reply) for reply in ids], max_tokens=most)
    (batch,) = micro_batches(rows, max_tokens=most, padded=False)
    packed = to_line(batch, ids, torch.device("cpu"))
    return loss_batch(packed, samples, reference, with_values=True)


def test_buckets_grow_by_a_half_and_a_third():
    sizes = [bucket(size, 8) for size in (1, 8, 9, 12, 13, 17, 25, 33, 1025)]
    assert sizes == [8, 8, 12, 12, 16, 24, 32, 48, 1536]


def test_a_padded_batch_has_the_sizes_of_its_shape():
    samples = make_samples()
    padded, shape = pad(host_batch(samples))
    tree = padded.packed.tree
    assert tree is not None
    # 5 + 9 prompt tokens, 7 + 3 + 4 + 11 + 2 continuation tokens, of which 5+2+3+8+2 count.
    assert (shape.prompt_tokens, shape.continuation_tokens, shape.num_targets) == (256, 1024, 256)
    assert tree.num_prompt_tokens == 256
    assert sum(map(sum, tree.continuations)) == 1024
    # What is added comes in pieces of at most 128: 242 prompt tokens, 997 others.
    assert tree.prompts == (9, 5, 128, 114)
    assert tree.continuations == ((11, 4, 2), (7, 3), (128,) * 7 + (101,), ())
    assert (shape.num_prompts, shape.num_stretches, shape.longest) == (16, 64, 128)
    assert shape.longest_continuations == 1024
    assert padded.packed.input_ids.shape == padded.packed.position_ids.shape == (1, 1280)
    assert padded.streams["weights"].count_nonzero() == 20
    assert padded.streams["sequence"].max() == 255
    assert padded.packed.sources.max() < 256 + 27


def test_a_batch_that_fills_its_shape_still_gets_a_prompt():
    samples = make_samples(lengths=((255, (256,)),))
    padded, shape = pad(host_batch(samples))
    assert shape.prompt_tokens == 256
    assert padded.packed.tree is not None
    assert padded.packed.tree.prompts == (255, 1)
    samples = make_samples(lengths=((256, (10,)),))
    assert pad(host_batch(samples))[1].prompt_tokens == 384


def test_what_is_added_is_divided_so_that_no_prompt_has_more_continuations_than_the_real_ones():
    # 30 prompts of 20 tokens with 90 each: 2,700, which are filled up to 3,072; then 5 of 900.
    padded, shape = pad(host_batch(make_samples(lengths=((20, (90,)),) * 30)))
    assert (shape.continuation_tokens, shape.longest_continuations) == (3072, 1024)
    padded, shape = pad(host_batch(make_samples(lengths=((20, (450, 450)),) * 5), most=8192))
    tree = padded.packed.tree
    assert tree is not None
    # 4,500 are filled up to 6,144 by 1,644 behind two prompts, of 1 token and of what is left.
    assert (shape.continuation_tokens, shape.longest_continuations) == (6144, 1024)
    assert tree.prompts == (20,) * 5 + (1, 155)
    assert [sum(members) for members in tree.continuations] == [900] * 5 + [1024, 620]
    tree = _with_bounds(padded, shape).packed.tree
    assert tree is not None
    bounds = tree.prepared["bounds"]
    assert (bounds.longest_prompt, bounds.longest_continuations) == (512, 1024)
    assert bounds.continuations[-1] == 6144


@pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo, imitation])
def test_padding_changes_neither_losses_nor_gradients(loss):
    config = load_config({"algorithm": {"entropy_coef": 0.01, "kl_coef": 0.1}})
    learner = LocalLearner(untied_model(), config, with_critic=True, loss=loss)
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.weight)
    samples = make_samples()
    reference = learner.reference_logprobs([given.sample for given in samples])
    batch = host_batch(samples, reference)
    weights = [*learner.model.parameters(), *learner.critic.parameters()]

    def compute(given):
        parts = learner._add_gradients(given)
        grads = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        return grads, parts

    grads, parts = compute(batch)
    padded_grads, padded_parts = compute(pad(batch)[0])
    assert parts.keys() == padded_parts.keys()
    for name, value in parts.items():
        torch.testing.assert_close(padded_parts[name], value, rtol=1e-5, atol=1e-6)
    for found, expected in zip(padded_grads, grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_what_is_added_is_like_the_first_token_but_without_weight():
    # With another token its KL might be infinite, and 0 · inf is nan.
    learner = LocalLearner(untied_model(), load_config({"algorithm": {"kl_coef": 0.1}}))
    samples = make_samples()
    reference = learner.reference_logprobs([given.sample for given in samples])
    batch = host_batch(samples, reference)
    padded, shape = pad(batch)
    assert (padded.packed.targets[20:] == batch.packed.targets[0]).all()
    assert (padded.packed.sources[20:] == padded.packed.sources[0]).all()
    for name in ("reference", "old_logprobs", "advantages", "returns", "old_values"):
        assert (padded.streams[name][20:] == batch.streams[name][0]).all()
        assert len(padded.streams[name]) == shape.num_targets
    for name in ("weights", "mean_weights"):
        assert (padded.streams[name][20:] == 0.0).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_copy_fills_a_batch_and_the_next_overwrites_it(device, monkeypatch):
    host = []
    for seed in (0, 1):
        padded, shape = pad(host_batch(make_samples(seed=seed)))
        host.append(_with_bounds(padded, shape))
    buffers = HostBuffers(torch.device(device))
    copies, copy = [], buffers.copy
    monkeypatch.setattr(buffers, "copy", lambda *given: (copies.append(given), copy(*given))[1])
    inputs = DeviceBatch(host[0], torch.device(device))
    for batch in host:
        inputs.fill(batch, buffers)
        pairs = list(zip(_tensors(inputs.batch), _tensors(batch), strict=True))
        assert len(pairs) == 7 + len(batch.streams)
        for found, given in pairs:
            assert found.dtype == given.dtype
            assert found.storage_offset() * found.itemsize % ALIGNMENT_BYTES == 0
            torch.testing.assert_close(found.cpu(), given, rtol=0, atol=0)
    assert len(copies) == 2


def test_gradients_are_not_added_to_the_next_update():
    learner = LocalLearner(untied_model(), load_config({"optimizer": {"grad_clip": 1e9}}))
    samples = make_samples()
    first = next(learner.step([samples], lr_factor=0.0))
    again = next(learner.step([samples], lr_factor=0.0))
    assert again["grad_norm"] == pytest.approx(first["grad_norm"])


def test_a_failed_update_leaves_no_gradients_behind(monkeypatch):
    samples = make_samples()
    options = load_config({"optimizer": {"grad_clip": 1e9}, "engine": {"micro_batch_tokens": 20}})
    learner = LocalLearner(untied_model(), options)
    whole = next(learner.step([samples], lr_factor=0.0))
    add, calls = learner._add_gradients, iter([False, True])

    def fail_at_second(batch):
        if next(calls):
            raise RuntimeError("out of memory")
        return add(batch)

    monkeypatch.setattr(learner, "_add_gradients", fail_at_second)
    with pytest.raises(RuntimeError, match="memory"):
        next(learner.step([samples]))
    monkeypatch.undo()
    again = next(learner.step([samples], lr_factor=0.0))
    assert again["grad_norm"] == pytest.approx(whole["grad_norm"])


class PaddedPasses:
    """What `Graphs` does, without a recording: for machines without a GPU."""

    def run(self, name, compute, batch):
        return compute(pad(batch)[0])


def test_updates_scores_and_values_through_padded_passes_equal_plain_ones():
    found = {}
    for padded in (True, False):
        config = load_config(
            {
                "optimizer": {"lr": 1e-3},
                "algorithm": {"kl_coef": 0.1},
                "engine": {"micro_batch_tokens": 60},
            }
        )
        learner = LocalLearner(untied_model(), config, with_critic=True)
        if padded:
            learner._graphs = PaddedPasses()  # pyright: ignore[reportAttributeAccessIssue]
        samples = make_samples()
        stats = [next(learner.step([samples])) for _ in range(3)]
        plain = [given.sample for given in samples]
        request = ScoreRequest(plain[0].prompt, [sample.ids_T for sample in plain])
        (scores,) = learner.score([request])
        values = learner.values(plain)
        weights = [w.detach() for trained in learner._trained for w in trained.weights]
        found[padded] = stats, np.concatenate([*scores, *values]), weights
        # Recorded passes add to gradients that stay where they are; others leave none behind.
        kept = [bool(trained.gradients()) for trained in learner._trained]
        assert kept == [padded, padded]
    for ours, plain in zip(found[True][0], found[False][0], strict=True):
        assert ours == pytest.approx(plain, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(found[True][1], found[False][1], atol=1e-4)
    for ours, plain in zip(found[True][2], found[False][2], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch warns of itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("compile", "loss"), [(False, ppo_clip), (True, ppo_clip), (False, gspo), (False, cispo)]
)
def test_recorded_updates_equal_plain_ones(tmp_path: Path, compile, loss):
    lengths = [
        ((5, (7, 3)), (9, (4, 11, 2))),
        ((40, (100, 90, 300)), (9, (4, 11, 2))),
        ((12, (6, 3)), (8, (5, 10, 2))),
        ((200, (700, 900, 300)), (300, (400, 500, 600))),
    ]
    batches = [make_samples(each, seed) for seed, each in enumerate(lengths)]
    found = {}
    for plain in (False, True):
        how = {"compile": compile and not plain, "learner": "plain" if plain else "auto"}
        config = load_config(
            {
                "optimizer": {"lr": 1e-3},
                "algorithm": {"entropy_coef": 0.01, "kl_coef": 0.1},
                "engine": {"dtype": "bfloat16", "micro_batch_tokens": 2048, **how},
            }
        )
        learner = LocalLearner(untied_model().cuda(), config, with_critic=True, loss=loss)
        stats = [next(learner.step([samples])) for samples in batches for _ in range(2)]
        learner.save(tmp_path)
        learner.load(tmp_path)
        stats.append(next(learner.step([batches[0]])))
        found[plain] = stats, [weight.detach().clone() for weight in learner.model.parameters()]
    for ours, plain in zip(found[False][0], found[True][0], strict=True):
        assert ours == pytest.approx(plain, rel=0.05, abs=5e-3)
    for ours, plain in zip(found[False][1], found[True][1], strict=True):
        # Nine steps of Adam at 1e-3 move a weight by up to 9e-3.
        assert (ours - plain).abs().mean() < 5e-4


@pytest.mark.gpu
def test_recorded_gradients_scores_and_values_equal_plain_ones():
    samples = make_samples(((200, (150, 90, 300)), (30, (40, 50))))
    grads, scores = {}, {}
    for plain in (True, False):
        options = load_config(
            {"engine": {"dtype": "bfloat16", "learner": "plain" if plain else "auto"}}
        )
        learner = LocalLearner(untied_model().cuda(), options, with_critic=True)
        assert learner.critic is not None
        torch.manual_seed(1)
        torch.nn.init.normal_(learner.critic.head.weight)
        assert (learner._graphs is None) == plain
        given = [each.sample for each in samples]
        ids = [sample.ids_T for sample in given]
        for _ in range(2):  # recorded, then replayed
            for trained in learner._trained:
                # A recorded pass adds to gradients that stay where they are.
                trained.reserve_gradients()
                trained.update(None, keep_grads=True)
            for packed in learner._pack([sample.prompt for sample in given], ids):
                batch = loss_batch(packed, samples, None, with_values=True)
                learner._run("update", learner._add_gradients, batch)
            (scored,) = learner.score([ScoreRequest(given[0].prompt, ids)])
            found = scored, learner.values(given)
        grads[plain] = [grad.clone() for each in learner._trained for grad in each.gradients()]
        scores[plain] = [np.concatenate(each) for each in found]
    for ours, plain in zip(grads[False], grads[True], strict=True):
        assert (ours - plain).norm() <= 0.03 * plain.norm() + 1e-7
    for ours, plain in zip(scores[False], scores[True], strict=True):
        np.testing.assert_allclose(ours, plain, atol=0.05, rtol=0.03)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("width", [80, 100])
def test_heads_of_widths_that_are_no_power_of_2_are_scored_and_trained(width):
    samples, found = make_samples(), []
    requests = [ScoreRequest(each.sample.prompt, [each.sample.ids_T]) for each in samples]
    for kind in ("plain", "auto"):
        options = load_config({"engine": {"dtype": "bfloat16", "learner": kind}})
        learner = LocalLearner(tiny_model(head_dim=width).eval().cuda(), options)
        scores = np.concatenate([scored for (scored,) in learner.score(requests)])
        norms = [next(learner.step([samples]))["grad_norm"] for _ in range(3)]
        found.append((scores, norms))
    (plain, plain_norms), (ours, norms) = found
    np.testing.assert_allclose(ours, plain, atol=0.05)
    assert norms == pytest.approx(plain_norms, rel=0.1)
