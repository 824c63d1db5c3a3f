"""A model in main memory is on its device while it computes, and only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moored.config import load_config
from moored.engine.local import parking
from moored.engine.local.learner import LocalLearner
from moored.engine.local.parking import ALIGNMENT, Parked, ahead
from tests.tiny_model import tiny_model
from tests.unit.engine.local.test_precision import samples, with_lora

IDS = torch.arange(3, 12)[None]


def places(module: torch.nn.Module) -> list[int]:
    return [weight.data_ptr() for weight in module.parameters()]


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=IDS.to(module.device)).logits.cpu()


def test_weights_are_copied_for_a_block_and_are_the_same_before_inside_and_after():
    model = tiny_model()
    expected = logits(model)
    parked = Parked(model)
    waiting = places(model)
    assert torch.equal(logits(model), expected)
    with parked.on_device():
        assert not set(places(model)) & set(waiting)
        assert torch.equal(logits(model), expected)
    assert places(model) == waiting
    assert torch.equal(logits(model), expected)


def test_weights_of_several_precisions_lie_in_one_piece_each_at_a_multiple():
    module = torch.nn.Linear(3, 5)
    module.weight.data = module.weight.data.to(torch.bfloat16)
    expected = [weight.detach().clone() for weight in module.parameters()]
    Parked(module)
    assert module.weight.dtype == torch.bfloat16
    assert module.bias.data_ptr() - module.weight.data_ptr() == ALIGNMENT
    assert all(map(torch.equal, module.parameters(), expected))


def test_a_weight_that_two_layers_share_is_copied_once_and_stays_shared():
    model = tiny_model(tie_word_embeddings=True)
    head, embedding = model.lm_head, model.model.embed_tokens
    parked = Parked(model)
    with parked.on_device():
        assert head.weight is embedding.weight
    assert head.weight.data_ptr() == embedding.weight.data_ptr()


def test_a_block_inside_another_copies_nothing_and_an_error_brings_the_weights_back():
    model = tiny_model()
    parked = Parked(model)
    waiting = places(model)
    with pytest.raises(RuntimeError, match="in the middle"), parked.on_device():
        here = places(model)
        with parked.on_device():
            assert places(model) == here
        assert places(model) == here
        raise RuntimeError("in the middle")
    assert places(model) == waiting


def test_what_a_block_writes_is_lost():
    module = torch.nn.Linear(2, 2, bias=False)
    expected = module.weight.detach().clone()
    parked = Parked(module)
    with torch.no_grad(), parked.on_device():
        module.weight.zero_()
    assert torch.equal(module.weight, expected)


def test_what_minibatches_share_is_scored_once_and_handed_out_by_sample():
    given, asked = samples(3), []

    def score(own):
        asked.append(len(own))
        return [np.full(1, sample.trajectory) for sample in own]

    scored = ahead(score, [given[:2], given[2:], given[1:]])
    assert asked == [3]
    assert [int(found[0]) for found in scored([given[2].sample, given[0].sample])] == [2, 0]


def test_a_step_without_minibatches_asks_for_no_score():
    ahead(lambda own: pytest.fail("nothing is to be scored"), [])


def learner(device: str = "cpu", **options) -> Any:
    config = {"algorithm": {"kl_coef": 0.1, **options}, "optimizer": {"lr": 1e-3}}
    return LocalLearner(tiny_model().to(device), load_config(config))


def scores_of_reference(learner: Any, monkeypatch) -> list[int]:
    """How many samples the reference scores at a time, from now on."""
    found, score = [], learner.reference_logprobs
    monkeypatch.setattr(
        learner, "reference_logprobs", lambda own: found.append(len(own)) or score(own)
    )
    return found


def test_a_parked_reference_scores_a_step_once_and_changes_no_update(monkeypatch):
    given = samples(4)
    minibatches = [given[:2], given[2:]] * 2  # two epochs
    as_always = learner()
    expected = list(as_always.step(minibatches))
    monkeypatch.setattr(LocalLearner, "_parks", lambda self: True)
    parking_one = learner()
    asked = scores_of_reference(parking_one, monkeypatch)
    found = list(parking_one.step(iter(minibatches)))
    assert asked == [4]
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    pairs = zip(parking_one.model.parameters(), as_always.model.parameters(), strict=True)
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in pairs)


def test_it_scores_after_the_sampler_made_room_and_before_there_are_gradients(monkeypatch):
    monkeypatch.setattr(LocalLearner, "_parks", lambda self: True)
    learning, order = learner(), []
    learning.before_updates = lambda: order.append("room")
    score, add_up = learning.reference_logprobs, learning._add_up
    monkeypatch.setattr(
        learning, "reference_logprobs", lambda own: order.append("reference") or score(own)
    )
    monkeypatch.setattr(learning, "_add_up", lambda b: order.append("gradients") or add_up(b))
    list(learning.step([samples(2)]))
    assert order == ["room", "reference", "gradients"]


def test_on_a_cpu_a_reference_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(parking, "RELEASED_FROM", 1)
    assert learner()._parked is None


def test_a_policy_without_its_adapters_is_no_reference_to_park(monkeypatch):
    monkeypatch.setattr(LocalLearner, "_parks", lambda self: True)
    options = {"algorithm": {"kl_coef": 0.1}}
    assert LocalLearner(with_lora(tiny_model()), load_config(options))._parked is None


def test_measuring_gradients_copies_the_reference_once(monkeypatch):
    monkeypatch.setattr(LocalLearner, "_parks", lambda self: True)
    learning, copies = learner(), []
    point = learning._parked._point_at
    monkeypatch.setattr(learning._parked, "_point_at", lambda at: copies.append(at) or point(at))
    found = learning.term_gradients([samples(2), samples(3)])
    assert "kl" in found.terms
    assert len(copies) == 2  # there, and back


@pytest.mark.gpu
def test_on_a_gpu_its_memory_is_free_except_while_it_scores(monkeypatch):
    staying = learner("cuda")
    expected = staying.reference_logprobs([given.sample for given in samples()])
    size = sum(weight.nbytes for weight in staying.reference.parameters())
    del staying
    assert learner("cuda")._parked is None  # it is small
    monkeypatch.setattr(parking, "RELEASED_FROM", 1)
    before = torch.cuda.memory_allocated()
    parked = learner("cuda")
    taken = torch.cuda.memory_allocated() - before
    assert parked.reference.device.type == "cpu"
    with parked._reference_here():
        assert torch.cuda.memory_allocated() - before >= taken + size
    assert torch.cuda.memory_allocated() - before == taken
    found = parked.reference_logprobs([given.sample for given in samples()])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    list(parked.step([samples()]))
    assert parked.reference.device.type == "cpu"
    assert parked._parked._host.is_pinned()
