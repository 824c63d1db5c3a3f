"""Bytes of GPU memory by part, in each phase of a training step.

Weights in bfloat16 are computed with by learner and fast sampler alike; float32 master weights
belong to the optimiser. What only a phase needs (cache, gradients, activations) is released after
it; policy and critic are updated one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moored.engine.fast.buckets import bucket
from moored.plan.activations import (
    backward_work_bytes,
    forward_bytes,
    logits_per_chunk,
    prefill_bytes,
    saved_bytes,
)
from moored.plan.coefficients import MemoryCoefficients
from moored.plan.gpus import Gpu
from moored.plan.setup import Setup

PHASES = ("rollout", "scoring", "update")
OUTSIDE = ("CUDA", "reserve")
"""Parts that torch's count of allocated bytes leaves out."""
Parts = Mapping[str, int]
"""Bytes by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What each phase needs."""

    phases: Mapping[str, Parts]
    """By phase, in the order of a step."""
    host_bytes: int
    """Main memory for states of the optimiser."""
    rows: int
    """Episodes whose keys and values fit at a time."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    def allocated_bytes(self, phase: str) -> int:
        """What `torch.cuda.max_memory_allocated` would say of a phase."""
        return sum(size for part, size in self.phases[phase].items() if part not in OUTSIDE)


def plan_memory(
    setup: Setup, gpu: Gpu, given: MemoryCoefficients, *, tokens: int, checkpointing: bool
) -> Memory:
    """The parts of every phase, for micro-batches of up to `tokens`."""
    resident = _resident(setup, given)
    free = gpu.memory_bytes - sum(resident.values()) - given.context_bytes - given.workspace_bytes
    rows = _rows_that_fit(setup, max(free, 0), given)
    phases = {
        "rollout": _rollout(setup, rows, given),
        "scoring": _scoring(setup, min(tokens, setup.num_episodes * setup.max_context), given),
        "update": _update(setup, min(tokens, setup.minibatch_tokens), checkpointing, given),
    }
    host = _state_bytes(setup, given) * (setup.policy_trained + setup.critic_trained)
    return Memory(
        phases={name: _whole(resident, parts, given) for name, parts in phases.items()},
        host_bytes=int(host) if setup.states_on_host else 0,
        rows=rows,
    )


def _whole(resident: Parts, own: Parts, given: MemoryCoefficients) -> Parts:
    """All parts of a phase, with what CUDA takes and what the allocator cannot use."""
    reserve = int(given.reserve_share * sum(own.values()))
    outside = {"CUDA": given.context_bytes + given.workspace_bytes, "reserve": reserve}
    return {**resident, **own, **outside}


def _state_bytes(setup: Setup, given: MemoryCoefficients) -> float:
    """Of a trained parameter: master weight beside a bfloat16 one, and AdamW's two means."""
    means = 8 if setup.optimizer == "adamw" else 2 + given.quantile_bytes
    return means + (4 if setup.bf16 else 0)


def _resident(setup: Setup, given: MemoryCoefficients) -> dict[str, int]:
    """Parts that stay from phase to phase."""
    shape, element = setup.shape, setup.element_bytes
    state = 0.0 if setup.states_on_host else _state_bytes(setup, given)
    adapters = shape.adapter_parameters(setup.lora_rank)
    parts = {
        "policy weights": element * (shape.num_parameters + adapters),
        "policy optimiser": int(state * setup.policy_trained),
    }
    if setup.has_critic:
        parts["critic weights"] = element * (shape.trunk_parameters + adapters)
        parts["critic optimiser"] = int(state * setup.critic_trained)
    if setup.has_reference and not setup.lora_rank:
        parts["reference weights"] = element * shape.num_parameters
    if setup.bf16 and not setup.has_fast_sampler:
        parts["sampler weights"] = element * shape.num_parameters
    return parts


def _rollout(setup: Setup, rows: int, given: MemoryCoefficients) -> Parts:
    shape = setup.shape
    tokens = min(given.prefill_tokens, rows * setup.max_context)
    prefill = tokens * prefill_bytes(shape, bf16=setup.bf16)
    return {
        "keys and values": _num_slots(setup, rows, given) * _slot_bytes(setup),
        "activations": prefill,
        "logits": rows * shape.vocabulary * 4,
    }


def _scoring(setup: Setup, tokens: int, given: MemoryCoefficients) -> Parts:
    logits = logits_per_chunk(setup.shape, tokens, given)
    return {
        "activations": tokens * forward_bytes(setup.shape, bf16=setup.bf16),
        "logits": given.logits_forward_bytes * logits,
    }


def _update(
    setup: Setup, tokens: int, checkpointing: bool, given: MemoryCoefficients
) -> dict[str, int]:
    options = {
        "bf16": setup.bf16,
        "checkpointing": checkpointing,
        "lora_rank": setup.lora_rank,
    }
    return {
        "gradients": 4 * max(setup.policy_trained, setup.critic_trained),
        "activations": saved_bytes(setup.shape, tokens, **options),
        "backward pass": backward_work_bytes(setup.shape, tokens, given, **options),
    }


def _slot_bytes(setup: Setup) -> int:
    return setup.shape.cache_bytes(setup.element_bytes) * setup.max_context


def _num_slots(setup: Setup, rows: int, given: MemoryCoefficients) -> int:
    """Of episodes, of prompts that several share, and one for idle rows; `Slots` of the engine.

    The plain sampler has one for each row, and copies them between turns.
    """
    if not setup.has_fast_sampler:
        return 2 * rows
    return rows + rows // given.min_sharers + 1


def _rows_that_fit(setup: Setup, free: int, given: MemoryCoefficients) -> int:
    """As `SlotSampler` finds it; the plain sampler takes all rows."""
    if not setup.has_fast_sampler:
        return setup.most_rows
    wanted = bucket(setup.most_rows, given.min_rows)
    slots = int(given.cache_share * free) // _slot_bytes(setup)
    most = slots * given.min_sharers // (given.min_sharers + 1) - 1
    return min(wanted, max(1, most))
