"""An update's micro-batches and the memory they need, by hand and beside a learner's own passes."""

from __future__ import annotations

import pytest

from moored.models.shapes import shape_of
from moored.plan.activations import backward_work_bytes, layer_bytes, saved_bytes
from moored.plan.coefficients import MEASURED
from moored.plan.seconds import Lengths
from moored.plan.setup import Setup, setup_of
from moored.plan.update import MicroBatches, micro_batches, update_parts
from tests.unit.plan.tiny import BARE, config, tiny

LENGTHS = Lengths(prompt=3, reply=13)


def setup(*options: str) -> Setup:
    """8 episodes of two prompts, of up to 16 tokens each, in two updates."""
    return setup_of(config("optimizer.num_minibatches=2", *options), tiny())


def test_without_lengths_an_update_is_as_long_as_may_be_and_shares_nothing():
    # 4 episodes of 16 tokens.
    assert micro_batches(setup(), 64, None) == MicroBatches(64, 0)
    assert micro_batches(setup(), 100, None) == MicroBatches(64, 0)
    assert micro_batches(setup(), 63, None) == MicroBatches(63, 63)


def test_with_lengths_an_update_has_each_prompt_once():
    # 2 prompts of 3 tokens and 4 replies of 13: 58 tokens, a row of 29 for each prompt.
    assert micro_batches(setup(), 58, LENGTHS) == MicroBatches(58, 0)
    # The row that does not fit goes to the second one: 57 tokens leave 1, and it has 29 more.
    assert micro_batches(setup(), 57, LENGTHS) == MicroBatches(57, 30)
    assert micro_batches(setup(), 20, LENGTHS) == MicroBatches(20, 20)
    # One update of a single prompt: a row, cut where it is full.
    alone = setup("optimizer.num_minibatches=1", "rollout.num_groups=1")
    assert micro_batches(alone, 30, LENGTHS) == MicroBatches(30, 30)


def test_the_models_own_code_may_share_no_prompts():
    assert micro_batches(setup("engine.learner=plain"), 58, LENGTHS) == MicroBatches(58, 58)


def parts_at(tokens: int, gradients: int) -> dict[str, int]:
    kind = setup().layer_kind
    work = backward_work_bytes(tiny(), tokens, BARE.memory, kind, checkpointing=False)
    saved = saved_bytes(tiny(), tokens, kind, checkpointing=False)
    return {"gradients": 4 * gradients, "activations": saved, "backward pass": work}


def test_the_first_micro_batch_has_no_gradients_beside_it_and_the_second_has_all():
    # A token has 348 bytes of activations and 96 in the backward pass; gradients have 1,392, which
    # is more than three tokens and less than four.
    found = update_parts(setup(), MicroBatches(57, 54), BARE.memory, checkpointing=False)
    assert found == parts_at(54, 348)
    found = update_parts(setup(), MicroBatches(57, 53), BARE.memory, checkpointing=False)
    expected = parts_at(57, 0)
    del expected["gradients"]
    assert found == expected


def test_at_the_end_of_a_backward_pass_one_layer_is_left_beside_all_gradients():
    """2 tokens keep less than the gradients of 348 parameters need."""
    found = update_parts(setup(), MicroBatches(2, 0), BARE.memory, checkpointing=False)
    own = parts_at(2, 348)
    layer = 2 * layer_bytes(tiny(), setup().layer_kind)
    assert found == own | {"activations": layer}


def test_the_passes_of_a_critic_begin_when_the_policy_has_gradients():
    ppo = setup("algorithm.name=ppo")
    found = update_parts(ppo, MicroBatches(57, 0), BARE.memory, checkpointing=False)
    assert found == parts_at(57, 348)


def test_recorded_gradients_are_there_from_the_start():
    batches = MicroBatches(57, 0)
    found = update_parts(setup(), batches, BARE.memory, checkpointing=False, has_gradients=True)
    assert found == parts_at(57, 348)


@pytest.mark.parametrize(
    ("model", "options", "most", "batches"),
    [
        # 32 episodes of 700 tokens after 8 prompts of 300: 24,800 tokens in rows of 3,100.
        ("7B", ("optimizer.states=host",), 16384, MicroBatches(16384, 11516)),
        ("1.5B", (), 24576, MicroBatches(24576, 3324)),
    ],
)
def test_the_updates_that_were_measured(model, options, most, batches):
    words = ("rollout.num_groups=8", "rollout.group_size=16", "rollout.max_context=1000", *options)
    given = setup_of(
        config("optimizer.num_minibatches=4", *words), shape_of(f"Qwen/Qwen2.5-{model}")
    )
    lengths = Lengths(prompt=300, reply=100, turns=5, observation=50)
    assert micro_batches(given, most, lengths) == batches
    found = update_parts(given, batches, MEASURED.memory, checkpointing=False)
    # The second micro-batch of the 7 B shape needs most, and the first of the smaller one.
    assert ("gradients" in found) == (model == "7B")
