"""Memory of an update: micro-batches one after the other, and gradients that come with the first.

The sums of gradients are made in the first backward pass, weight by weight, while activations go.
So the largest micro-batch, which is the first, has none beside it, and the later ones have all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moored.plan.activations import backward_work_bytes, layer_bytes, saved_bytes
from moored.plan.coefficients import MemoryCoefficients
from moored.plan.seconds import Lengths
from moored.plan.setup import Setup

GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Most tokens of the micro-batches of an update."""

    first: int
    later: int
    """Of the second, and of all others; 0 where there is one alone."""


def micro_batches(setup: Setup, most: int, lengths: Lengths | None) -> MicroBatches:
    """Of up to `most` tokens; with `lengths` as many as these come to, else as many as may be.

    Rows, which are the trajectories of a prompt in this update, are packed from the longest on. The
    row that did not fit any more begins the second micro-batch.
    """
    if lengths is None or not setup.has_fast_learner:
        whole = setup.minibatch_tokens
        return MicroBatches(min(most, whole), 0 if whole <= most else most)
    samples = setup.minibatch_samples
    num_rows = min(setup.num_groups, samples)
    whole = num_rows * lengths.prompt + samples * lengths.continuation
    if whole <= most:
        return MicroBatches(whole, 0)
    return MicroBatches(most, min(most, whole - most + whole // num_rows))


def update_parts(
    setup: Setup,
    batches: MicroBatches,
    given: MemoryCoefficients,
    *,
    checkpointing: bool,
    has_gradients: bool = False,
) -> dict[str, int]:
    """The parts at the moment that needs most. Policy and critic take turns in a micro-batch.

    With `has_gradients` their sums are there from the start.
    """
    shape, kind, rank = setup.shape, setup.layer_kind, setup.lora_rank

    def parts(trained: int, tokens: int, activations: int) -> dict[str, int]:
        work = backward_work_bytes(
            shape, tokens, given, kind, checkpointing=checkpointing, lora_rank=rank
        )
        return {GRADIENTS: 4 * trained, "activations": activations, "backward pass": work}

    def begin(trained: int, tokens: int) -> dict[str, int]:
        saved = saved_bytes(shape, tokens, kind, checkpointing=checkpointing, lora_rank=rank)
        return parts(trained, tokens, saved)

    everything = setup.policy_trained + setup.critic_trained
    if has_gradients:
        return begin(everything, batches.first)
    # The critic's pass comes after the policy's backward pass.
    first = begin(setup.policy_trained if setup.has_critic else 0, batches.first)
    layer = batches.first * layer_bytes(shape, kind, lora_rank=rank)
    moments = [first, parts(everything, batches.first, layer)]
    if batches.later:
        moments.append(begin(everything, batches.later))
    most: Mapping[str, int] = max(moments, key=lambda each: sum(each.values()))
    return {part: size for part, size in most.items() if size}
