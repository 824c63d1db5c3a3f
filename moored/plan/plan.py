"""A plan: memory by part and seconds by phase for a configuration on a GPU, before anything loads.

Pure functions of the configuration, the shape of its model and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moored.config import Config
from moored.models.shapes import ModelShape
from moored.plan.coefficients import MEASURED, Coefficients
from moored.plan.gpus import GIB, Gpu
from moored.plan.memory import Memory, check_vllm, plan_memory
from moored.plan.seconds import Lengths, Work, longest_lengths, plan_seconds, why_untimed
from moored.plan.setup import Setup, setup_of

BATCH_SIZES = (24576, 16384, 12288, 8192, 6144, 4096, 2048)
"""Tokens of a micro-batch to choose from; on a GPU more than the largest gains nothing."""

LengthsOf = Callable[[Config], Lengths]
"""The lengths of episodes that a configuration is planned for; raises where it allows none such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a step needs, and how long it takes."""

    config: Config
    gpu: Gpu
    setup: Setup
    micro_batch_tokens: int
    checkpointing: bool
    lengths: Lengths
    lengths_of: LengthsOf | None
    """For what is advised instead."""
    memory: Memory
    seconds: Mapping[str, float] | None
    """By phase, without the rollout where a plain sampler writes.

    None where it does not fit, the model is too small to be timed, or the rates of the GPU are not
    known: those of float32 products never are.
    """

    @property
    def over(self) -> float:
        """How much more than the GPU has is needed, as a share; below 0 it fits."""
        return self.memory.peak_bytes / self.gpu.memory_bytes - 1.0

    @property
    def fits(self) -> bool:
        return self.over <= 0.0

    @property
    def step_s(self) -> float | None:
        """Of all phases; None where not all of them are planned."""
        if self.seconds is None or self.setup.has_plain_sampler:
            return None
        return sum(self.seconds.values())

    def record(self) -> dict[str, object]:
        """For JSON; memory in GiB."""
        memory, setup = self.memory, self.setup
        phases = {
            phase: {part: round(size / GIB, 3) for part, size in parts.items()}
            for phase, parts in memory.phases.items()
        }
        return {
            "model": self.config.model,
            "num_parameters": setup.shape.num_parameters,
            "gpu": self.gpu.name,
            "gpu_gib": self.gpu.memory_gib,
            "fits": self.fits,
            "peak_gib": round(memory.peak_bytes / GIB, 3),
            "peak_phase": memory.peak_phase,
            "memory_gib": phases,
            "host_gib": round(memory.host_bytes / GIB, 3),
            "host_parts_gib": {p: round(size / GIB, 3) for p, size in memory.host.items()},
            "rows_at_a_time": memory.rows,
            "micro_batch_tokens": self.micro_batch_tokens,
            "gradient_checkpointing": self.checkpointing,
            "prompt_tokens": self.lengths.prompt,
            "reply_tokens": self.lengths.reply,
            "turns": self.lengths.turns,
            "trajectory_tokens": self.lengths.trajectory,
            "seconds": self.seconds and {k: round(s, 4) for k, s in self.seconds.items()},
            "step_s": None if self.step_s is None else round(self.step_s, 4),
        }


def plan(
    config: Config,
    shape: ModelShape,
    gpu: Gpu,
    lengths: Lengths | None = None,
    *,
    lengths_of: LengthsOf | None = None,
    given: Coefficients = MEASURED,
) -> Plan:
    """Plan a step of episodes of these `lengths`, or what `lengths_of` says of a configuration.

    The latter counts for what is advised instead, too. Without them nobody knows how many turns
    there are: seconds are of one, and memory is that of episodes as long as may be.
    """
    setup = setup_of(config, shape)
    check_vllm(setup, gpu)
    if lengths is None and lengths_of is not None:
        lengths = lengths_of(config)
    tokens, checkpointing = _choose(setup, gpu, given)
    memory = plan_memory(
        setup, gpu, given.memory, tokens=tokens, checkpointing=checkpointing, lengths=lengths
    )
    seconds, lengths = None, lengths or longest_lengths(config)
    is_timed = why_untimed(setup, given.speed) is None
    fits = memory.peak_bytes <= gpu.memory_bytes
    if fits and is_timed and gpu.tflops is not None and gpu.bandwidth_tbs is not None:
        seconds = plan_seconds(
            setup,
            gpu,
            given.speed,
            lengths,
            rows=memory.rows,
            tokens=tokens,
            checkpointing=checkpointing,
        )
    return Plan(
        config=config,
        gpu=gpu,
        setup=setup,
        micro_batch_tokens=tokens,
        checkpointing=checkpointing,
        lengths=lengths,
        lengths_of=lengths_of,
        memory=memory,
        seconds=seconds,
    )


def choose_batch(
    shape: ModelShape, config: Config, gpu: Gpu, *, given: Coefficients = MEASURED
) -> tuple[int, bool]:
    """Tokens of a micro-batch, and whether to compute activations twice.

    Of what fits with some memory to spare the fastest, for episodes as long as may be. Where the
    GPU's rates are unknown the largest size, and checkpointing only when none fits without. What
    the configuration sets stays as it is; where nothing fits, the smallest choice is returned.
    """
    return _choose(setup_of(config, shape), gpu, given)


def _choose(setup: Setup, gpu: Gpu, given: Coefficients) -> tuple[int, bool]:
    fitting, last = [], (0, False)
    for tokens, checkpointing in _choices(setup):
        last = tokens, checkpointing
        memory = plan_memory(setup, gpu, given.memory, tokens=tokens, checkpointing=checkpointing)
        if memory.peak_bytes <= given.memory.filled_share * gpu.memory_bytes:
            fitting.append(last)
    if not fitting:
        return last
    if gpu.tflops is None or gpu.bandwidth_tbs is None:
        return fitting[0]
    work = Work(setup, gpu, given.speed, Lengths(prompt=1, reply=max(1, setup.max_context - 1)))
    return min(fitting, key=lambda choice: work.update_passes(*choice))


def _choices(setup: Setup) -> Iterator[tuple[int, bool]]:
    """From the fastest to the smallest. An episode is never split, however small the bound."""
    sizes = BATCH_SIZES
    if setup.micro_batch_tokens is not None:
        sizes = (setup.micro_batch_tokens,)
    bounds = sorted({max(size, setup.max_context) for size in sizes}, reverse=True)
    ways = (False, True) if setup.checkpointing is None else (setup.checkpointing,)
    for checkpointing in ways:
        for size in bounds:
            yield size, checkpointing
