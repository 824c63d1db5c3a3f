"""What a configuration asks of the engine, as far as memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moored.config import Config
from moored.models.shapes import ModelShape
from moored.plan.activations import LayerKind
from moored.training.algorithms import load_algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The choices of a run, resolved for a GPU."""

    shape: ModelShape
    bf16: bool
    has_critic: bool
    has_reference: bool
    scores_old: bool
    """The learner computes the log-probabilities that ratios start from."""
    lora_rank: int
    optimizer: Literal["adamw", "adamw_8bit"]
    states_on_host: bool
    has_fast_sampler: bool
    """It has slots, and computes with the learner's own weights where these are trained whole."""
    has_fast_learner: bool
    """It has tree attention, and records the passes of small models as CUDA graphs."""
    compiles: bool
    """`engine.compile`: compiled layers are the model's own."""
    num_groups: int
    group_size: int
    num_updates: int
    """Optimiser updates of a step."""
    num_epochs: int
    most_rows: int
    """Episodes that are written at a time, if there is memory for them."""
    max_context: int
    micro_batch_tokens: int | None
    """None: to be chosen."""
    checkpointing: bool | None
    """None: to be chosen."""
    vllm_share: float = 0.0
    """Share of the memory that vLLM takes at the start; 0 where it does not sample."""
    vllm_ways: int = 1
    """GPUs that vLLM divides the model among; the learner has the first of them."""
    has_server: bool = False
    """vLLM is a server of its own process, which the run starts or which runs already."""
    samples_elsewhere: bool = False
    """A server that runs already samples: it has memory of its own."""

    @property
    def layer_kind(self) -> LayerKind:
        """How the learner computes layers, as `LocalLearner` chooses it on a GPU."""
        if self.has_fast_learner and not self.compiles:
            return "fused"
        return "bfloat16" if self.bf16 else "float32"

    @property
    def num_episodes(self) -> int:
        return self.num_groups * self.group_size

    @property
    def minibatch_samples(self) -> int:
        """Episodes of an update, at most."""
        per_epoch = self.num_updates // self.num_epochs
        return -(-self.num_episodes // per_epoch)

    @property
    def minibatch_tokens(self) -> int:
        """Most tokens of an update: its share of the episodes, each as long as may be."""
        return self.minibatch_samples * self.max_context

    @property
    def has_vllm(self) -> bool:
        return self.samples_elsewhere or self.vllm_share > 0.0

    @property
    def has_plain_sampler(self) -> bool:
        """It writes through the model's own code."""
        return not self.has_fast_sampler and not self.has_vllm

    @property
    def has_own_reference(self) -> bool:
        """Under LoRA the reference is the policy without its adapters."""
        return self.has_reference and not self.lora_rank

    def parks_reference(self, released_from: int) -> bool:
        """On one GPU: the reference waits in main memory, and scores once in a step."""
        return self.has_own_reference and self.shape.num_parameters >= released_from

    def records_passes(self, recorded_to: int, checkpointing: bool) -> bool:
        """Passes are CUDA graphs, whose memory and gradients stay where they are."""
        is_small = self.shape.num_parameters <= recorded_to
        return is_small and self.has_fast_learner and not checkpointing

    @property
    def weight_bytes(self) -> int:
        """Of the whole model, as passes compute with it."""
        return self.element_bytes * self.shape.num_parameters

    @property
    def element_bytes(self) -> int:
        """Of a weight in a forward pass, and of keys and values."""
        return 2 if self.bf16 else 4

    @property
    def policy_trained(self) -> int:
        """Parameters that updates of the policy change."""
        return self._trained(self.shape.num_parameters)

    @property
    def critic_trained(self) -> int:
        return self._trained(self.shape.trunk_parameters) if self.has_critic else 0

    def _trained(self, parameters: int) -> int:
        return self.shape.adapter_parameters(self.lora_rank) if self.lora_rank else parameters


def setup_of(config: Config, shape: ModelShape) -> Setup:
    """What `config` comes to for a model of `shape` on a GPU."""
    optimizer, engine, rollout = config.optimizer, config.engine, config.rollout
    checkpointing, is_bf16 = engine.gradient_checkpointing, engine.dtype != "float32"
    episodes = rollout.num_groups * rollout.group_size
    is_vllm, server = engine.sampler == "vllm", engine.vllm.server or ""
    samples_elsewhere = is_vllm and server.startswith("http")
    evaluated = config.evaluation.num_tasks * config.evaluation.num_samples
    return Setup(
        shape=shape,
        bf16=is_bf16,
        has_critic=load_algorithm(config.algorithm).needs_critic,
        has_reference=config.algorithm.kl_coef > 0.0,
        scores_old=config.algorithm.old_logprobs == "learner",
        lora_rank=optimizer.lora_rank,
        optimizer=optimizer.kind,
        states_on_host=optimizer.states == "host",
        has_fast_sampler=shape.is_fast and engine.sampler in ("auto", "fast"),
        has_fast_learner=shape.is_fast and engine.learner != "plain" and is_bf16,
        compiles=engine.compile,
        num_groups=rollout.num_groups,
        group_size=rollout.group_size,
        num_updates=min(optimizer.num_minibatches, episodes) * optimizer.num_epochs,
        num_epochs=optimizer.num_epochs,
        most_rows=max(episodes, evaluated if config.evaluation.every else 0),
        max_context=rollout.max_context,
        micro_batch_tokens=engine.micro_batch_tokens,
        checkpointing=checkpointing if isinstance(checkpointing, bool) else None,
        vllm_share=engine.vllm.memory_share if is_vllm and not samples_elsewhere else 0.0,
        vllm_ways=engine.vllm.tensor_parallel,
        has_server=is_vllm and bool(server),
        samples_elsewhere=samples_elsewhere,
    )
