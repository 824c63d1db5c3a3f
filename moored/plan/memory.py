"""Bytes of GPU memory by part, in each phase of a training step.

Weights in bfloat16 are computed with by learner and fast sampler alike; float32 master weights
belong to the optimiser. Of what only a phase needs, keys and values stay until the update, and of
small models throughout. The reference of a large model has a phase of its own, after scoring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from moored.engine.fast.buckets import bucket, tile_bucket
from moored.errors import MooredError
from moored.plan.activations import forward_bytes, logits_per_chunk, prefill_bytes
from moored.plan.coefficients import FORWARD_TOKENS, MemoryCoefficients, forward_tokens
from moored.plan.gpus import GIB, Gpu
from moored.plan.seconds import Lengths
from moored.plan.setup import Setup
from moored.plan.update import GRADIENTS, micro_batches, update_parts

RECORDED, RECORDED_STEPS = "recorded passes", "recorded steps"
OUTSIDE = (RECORDED, RECORDED_STEPS, "CUDA", "reserve")
"""Parts that torch's count of allocated bytes leaves out."""
MOST_PADDING = 1.5
MIN_PROMPT_TOKENS, MIN_CONTINUATION_TOKENS = 256, 1024
"""Of engine/fast/graphs.py."""
FEW_ROWS = 8
"""Episodes at a time, below which a sampler is not advised."""
ALONE_SHARE = 0.9
"""Of the memory of a GPU for a vLLM that has it to itself; no larger share is advised."""
Parts = Mapping[str, int]
"""Bytes by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What each phase needs."""

    phases: Mapping[str, Parts]
    """By phase, in the order of a step; one is the reference's where it waits in main memory."""
    host: Parts
    """Main memory for states of the optimiser and for a reference that waits."""
    rows: int
    """Episodes whose keys and values fit at a time."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def allocated_bytes(self, phase: str) -> int:
        """What `torch.cuda.max_memory_allocated` would say of a phase."""
        return sum(size for part, size in self.phases[phase].items() if part not in OUTSIDE)


def plan_memory(
    setup: Setup,
    gpu: Gpu,
    given: MemoryCoefficients,
    *,
    tokens: int,
    checkpointing: bool,
    lengths: Lengths | None = None,
) -> Memory:
    """The parts of every phase, for micro-batches of up to `tokens`.

    Without `lengths`, episodes are as long as may be and share nothing: no run needs more.
    """
    is_recorded, asked_tokens = setup.records_passes(given.recorded_to, checkpointing), tokens
    tokens = _padded(tokens) if is_recorded else tokens
    batches = micro_batches(setup, tokens, lengths)
    update = update_parts(
        setup, batches, given, checkpointing=checkpointing, has_gradients=is_recorded
    )
    resident = _resident(setup, given)
    recorded: dict[str, int] = {}
    if is_recorded:
        resident[GRADIENTS] = update.pop(GRADIENTS)
        recorded[RECORDED] = sum(update.values())
    taken = sum((resident | recorded).values()) + given.context_bytes + given.workspace_bytes
    rows = _rows_that_fit(setup, max(gpu.memory_bytes - taken, 0), given)
    cache = {"keys and values": _num_slots(setup, rows, given) * _slot_bytes(setup)}
    sampling = {**cache, **_rollout(setup, rows, given)}
    if setup.vllm_share:
        reserved = int(setup.vllm_share * gpu.memory_bytes)
        rows, sampling = _vllm_rows(setup, reserved), {}
        resident["vLLM"] = reserved
    if setup.samples_elsewhere:
        rows, sampling = setup.most_rows, {}
    is_kept = setup.has_fast_sampler
    whole = setup.num_episodes * setup.max_context
    asked = forward_tokens(tokens, given.forward_times)
    if is_recorded and whole * setup.shape.num_parameters >= given.busy_work:
        most = given.forward_times * min(asked_tokens, FORWARD_TOKENS)
        asked = max(asked_tokens, most)
    elif is_recorded:
        asked = tokens
    scoring = _scoring(setup, min(asked, whole), given)
    kept, steps = (cache if is_kept else {}), {}
    if is_kept and setup.shape.num_parameters >= given.released_from:
        # Large models lend the memory of keys and values to updates, and keep what is recorded.
        steps = {RECORDED_STEPS: recorded_steps_bytes(setup, given)}
    scored = {**scoring, **recorded, **steps}
    phases = {"rollout": {**sampling, **recorded, **steps}, "scoring": {**kept, **scored}}
    if setup.parks_reference(given.released_from):
        # It scores when keys and values are lent, and before there are gradients.
        phases["reference"] = {"reference weights": setup.weight_bytes, **scored}
    phases["update"] = {**(steps or kept), **update}
    return Memory(
        phases={name: _whole(resident, parts, given) for name, parts in phases.items()},
        host=_host(setup, given),
        rows=rows,
    )


def _padded(tokens: int) -> int:
    """Most tokens of a recorded pass: `pad` of engine/fast/graphs.py rounds both parts up."""
    most = max(1, int(tokens / MOST_PADDING))
    sizes = [0]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1, MIN_CONTINUATION_TOKENS))
    worst = (above + bucket(most - below, MIN_PROMPT_TOKENS) for below, above in pairwise(sizes))
    return min(tokens, max(worst))


def _whole(resident: Parts, own: Parts, given: MemoryCoefficients) -> Parts:
    """All parts of a phase, with what CUDA takes and what the allocator cannot use."""
    reserve = int(given.reserve_share * sum(own.values()))
    outside = {"CUDA": given.context_bytes + given.workspace_bytes, "reserve": reserve}
    return {**resident, **own, **outside}


def _state_bytes(setup: Setup, given: MemoryCoefficients) -> float:
    """Of a trained parameter: AdamW's two moments, and a master weight unless it is the weight."""
    moments = 8 if setup.optimizer == "adamw" else 2 + given.scale_bytes
    return moments + (4 if setup.bf16 or setup.states_on_host else 0)


def _host(setup: Setup, given: MemoryCoefficients) -> Parts:
    """Parts in main memory."""
    parts: dict[str, int] = {}
    if setup.states_on_host:
        trained = setup.policy_trained + setup.critic_trained
        parts["optimiser"] = int(_state_bytes(setup, given) * trained)
    if setup.parks_reference(given.released_from):
        # Torch takes pinned memory in powers of two.
        parts["reference"] = 1 << (setup.weight_bytes - 1).bit_length()
    return parts


def _resident(setup: Setup, given: MemoryCoefficients) -> dict[str, int]:
    """Parts that stay from phase to phase."""
    shape, element = setup.shape, setup.element_bytes
    state = 0.0 if setup.states_on_host else _state_bytes(setup, given)
    adapters = shape.adapter_parameters(setup.lora_rank)
    whole = setup.weight_bytes
    parts = {
        "policy weights": whole + element * adapters,
        "policy optimiser": int(state * setup.policy_trained),
    }
    if setup.has_critic:
        # Under LoRA its weights are the policy's, and only its adapters its own.
        trunk = adapters if setup.lora_rank else shape.trunk_parameters
        parts["critic weights"] = element * trunk
        parts["critic optimiser"] = int(state * setup.critic_trained)
    if setup.has_own_reference and not setup.parks_reference(given.released_from):
        parts["reference weights"] = whole
    # The fast sampler needs sums with adapters, the plain one rounded weights throughout.
    has_copy = setup.lora_rank if setup.has_fast_sampler else setup.bf16
    if has_copy and not setup.vllm_share and not setup.samples_elsewhere:
        parts["sampler weights"] = whole
    return parts


def _rollout(setup: Setup, rows: int, given: MemoryCoefficients) -> Parts:
    shape = setup.shape
    tokens = min(given.prefill_tokens, rows * setup.max_context)
    return {
        "activations": tokens * prefill_bytes(shape, bf16=setup.bf16),
        "logits": rows * shape.vocabulary * 4,
    }


def recorded_steps_bytes(setup: Setup, given: MemoryCoefficients) -> int:
    """What the recorded decoding steps and prompts of a sampler hold."""
    return given.recorded_tokens * prefill_bytes(setup.shape, bf16=setup.bf16)


def _scoring(setup: Setup, tokens: int, given: MemoryCoefficients) -> Parts:
    return {
        "activations": tokens * forward_bytes(setup.shape, setup.layer_kind),
        "logits": 4 * logits_per_chunk(setup.shape, tokens, given),
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


def _vllm_rows(setup: Setup, reserved: int) -> int:
    """Episodes of full length that vLLM has room for beside its copy of the weights."""
    free = reserved - _vllm_weights(setup)
    return min(setup.most_rows, max(1, free // _vllm_slot(setup)))


def _vllm_weights(setup: Setup) -> int:
    return setup.weight_bytes // setup.vllm_ways


def _vllm_slot(setup: Setup) -> int:
    """Keys and values cannot be divided further than their heads."""
    return _slot_bytes(setup) // min(setup.vllm_ways, setup.shape.kv_heads)


def vllm_shares(setup: Setup, gpu: Gpu) -> list[tuple[float, int]]:
    """Shares of the memory that vLLM can do with, by twentieths, and how many episodes they hold.

    From room for a few episodes at a time, or all where they are fewer, up to room for all.
    """
    shares: list[tuple[float, int]] = []
    for twentieths in range(1, round(20 * ALONE_SHARE) + 1):
        reserved = int(twentieths / 20 * gpu.memory_bytes)
        rows = (reserved - _vllm_weights(setup)) // _vllm_slot(setup)
        if rows >= min(FEW_ROWS, setup.most_rows):
            shares.append((twentieths / 20, min(rows, setup.most_rows)))
        if rows >= setup.most_rows:
            break
    return shares


def check_vllm(setup: Setup, gpu: Gpu) -> None:
    """Refuse what vLLM could not start with: heads that its GPUs cannot divide among them, and a
    share that is too small for its weights and an episode."""
    if setup.vllm_share and setup.shape.heads % setup.vllm_ways:
        raise MooredError(
            f"engine.vllm.tensor_parallel = {setup.vllm_ways} does not divide the "
            f"{setup.shape.heads} attention heads of this model; choose a number that does"
        )
    needed = _vllm_weights(setup) + _vllm_slot(setup)
    has = setup.vllm_share * gpu.memory_bytes
    if not setup.vllm_share or needed <= has:
        return
    share = math.ceil(100 * needed / gpu.memory_bytes) / 100
    raise MooredError(
        f"engine.vllm.memory_share = {setup.vllm_share:g} gives vLLM {has / GIB:.1f} GiB of "
        f"{gpu.name}, but its weights and one episode take {needed / GIB:.1f} GiB; "
        + (f"set it to {share:.2f} or more" if share <= ALONE_SHARE else "take a smaller model")
    )


def _rows_that_fit(setup: Setup, free: int, given: MemoryCoefficients) -> int:
    """As `SlotSampler` finds it; the plain sampler takes all rows."""
    if not setup.has_fast_sampler:
        return setup.most_rows
    wanted = tile_bucket(setup.most_rows, given.min_rows)
    slots = int(given.cache_share * free) // _slot_bytes(setup)
    most = slots * given.min_sharers // (given.min_sharers + 1) - 1
    return min(wanted, max(1, most))
