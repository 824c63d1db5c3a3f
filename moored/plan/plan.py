"""A plan: memory by part and seconds by phase for a configuration on a GPU, before anything loads.

Pure functions of the configuration, the shape of its model and a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moored.config import Config
from moored.engine.gpu import first_batch
from moored.errors import MooredError
from moored.models.shapes import ModelShape, shape_of
from moored.plan.gpus import GIB, Gpu
from moored.plan.memory import Memory, plan_memory
from moored.plan.seconds import plan_seconds, why_untimed
from moored.plan.setup import Lengths, Setup, longest_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a step needs of a GPU, and how long it takes."""

    gpu: Gpu
    setup: Setup
    micro_batch_tokens: int
    checkpointing: bool
    lengths: Lengths
    memory: Memory
    seconds: Mapping[str, float] | None
    """By phase, without the rollout where a plain sampler writes; None where it does not fit, and
    where `why_untimed` says so."""

    @property
    def over(self) -> float:
        """How much more than the GPU has is needed, as a share; below 0 it fits."""
        return self.memory.peak_bytes / self.gpu.memory_bytes - 1.0

    @property
    def step_s(self) -> float | None:
        """Of all phases; None where not all of them are planned."""
        if self.seconds is None or self.setup.has_plain_sampler:
            return None
        return sum(self.seconds.values())

    def record(self) -> dict[str, object]:
        """For JSON; memory in GiB."""
        memory, setup, lengths = self.memory, self.setup, self.lengths
        phases = {
            phase: {part: round(size / GIB, 3) for part, size in parts.items()}
            for phase, parts in memory.phases.items()
        }
        return {
            "model": setup.config.model,
            "num_parameters": setup.shape.num_parameters,
            "gpu": self.gpu.name,
            "gpu_gib": self.gpu.memory_gib,
            "ranks": setup.ranks,
            "fits": self.over <= 0.0,
            "peak_gib": round(memory.peak_bytes / GIB, 3),
            "peak_phase": memory.peak_phase,
            "memory_gib": phases,
            "host_parts_gib": {p: round(size / GIB, 3) for p, size in memory.host.items()},
            "rows_at_a_time": memory.rows,
            "micro_batch_tokens": self.micro_batch_tokens,
            "gradient_checkpointing": self.checkpointing,
            "prompt_tokens": lengths.prompt,
            "reply_tokens": lengths.reply,
            "turns": lengths.turns,
            "trajectory_tokens": lengths.trajectory,
            "seconds": self.seconds and {k: round(s, 4) for k, s in self.seconds.items()},
            "step_s": None if self.step_s is None else round(self.step_s, 4),
        }


def plan(
    config: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths | None = None, *, ranks: int = 1
) -> Plan:
    """Plan a step on one GPU, or on each of the `ranks` of torchrun on one machine.

    Without `lengths` nobody knows how many turns there are: seconds are of one, and memory is that
    of episodes as long as may be.
    """
    setup = Setup(config, shape, ranks)
    tokens, again = first_batch(config, shape, gpu.memory_bytes, ranks=ranks, has_sampler=True)
    memory = plan_memory(
        setup, gpu.memory_bytes, tokens=tokens, checkpointing=again, lengths=lengths
    )
    seconds, lengths = None, lengths or longest_lengths(config)
    if memory.peak_bytes <= gpu.memory_bytes and why_untimed(setup, gpu) is None:
        seconds = plan_seconds(
            setup, gpu, lengths, rows=memory.rows, tokens=tokens, checkpointing=again
        )
    return Plan(
        gpu=gpu,
        setup=setup,
        micro_batch_tokens=tokens,
        checkpointing=again,
        lengths=lengths,
        memory=memory,
        seconds=seconds,
    )


def plan_if_known(config: Config, gpu: Gpu) -> Plan | None:
    """None for models of unknown shape, and where another engine than the local one computes."""
    try:
        return plan(config, shape_of(config.model), gpu) if config.engine.kind == "local" else None
    except MooredError:
        return None
