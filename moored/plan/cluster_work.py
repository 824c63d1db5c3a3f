"""Seconds of a training step on a cluster, phase by phase.

Work on a GPU is that of `moored.plan.seconds`, with the shares that were measured on one H200.
What GPUs tell each other is bytes over the links of `moored.plan.links`: none of it was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moored.plan.coefficients import Coefficients
from moored.plan.links import LINK_SHARE, Cluster
from moored.plan.seconds import Lengths, Work
from moored.plan.setup import Setup
from moored.plan.sharded import LearnerMemory

DRIVER_TURNS_PER_S = 7500.0
"""Turns that one driver handles, by the clock on the wall: 6,857 to 8,230 were measured on a core
that other processes used too (benchmarks/results/driver.json)."""
VLLM_ROW_S = 22e-6
"""What vLLM 0.26 adds to a decoding step for each row, beside what moored's own sampler takes: with
log-probabilities its steps took 4.0 and 29 ms at 0.5 B (128 and 1,024 rows) and 4.7 and 39 ms at
3 B, measured on one H200 with random weights. This gives 4.4, 27, 6.5 and 40 ms."""
TENSOR_PARALLEL_LATENCY_S = 10e-6
"""Of an all-reduce of a decoding step within a node: an assumption."""


@dataclass(frozen=True, slots=True)
class Update:
    """Both sides of what may overlap in updates."""

    compute_s: float
    links_s: float
    optimizer_s: float

    @property
    def seconds(self) -> float:
        """FSDP2 fetches the next layer while one is computed: the slower side counts."""
        return max(self.compute_s, self.links_s) + self.optimizer_s


class ClusterWork:
    """The phases of a step on samplers and learners of a cluster."""

    def __init__(
        self, setup: Setup, cluster: Cluster, given: Coefficients, lengths: Lengths
    ) -> None:
        # Ranks compute the model's own layers, not the fused ones of the local learner.
        self.setup = replace(setup, has_fast_learner=False)
        self.cluster, self.lengths = cluster, lengths
        self.work = Work(self.setup, cluster.gpu, given.speed, lengths)

    def prefill(self, replicas: int, ways: int) -> float:
        """The episodes of a group may lie on several replicas, and each reads the prompt."""
        setup, lengths = self.setup, self.lengths
        spread = min(replicas, setup.group_size)
        prompts = setup.num_groups * lengths.prompt
        more = (spread - 1) * prompts
        once = prompts + setup.num_episodes * (lengths.turns - 1) * lengths.observation
        return self.work.prefill() * (1 + more / once) / (replicas * ways)

    def decode(self, replicas: int, rows: int, ways: int, *, is_vllm: bool) -> float:
        """The replica with most episodes, `rows` of them at a time."""
        episodes = -(-self.setup.num_episodes // replicas)
        full, rest = divmod(episodes, rows)
        batches = [rows] * full + ([rest] if rest else [])
        steps = self.lengths.turns * self.lengths.reply
        return steps * sum(self.decode_step(n, ways, is_vllm=is_vllm) for n in batches)

    def decode_step(self, rows: int, ways: int, *, is_vllm: bool) -> float:
        """Of a replica: two all-reduces of a layer's outputs where several GPUs share it."""
        seconds = self.work.decode_step(rows, ways=ways) + (VLLM_ROW_S * rows if is_vllm else 0.0)
        if ways == 1:
            return seconds
        shape = self.setup.shape
        moved = 2 * (ways - 1) / ways * rows * shape.width * self.setup.element_bytes
        one = moved / self.cluster.bytes_per_s(ways) + TENSOR_PARALLEL_LATENCY_S
        return seconds + 2 * shape.layers * one

    def driver(self) -> float:
        return self.setup.num_episodes * self.lengths.turns / DRIVER_TURNS_PER_S

    def advantages(self, ranks: int, memory: LearnerMemory) -> float:
        """Passes without gradients over all tokens of a step, where there are any."""
        seconds = self.work.advantages() * self._imbalance(self.setup.num_episodes, ranks) / ranks
        if not seconds:
            return 0.0
        models = self.setup.has_critic + self.setup.scores_old
        batches = self._micro_batches(self.work.step_tokens, ranks, memory)
        return max(seconds, models * batches * self._gather_weights(ranks))

    def update(self, ranks: int, memory: LearnerMemory) -> Update:
        """Every micro-batch gathers weights forwards and backwards, and sums gradients."""
        setup = self.setup
        samples = -(-setup.num_episodes * setup.num_epochs // setup.num_updates)
        compute = self.work.passes(memory.checkpointing) * self._imbalance(samples, ranks) / ranks
        tokens = self.work.epoch_tokens * setup.num_epochs / setup.num_updates
        batches = setup.num_updates * self._micro_batches(tokens, ranks, memory)
        shape, models = setup.shape, 1 + setup.has_critic
        trained = setup.policy_trained + setup.critic_trained
        sums = self.cluster.gather_s(4 * trained, ranks, calls=models * shape.layers)
        gathers = 2 * models + setup.has_reference
        links = batches * (gathers * self._gather_weights(ranks) + sums)
        return Update(compute, links, self.work.optimizer() / ranks)

    def publish(self, learners: int, replicas: int, ways: int) -> float:
        """Weights are gathered, sent to all replicas in a chain, and copied in place."""
        cluster, setup = self.cluster, self.setup
        num_bytes = setup.element_bytes * setup.shape.num_parameters
        is_one_node = learners + replicas * ways <= cluster.gpus_per_node
        card = cluster.network_gbits / 8 / cluster.gpus_per_node
        rate = LINK_SHARE * 1e9 * (cluster.node_gbs if is_one_node else min(card, cluster.node_gbs))
        copies = 2 * num_bytes / ways / self.work.bandwidth
        return self._gather_weights(learners) + num_bytes / rate + copies

    def publish_in_place(self, ranks: int) -> float:
        """Samplers on the learners' GPUs gather the weights and copy them."""
        num_bytes = self.setup.element_bytes * self.setup.shape.num_parameters
        return self._gather_weights(ranks) + 2 * num_bytes / self.work.bandwidth

    def _gather_weights(self, ranks: int) -> float:
        shape = self.setup.shape
        return self.cluster.gather_s(2 * shape.num_parameters, ranks, calls=shape.layers)

    def _micro_batches(self, tokens: float, ranks: int, memory: LearnerMemory) -> int:
        return max(1, math.ceil(tokens / ranks / memory.micro_batch_tokens))

    @staticmethod
    def _imbalance(samples: int, ranks: int) -> float:
        """Whole samples are dealt out, so the rank with most has more than the mean."""
        return -(-samples // ranks) * ranks / samples
