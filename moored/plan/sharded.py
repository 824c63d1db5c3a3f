"""Bytes of GPU memory on a cluster: of a learner's rank (FSDP2) and of a GPU of a sampler.

FSDP2 keeps a share of the float32 weights, moments and gradients on each rank, and gathers the
rounded weights of a layer while it is computed. During an update small models are whole on every
rank, and gradients of larger ones may be (`moored.engine.fsdp.whole`). A sampler has whole weights,
divided by its tensor parallelism, and fills the rest with keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moored.engine.fsdp.whole import SUM_BYTES, Whole, held_whole
from moored.plan.activations import (
    backward_work_bytes,
    forward_bytes,
    logits_per_chunk,
    prefill_bytes,
    saved_bytes,
)
from moored.plan.coefficients import MemoryCoefficients, forward_tokens
from moored.plan.gpus import Gpu
from moored.plan.memory import Parts, recorded_steps_bytes
from moored.plan.setup import Setup

BATCH_SIZES = (24576, 16384, 12288, 8192, 6144, 4096, 2048)
"""Tokens of a micro-batch to choose from, as `moored.plan.plan` has them for one GPU."""
GATHERED_LAYERS = 2
"""Whose weights are whole at a time: the one that is computed and the next, fetched ahead."""
MIN_ROWS = 8
"""Episodes that a sampler must have room for, or all of them where they are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """What a rank of the learner needs, and the micro-batch that was chosen for it."""

    phases: Mapping[str, Parts]
    """Scoring, update, and where weights are whole the sum over ranks that ends it."""
    micro_batch_tokens: int
    checkpointing: bool
    whole: Whole

    @property
    def peak(self) -> Parts:
        """The parts of the phase that needs most."""
        return max(self.phases.values(), key=lambda parts: sum(parts.values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerMemory:
    """What a GPU of a sampler needs."""

    parts: Parts
    rows: int
    """Episodes whose keys and values fit at a time on a replica."""
    room_bytes: int
    """What it may take: the whole GPU, or beside a learner's the share that vLLM was given."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.room_bytes


def learner_choices(
    setup: Setup, gpu: Gpu, given: MemoryCoefficients, *, ranks: int, sampler_bytes: int = 0
) -> list[LearnerMemory]:
    """Micro-batches that fit a rank; the smallest alone where none does.

    `sampler_bytes` is what a sampler on the same GPU keeps during updates.
    """
    fitting: list[LearnerMemory] = []
    last: LearnerMemory | None = None
    whole = whole_of(setup, gpu)
    for tokens, checkpointing in _choices(setup):
        phases = _learner_phases(setup, given, ranks, tokens, checkpointing, whole)
        if sampler_bytes:
            phases = {name: {**own, "sampler": sampler_bytes} for name, own in phases.items()}
        last = LearnerMemory(
            phases=phases, micro_batch_tokens=tokens, checkpointing=checkpointing, whole=whole
        )
        if last.peak_bytes <= given.filled_share * gpu.memory_bytes:
            fitting.append(last)
    assert last is not None
    return fitting or [last]


def whole_of(setup: Setup, gpu: Gpu) -> Whole:
    """What ranks with this GPU hold whole during an update."""
    trained = setup.policy_trained + setup.critic_trained
    parameters = _whole_parameters(setup)
    return held_whole(parameters, trained, gpu.memory_bytes, element_bytes=setup.element_bytes)


def _whole_parameters(setup: Setup) -> int:
    """Of policy and critic, with what is frozen in them."""
    shape, adapters = setup.shape, setup.shape.adapter_parameters(setup.lora_rank)
    critic = shape.trunk_parameters + adapters if setup.has_critic else 0
    return shape.num_parameters + adapters + critic


def _choices(setup: Setup) -> Iterator[tuple[int, bool]]:
    """From the fastest to the smallest; an episode is never split."""
    sizes = BATCH_SIZES if setup.micro_batch_tokens is None else (setup.micro_batch_tokens,)
    ways = (False, True) if setup.checkpointing is None else (setup.checkpointing,)
    for checkpointing in ways:
        for size in sorted({max(size, setup.max_context) for size in sizes}, reverse=True):
            yield size, checkpointing


def _learner_phases(
    setup: Setup,
    given: MemoryCoefficients,
    ranks: int,
    tokens: int,
    checkpointing: bool,
    whole: Whole,
) -> Mapping[str, Parts]:
    shape, kind, rank = setup.shape, setup.layer_kind, setup.lora_rank
    tokens = min(tokens, -(-setup.minibatch_tokens // ranks))
    tokens = max(tokens, setup.max_context)
    resident = _resident(setup, given, ranks)
    outside = {"CUDA": given.context_bytes + given.workspace_bytes}
    # Passes without gradients have more tokens, as in one process.
    asked = min(forward_tokens(tokens, given.forward_times), _own_tokens(setup, ranks))
    scoring = {
        "gathered weights": _gathered_bytes(setup, ranks, shape.num_parameters, whole),
        "activations": asked * forward_bytes(shape, kind),
        "logits": 4 * logits_per_chunk(shape, asked, given),
    }
    update = {
        **_gradients(setup, ranks, whole),
        "gathered weights": _gathered_bytes(setup, ranks, _whole_parameters(setup), whole),
        "activations": saved_bytes(
            shape, tokens, kind, checkpointing=checkpointing, lora_rank=rank
        ),
        "backward pass": backward_work_bytes(
            shape, tokens, given, kind, checkpointing=checkpointing, lora_rank=rank
        ),
    }
    phases = {"scoring": scoring, "update": update}
    if whole.weights:
        phases["sum over ranks"] = {
            "gradients": SUM_BYTES * (setup.policy_trained + setup.critic_trained),
            "gathered weights": update["gathered weights"],
            # In the order of ranks; the policy's, whose sum comes before the critic's.
            "gathered gradients": SUM_BYTES * setup.policy_trained,
        }
    return {
        name: {
            **resident,
            **own,
            **outside,
            "reserve": int(given.reserve_share * sum(own.values())),
        }
        for name, own in phases.items()
    }


def _gathered_bytes(setup: Setup, ranks: int, parameters: int, whole: Whole) -> int:
    """Weights that are whole at a time; a single rank gives none back."""
    if not whole.weights and ranks > 1:
        layers = GATHERED_LAYERS * setup.shape.layer_parameters
        parameters = layers + _outer_parameters(setup)
    return setup.element_bytes * parameters


def _gradients(setup: Setup, ranks: int, whole: Whole) -> dict[str, int]:
    """Sums over micro-batches, and what a backward pass adds to them."""
    trained = setup.policy_trained + setup.critic_trained
    sums = SUM_BYTES * trained // (1 if whole.gradients else ranks)
    if whole.weights:
        # All are added at the end of the pass; in float32 they are the sums themselves.
        own = setup.element_bytes * setup.policy_trained if setup.bf16 else 0
    elif setup.lora_rank:
        own = 0
    else:
        # Of one layer, before they are summed over ranks: as computed, and float32 for the sum.
        own = (setup.element_bytes + SUM_BYTES) * setup.shape.layer_parameters
    return {"gradients": sums, "gathered gradients": own}


def _own_tokens(setup: Setup, ranks: int) -> int:
    """Most tokens of a rank in a step."""
    return -(-setup.num_episodes // ranks) * setup.max_context


def _resident(setup: Setup, given: MemoryCoefficients, ranks: int) -> dict[str, int]:
    """Shares of weights and moments that stay on a rank."""
    shape = setup.shape
    moments = 8 if setup.optimizer == "adamw" else 2 + given.scale_bytes
    frozen = 2 * shape.num_parameters if setup.lora_rank else 0
    parts = {
        "policy": (frozen + int((4 + moments) * setup.policy_trained)) // ranks,
    }
    if setup.has_critic:
        parts["critic"] = int((4 + moments) * setup.critic_trained) // ranks
    if setup.has_own_reference:
        parts["reference"] = 2 * shape.num_parameters // ranks
    return parts


def _outer_parameters(setup: Setup) -> int:
    """Embedding, head and last norm, which are gathered as one unit."""
    shape = setup.shape
    return shape.num_parameters - shape.layers * shape.layer_parameters


def sampler_memory(
    setup: Setup,
    gpu: Gpu,
    given: MemoryCoefficients,
    *,
    ways: int,
    wanted_rows: int,
    learner_bytes: int = 0,
    vllm_share: float = 0.0,
) -> SamplerMemory:
    """A GPU of a replica that has `ways` of them and is asked for `wanted_rows` at a time.

    `learner_bytes` is what a learner on the same GPU keeps during rollouts. vLLM takes its
    `vllm_share` of the memory at the start, and fills it with keys and values. The plain sampler
    writes all rows at once, and copies theirs between turns.
    """
    shape = setup.shape
    weights = setup.element_bytes * shape.num_parameters // ways
    tokens = min(given.prefill_tokens, wanted_rows * setup.max_context)
    activations = tokens * prefill_bytes(shape, bf16=setup.bf16) // ways
    slot = shape.cache_bytes(setup.element_bytes) * setup.max_context // min(ways, shape.kv_heads)
    is_plain = not setup.has_fast_sampler and not vllm_share
    slot *= 1 + is_plain
    row = slot + 4 * shape.vocabulary // ways
    cuda = given.context_bytes + given.workspace_bytes
    room = given.filled_share * gpu.memory_bytes - learner_bytes
    room = vllm_share * gpu.memory_bytes if vllm_share else room
    free = int(room) - weights - activations - cuda
    least = wanted_rows if is_plain else min(MIN_ROWS, wanted_rows)
    rows = max(least, min(wanted_rows, free // row))
    cache = rows * slot
    if vllm_share:
        cache = max(cache, free - rows * 4 * shape.vocabulary // ways)
    parts = {
        "weights": weights,
        "keys and values": cache,
        "activations": activations,
        "logits": rows * 4 * shape.vocabulary // ways,
        "CUDA": cuda,
    }
    if learner_bytes:
        parts = {"learner": learner_bytes, **parts}
    has = gpu.memory_bytes
    return SamplerMemory(
        parts=parts,
        rows=rows,
        room_bytes=min(has, learner_bytes + int(room)) if vllm_share else has,
    )


def sampler_bytes_kept(setup: Setup, gpu: Gpu, given: MemoryCoefficients, cache: int) -> int:
    """What a sampler beside a learner keeps during updates: its weights, and of small models the
    keys and values, of larger ones, which lend those, recorded steps. The plain sampler keeps its
    weights alone, vLLM all that it took at the start."""
    if setup.vllm_share:
        return int(setup.vllm_share * gpu.memory_bytes)
    weights = setup.element_bytes * setup.shape.num_parameters
    if not setup.has_fast_sampler:
        return weights
    if setup.shape.num_parameters < given.released_from:
        return weights + cache
    return weights + recorded_steps_bytes(setup, given)


def resident_bytes(setup: Setup, given: MemoryCoefficients, ranks: int) -> int:
    """What a rank of the learner keeps during rollouts."""
    return sum(_resident(setup, given, ranks).values())
