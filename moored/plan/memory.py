"""Bytes of GPU memory by part, in each phase of a training step.

Weights in bfloat16 are computed with by learner and fast sampler alike; float32 master weights
belong to the optimiser. Of what only a phase needs, keys and values stay until the update, and of
small models throughout. Ranks have shards of weights and states, and gather a layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from moored.engine.fast.buckets import bucket, tile_bucket
from moored.engine.fsdp.whole import SUM_BYTES, Whole
from moored.engine.gpu import CACHE_SHARE, GIB
from moored.engine.local.batches import forward_tokens
from moored.plan.activations import (
    backward_work_bytes,
    forward_bytes,
    layer_bytes,
    logits_per_chunk,
    prefill_bytes,
    saved_bytes,
)
from moored.plan.setup import Lengths, Setup

CUDA_BYTES = int(0.6 * GIB) + 2**28
"""Context and loaded kernels, about 0.6 GiB on an H200, and workspaces: cuBLAS takes 32 MiB for
each of a few streams."""
RESERVE_SHARE = 0.04
"""Of what comes and goes in a phase: blocks of the allocator that do not fit together."""
MIN_SHARERS, MIN_ROWS = 4, 8
"""Of engine/fast: one more slot for each so many rows; rows are padded up to as many."""
RECORDED_TOKENS, PREFILL_TOKENS = 8192, 32768
"""`MAX_RECORDED_TOKENS` of engine/fast/rows.py, `PREFILL_TOKENS` of engine/fast/stream.py. What
recorded prompts hold stays during updates: 0.72 GiB at 1.5 B, of which this counts 0.56."""
BUSY_WORK = 4e12
MOST_PADDING, MIN_PROMPT_TOKENS, MIN_CONTINUATION_TOKENS = 1.5, 256, 1024
"""Of engine/fast/graphs.py, with the one above: passes of more tokens times parameters are not
recorded; recorded ones are padded."""
GATHERED_LAYERS = 2
"""Of ranks, whose weights are whole at a time: the one that is computed and the next."""
RECORDED, GRADIENTS = "recorded passes", "gradients"
OUTSIDE = (RECORDED, "recorded steps", "CUDA", "reserve")
"""Parts that torch's count of allocated bytes leaves out."""
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

    def allocated_bytes(self, phase: str) -> int:
        """What `torch.cuda.max_memory_allocated` would say of a phase."""
        return sum(size for part, size in self.phases[phase].items() if part not in OUTSIDE)


def plan_memory(
    setup: Setup,
    memory_bytes: int,
    *,
    tokens: int,
    checkpointing: bool,
    lengths: Lengths | None = None,
) -> Memory:
    """The parts of every phase, for micro-batches of up to `tokens`.

    Without `lengths`, episodes are as long as may be and share nothing: no run needs more.
    """
    is_recorded = setup.records_passes(checkpointing)
    padded = _padded(tokens) if is_recorded else tokens
    whole = setup.held_whole(memory_bytes)
    update = _update(setup, _micro_batches(setup, padded, lengths), whole, checkpointing)
    resident, recorded = _resident(setup), {}
    if is_recorded:
        resident[GRADIENTS] = update.pop(GRADIENTS)
        recorded = {RECORDED: sum(update.values())}
    scoring = _scoring(setup, _asked_tokens(setup, tokens, padded, is_recorded=is_recorded), whole)
    taken = sum((resident | recorded).values()) + CUDA_BYTES
    rows, cache, sampling = _rollout(setup, memory_bytes, max(memory_bytes - taken, 0))
    if setup.vllm_share:
        resident["vLLM"] = int(setup.vllm_share * memory_bytes)
    kept, steps = (cache if setup.has_fast_sampler else {}), {}
    if setup.has_fast_sampler and setup.is_large:
        # They lend the memory of keys and values to updates, and keep what is recorded.
        steps = {"recorded steps": RECORDED_TOKENS * prefill_bytes(setup.shape, bf16=setup.bf16)}
    scored = {**scoring, **recorded, **steps}
    phases = {
        "rollout": {**cache, **sampling, **recorded, **steps},
        "scoring": {**kept, **scored},
    }
    if setup.parks_reference:
        # It scores when keys and values are lent, and before there are gradients.
        phases["reference"] = {"reference weights": setup.weight_bytes, **scored}
    phases["update"] = {**(steps or kept), **update}
    return Memory(
        phases={name: _with_cuda(resident, own) for name, own in phases.items()},
        host=_host(setup),
        rows=rows,
    )


def _with_cuda(resident: Parts, own: Parts) -> Parts:
    """All parts of a phase, with what CUDA takes and what the allocator cannot use."""
    reserve = int(RESERVE_SHARE * sum(own.values()))
    return {**resident, **own, "CUDA": CUDA_BYTES, "reserve": reserve}


def _padded(tokens: int) -> int:
    """Most tokens of a recorded pass: `pad` of engine/fast/graphs.py rounds both parts up."""
    most = max(1, int(tokens / MOST_PADDING))
    sizes = [0]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1, MIN_CONTINUATION_TOKENS))
    worst = (above + bucket(most - below, MIN_PROMPT_TOKENS) for below, above in pairwise(sizes))
    return min(tokens, max(worst))


def _state_bytes(setup: Setup) -> float:
    """Of a trained parameter: moments, and a float32 master weight unless it is the weight."""
    # 8-bit moments have a float32 scale for 256 numbers of both.
    moments = 8 if setup.config.optimizer.kind == "adamw" else 2 + 2 * 4 / 256
    return moments + (4 if setup.bf16 or setup.states_on_host or setup.ranks > 1 else 0)


def _host(setup: Setup) -> Parts:
    """Parts in main memory; torch takes pinned memory in powers of two."""
    trained, parts = setup.policy_trained + setup.critic_trained, {}
    if setup.states_on_host:
        parts["optimiser"] = int(_state_bytes(setup) * trained)
    if setup.parks_reference:
        parts["reference"] = 1 << (setup.weight_bytes - 1).bit_length()
    return parts


def _resident(setup: Setup) -> dict[str, int]:
    """Parts that stay from phase to phase; of ranks a shard, but for the sampler's weights."""
    element, whole = setup.element_bytes, setup.weight_bytes
    adapters = setup.shape.adapter_parameters(setup.lora_rank)
    state = 0.0 if setup.states_on_host else _state_bytes(setup)
    parts = {
        "policy weights": whole + element * adapters,
        "policy optimiser": int(state * setup.policy_trained),
    }
    if setup.has_critic:
        # Under LoRA its weights are the policy's, and only its adapters its own.
        own = adapters if setup.lora_rank else setup.shape.trunk_parameters
        parts["critic weights"] = element * own
        parts["critic optimiser"] = int(state * setup.critic_trained)
    if setup.has_own_reference and not setup.parks_reference:
        parts["reference weights"] = whole
    if setup.ranks > 1:
        # Of trained weights ranks have the float32 ones alone.
        rounded = () if setup.lora_rank else ("policy weights", "critic weights")
        parts = {name: s // setup.ranks for name, s in parts.items() if name not in rounded}
    # The fast sampler needs sums with adapters, the plain one rounded weights throughout.
    has_copy = setup.lora_rank if setup.has_fast_sampler else setup.bf16
    if (has_copy or setup.ranks > 1) and not setup.has_vllm:
        parts["sampler weights"] = whole
    return parts


def _rollout(setup: Setup, memory_bytes: int, free: int) -> tuple[int, Parts, Parts]:
    """Episodes that are written at a time, their keys and values, and what else they need."""
    shape, config = setup.shape, setup.config
    slot = shape.cache_bytes(setup.element_bytes) * config.rollout.max_context
    if setup.has_vllm:
        # Keys and values cannot be divided further than their heads.
        ways, room = config.engine.vllm.tensor_parallel, setup.vllm_share * memory_bytes
        slots = int(room - setup.weight_bytes // ways) // (slot // min(ways, shape.kv_heads))
        is_elsewhere = not setup.vllm_share
        return (setup.most_rows if is_elsewhere else min(setup.most_rows, max(1, slots))), {}, {}
    rows, num_slots = setup.most_rows, 2 * setup.most_rows
    if setup.has_fast_sampler:
        # As `SlotSampler` finds it: slots of episodes, of prompts that several share, an idle one.
        most = int(CACHE_SHARE * free) // slot * MIN_SHARERS // (MIN_SHARERS + 1) - 1
        rows = min(tile_bucket(rows, MIN_ROWS), max(1, most))
        num_slots = rows + rows // MIN_SHARERS + 1
    tokens = min(PREFILL_TOKENS, rows * config.rollout.max_context)
    sampling = {
        "activations": tokens * prefill_bytes(shape, bf16=setup.bf16),
        "logits": rows * shape.vocabulary * 4,
    }
    return rows, {"keys and values": num_slots * slot}, sampling


def _asked_tokens(setup: Setup, tokens: int, padded: int, *, is_recorded: bool) -> int:
    """Most tokens of a pass without gradients."""
    step = setup.num_episodes * setup.config.rollout.max_context
    if is_recorded and step * setup.shape.num_parameters < BUSY_WORK:
        return min(padded, step)
    return min(forward_tokens(tokens, "cuda", can_record=is_recorded), step)


def _scoring(setup: Setup, tokens: int, whole: Whole) -> Parts:
    return {
        **_gathered(setup, setup.shape.num_parameters, whole),
        "activations": tokens * forward_bytes(setup.shape, setup.layer_kind),
        "logits": 4 * logits_per_chunk(setup.shape, tokens),
    }


def _micro_batches(setup: Setup, most: int, lengths: Lengths | None) -> tuple[int, int]:
    """Most tokens of the first micro-batch of an update, and of later ones (0: there are none).

    Of up to `most` tokens; with `lengths` as many as these come to. Rows, which are the
    trajectories of a prompt in this update, are packed from the longest on. The row that did not
    fit any more begins the second micro-batch.
    """
    samples = setup.minibatch_samples
    if lengths is None or not setup.has_fast_learner:
        whole = samples * setup.config.rollout.max_context
        return min(most, whole), 0 if whole <= most else most
    num_rows = min(setup.num_groups, samples)
    whole = num_rows * lengths.prompt + samples * lengths.continuation
    if whole <= most:
        return whole, 0
    return most, min(most, whole - most + whole // num_rows)


def _update(
    setup: Setup, batches: tuple[int, int], whole: Whole, checkpointing: bool
) -> dict[str, int]:
    """The parts at the moment that needs most. Policy and critic take turns in a micro-batch.

    Sums of gradients are made in the first backward pass, weight by weight, while activations go:
    the first micro-batch, which is the largest, has none beside it, and later ones have all. Passes
    that are recorded and ranks have them from the start.
    """
    shape, kind, rank = setup.shape, setup.layer_kind, setup.lora_rank
    trained, (first, later) = setup.policy_trained + setup.critic_trained, batches

    def moment(gradients: int, tokens: int, activations: int | None = None) -> dict[str, int]:
        if activations is None:
            activations = saved_bytes(shape, tokens, kind, checkpointing=checkpointing, rank=rank)
        work = backward_work_bytes(shape, tokens, kind, checkpointing=checkpointing, rank=rank)
        return {
            GRADIENTS: SUM_BYTES * gradients,
            "activations": activations,
            "backward pass": work,
        }

    if setup.ranks > 1:
        parameters = shape.num_parameters + setup.critic_trained
        gathered = _gathered(setup, parameters, whole)
        return {**moment(trained, first), **_sums(setup, whole), **gathered}
    if setup.records_passes(checkpointing):
        return moment(trained, first)
    # The critic's pass comes after the policy's backward pass.
    moments = [moment(setup.policy_trained if setup.has_critic else 0, first)]
    moments.append(moment(trained, first, first * layer_bytes(shape, kind, rank)))
    if later:
        moments.append(moment(trained, later))
    most = max(moments, key=lambda each: sum(each.values()))
    return {part: size for part, size in most.items() if size}


def _gathered(setup: Setup, parameters: int, whole: Whole) -> dict[str, int]:
    """Weights of shards that are whole at a time: all, or two layers and what is outside them."""
    if setup.ranks == 1:
        return {}
    shape = setup.shape
    if not whole.weights:
        layers = shape.layers - GATHERED_LAYERS
        parameters = shape.num_parameters - layers * shape.layer_parameters
    return {"gathered weights": setup.element_bytes * parameters}


def _sums(setup: Setup, whole: Whole) -> dict[str, int]:
    """Sums of a rank's gradients, and what a backward pass adds to them."""
    trained = setup.policy_trained + setup.critic_trained
    own = (setup.element_bytes + SUM_BYTES) * setup.shape.layer_parameters
    if whole.weights:
        # All are added at the end of the pass; in float32 they are the sums themselves.
        own = setup.element_bytes * setup.policy_trained if setup.bf16 else 0
    return {
        GRADIENTS: SUM_BYTES * trained // (1 if whole.gradients else setup.ranks),
        "gathered gradients": 0 if setup.lora_rank and not whole.weights else own,
    }
