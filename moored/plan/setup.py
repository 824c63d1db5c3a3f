"""What a configuration asks of one GPU, as far as its memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moored.config import Config
from moored.engine.fsdp.whole import Whole, held_whole
from moored.engine.gpu import CACHE_KEPT_BELOW, has_critic
from moored.models.shapes import ModelShape
from moored.names import sampler_for

LayerKind = Literal["fused", "bfloat16", "float32"]
"""How the learner computes layers: by `engine/fast/layers.py`, or as transformers does, under
autocast or without."""
RECORDED_TO = 300_000_000
"""`MAX_RECORDED` of engine/fast/graphs.py: parameters of the largest model whose passes are CUDA
graphs, which keep their memory and are launched at once."""
PROMPT_TOKENS, OBSERVATION_TOKENS = 300, 60
"""Of a first prompt (Sokoban's, as Qwen2.5 writes it), and of what a later turn begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of an episode."""

    prompt: int = PROMPT_TOKENS
    reply: int
    turns: int = 1
    observation: int = OBSERVATION_TOKENS

    @property
    def continuation(self) -> int:
        """Tokens after the first prompt."""
        return self.turns * self.reply + (self.turns - 1) * self.observation

    @property
    def trajectory(self) -> int:
        """All tokens of an episode."""
        return self.prompt + self.continuation


def longest_lengths(
    config: Config, *, prompt: int = PROMPT_TOKENS, turns: int = 1, reply: int | None = None
) -> Lengths:
    """Up to `turns` turns, as many as there is room for, with replies of `reply` tokens or as long
    as the configuration allows."""
    rollout = config.rollout
    prompt = min(prompt, rollout.max_context - 1)
    room = rollout.max_context - prompt + OBSERVATION_TOKENS
    turns = min(turns, max(1, room // (OBSERVATION_TOKENS + (reply or 1))))
    longest = max(1, min(rollout.max_response_tokens, room // turns - OBSERVATION_TOKENS))
    return Lengths(prompt=prompt, turns=turns, reply=longest if reply is None else reply)


@dataclass(frozen=True, slots=True)
class Setup:
    """The choices of a run on one GPU, or on each of the `ranks` of torchrun."""

    config: Config
    shape: ModelShape
    ranks: int = 1

    @property
    def bf16(self) -> bool:
        return self.config.engine.dtype != "float32"

    @property
    def element_bytes(self) -> int:
        """Of a weight in a forward pass, and of keys and values."""
        return 2 if self.bf16 else 4

    @property
    def weight_bytes(self) -> int:
        """Of the whole model, as passes compute with it."""
        return self.element_bytes * self.shape.num_parameters

    @property
    def has_critic(self) -> bool:
        return has_critic(self.config.algorithm)

    @property
    def has_own_reference(self) -> bool:
        """Under LoRA the reference is the policy without its adapters."""
        return self.config.algorithm.kl_coef > 0.0 and not self.lora_rank

    @property
    def lora_rank(self) -> int:
        return self.config.optimizer.lora_rank

    @property
    def states_on_host(self) -> bool:
        return self.config.optimizer.states == "host"

    @property
    def has_vllm(self) -> bool:
        return self.config.engine.sampler == "vllm"

    @property
    def vllm_share(self) -> float:
        """Of the memory, from the start; 0 where vLLM does not sample, or in a server elsewhere."""
        vllm = self.config.engine.vllm
        is_elsewhere = (vllm.server or "").startswith("http")
        return vllm.memory_share if self.has_vllm and not is_elsewhere else 0.0

    @property
    def has_fast_sampler(self) -> bool:
        """It has slots, and computes with the learner's weights where one GPU trains them whole."""
        return sampler_for(self.config.engine.sampler, is_fast=self.shape.is_fast) == "fast"

    @property
    def has_plain_sampler(self) -> bool:
        """It writes through the model's own code."""
        return not self.has_fast_sampler and not self.has_vllm

    @property
    def has_fast_learner(self) -> bool:
        """It has tree attention, and fused layers unless they are compiled."""
        return self.shape.is_fast and self.config.engine.learner != "plain" and self.bf16

    @property
    def layer_kind(self) -> LayerKind:
        if self.has_fast_learner and not self.config.engine.compile:
            return "fused"
        return "bfloat16" if self.bf16 else "float32"

    @property
    def num_groups(self) -> int:
        """Of a rank."""
        return -(-self.config.rollout.num_groups // self.ranks)

    @property
    def num_episodes(self) -> int:
        return self.num_groups * self.config.rollout.group_size

    @property
    def most_rows(self) -> int:
        """Episodes that are written at a time, if there is memory for them."""
        evaluation = self.config.evaluation
        tried = evaluation.num_tasks * evaluation.num_samples if evaluation.every else 0
        return max(self.num_episodes, -(-tried // self.ranks))

    @property
    def num_minibatches(self) -> int:
        """Of an epoch."""
        return min(self.config.optimizer.num_minibatches, self.num_episodes)

    @property
    def minibatch_samples(self) -> int:
        """Episodes of an update, at most."""
        return -(-self.num_episodes // self.num_minibatches)

    @property
    def is_large(self) -> bool:
        """Its updates use the memory of keys and values, and its reference waits on the host."""
        return self.shape.num_parameters >= CACHE_KEPT_BELOW

    @property
    def parks_reference(self) -> bool:
        """On one GPU: the reference waits in main memory, and scores once in a step."""
        return self.ranks == 1 and self.is_large and self.has_own_reference

    def records_passes(self, checkpointing: bool) -> bool:
        """Passes are CUDA graphs, whose memory and gradients stay where they are."""
        is_small = self.shape.num_parameters <= RECORDED_TO and self.ranks == 1
        return is_small and self.has_fast_learner and not checkpointing

    @property
    def policy_trained(self) -> int:
        """Parameters that updates of the policy change."""
        adapters = self.shape.adapter_parameters(self.lora_rank)
        return adapters if self.lora_rank else self.shape.num_parameters

    @property
    def critic_trained(self) -> int:
        trained = self.policy_trained if self.lora_rank else self.shape.trunk_parameters
        return trained if self.has_critic else 0

    def held_whole(self, memory_bytes: int) -> Whole:
        """What a rank holds whole during an update."""
        trained = self.policy_trained + self.critic_trained
        parameters = self.shape.num_parameters + self.critic_trained
        return held_whole(parameters, trained, memory_bytes, element_bytes=self.element_bytes)
