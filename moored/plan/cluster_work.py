"""Seconds of a training step on a cluster, phase by phase.

Work on a GPU is that of `moored.plan.seconds`, with the shares that were measured on one H200.
What GPUs tell each other is bytes over the links of `moored.plan.links`: none of it was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moored.engine.fsdp.whole import Whole
from moored.plan.coefficients import Coefficients, forward_tokens
from moored.plan.links import LINK_SHARE, Cluster
from moored.plan.seconds import Lengths, Work
from moored.plan.setup import Setup
from moored.plan.sharded import LearnerMemory

DRIVER_TURNS_PER_S = 11_770.0
"""Turns that one driver handles on a core of its own: the median of six runs by the clock of the
processor, which gave 11,190 to 12,850 on a core that other processes used too. In the three runs
that these disturbed little the clock on the wall gave 2 to 6 % less (results/driver.json)."""
HOST_COPY_BYTES_S = 6e9
"""Between a GPU and main memory that is not pinned: an assumption."""
STORE_PUT_BYTES_S = 2.5e9
"""Into Ray's object store: 2.3 to 3.3 GB/s were measured with 400 MB on two cores."""
STORE_SEND_BYTES_S = 1.0e9
"""From one node's store to another's: 0.8 to 1.35 GB/s were measured between two stores on the same
two cores; machines with more cores may do better."""
TENSOR_PARALLEL_LATENCY_S = 10e-6
"""Of an all-reduce of a decoding step within a node: an assumption."""

Route = Literal["store", "direct"]
"""How weights reach replicas: `engine.ray.publish`."""


@dataclass(frozen=True, slots=True)
class Update:
    """Both sides of what may overlap in updates."""

    compute_s: float
    links_s: float
    optimizer_s: float
    overlaps: bool = True
    """FSDP2 fetches the next layer while one is computed; whole weights come before all."""

    @property
    def seconds(self) -> float:
        """Where they overlap the slower side counts."""
        both = self.compute_s, self.links_s
        return (max(both) if self.overlaps else sum(both)) + self.optimizer_s


class ClusterWork:
    """The phases of a step on samplers and learners of a cluster."""

    def __init__(
        self, setup: Setup, cluster: Cluster, given: Coefficients, lengths: Lengths
    ) -> None:
        self.setup, self.cluster, self.lengths = setup, cluster, lengths
        self.work = Work(setup, cluster.gpu, given.speed, lengths)

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
        step = full * self.decode_step(rows, ways, is_vllm=is_vllm)
        if rest:
            step += self.decode_step(rest, ways, is_vllm=is_vllm)
        return self.lengths.turns * self.lengths.reply * step

    def decode_step(self, rows: int, ways: int, *, is_vllm: bool) -> float:
        """Of a replica: two all-reduces of a layer's outputs where several GPUs share it."""
        seconds = self.work.decode_step(rows, ways=ways)
        seconds += self.work.given.vllm_row_s * rows if is_vllm else 0.0
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
        passes = self.setup.has_critic + self.setup.scores_old
        tokens = self.work.step_tokens / self.setup.num_episodes
        most = forward_tokens(memory.micro_batch_tokens)
        passes *= self._micro_batches(self.setup.num_episodes, tokens, ranks, most)
        others = max(self.work.launch_s, self._gather_weights(ranks, memory.whole))
        return max(seconds, passes * others)

    def update(self, ranks: int, memory: LearnerMemory) -> Update:
        """Every micro-batch gathers weights forwards and backwards, and sums gradients.

        What is whole during an update is gathered or summed once for each.
        """
        setup = self.setup
        samples = -(-setup.num_episodes * setup.num_epochs // setup.num_updates)
        compute = self.work.passes(memory.checkpointing) + self.work.reference()
        compute *= self._imbalance(samples, ranks) / ranks
        tokens = self.work.epoch_tokens / setup.num_episodes
        most = memory.micro_batch_tokens
        batches = setup.num_updates * self._micro_batches(samples, tokens, ranks, most)
        # Passes without gradients have more tokens, as in one process.
        most = forward_tokens(most)
        referred = setup.num_updates * self._micro_batches(samples, tokens, ranks, most)
        referred *= setup.has_reference
        models, whole = 1 + setup.has_critic, memory.whole
        trained = setup.policy_trained + setup.critic_trained
        calls = models * (1 if whole.weights else setup.shape.layers)
        sums = self.cluster.gather_s(4 * trained, ranks, calls=calls)
        sums *= setup.num_updates if whole.gradients else batches
        gathers = models * (setup.num_updates if whole.weights else 2 * batches)
        gathers += referred
        links = gathers * self._gather_weights(ranks, whole) + sums
        # The host launches the passes of a layer, backwards twice as long as forwards.
        launches = batches * models * (3 + memory.checkpointing) + referred
        compute = max(compute, launches * self.work.launch_s)
        optimizer = self.work.optimizer() / ranks
        return Update(compute, links, optimizer, overlaps=not whole.weights)

    def publish(self, learners: int, replicas: int, ways: int, route: Route) -> float:
        """Weights are gathered, and go to all replicas: through Ray's object store, or directly."""
        num_bytes = self.setup.element_bytes * self.setup.shape.num_parameters
        gather = self._gather_weights(learners)
        if route == "direct":
            return gather + self._broadcast(num_bytes, learners, replicas, ways)
        copies = num_bytes / HOST_COPY_BYTES_S * (1 + 1 / ways)
        nodes = -(-(learners + replicas * ways) // self.cluster.gpus_per_node)
        # A node that has the weights sends them on: each round doubles those that do.
        rounds = math.ceil(math.log2(nodes))
        sends = rounds * num_bytes / STORE_SEND_BYTES_S
        return gather + num_bytes / STORE_PUT_BYTES_S + sends + copies

    def _broadcast(self, num_bytes: float, learners: int, replicas: int, ways: int) -> float:
        """From GPU to GPU in a chain, over the card of one GPU between nodes; then a copy."""
        cluster = self.cluster
        is_one_node = learners + replicas * ways <= cluster.gpus_per_node
        card = cluster.network_gbits / 8 / cluster.gpus_per_node
        rate = LINK_SHARE * 1e9 * (cluster.node_gbs if is_one_node else min(card, cluster.node_gbs))
        return num_bytes / rate + 2 * num_bytes / ways / self.work.bandwidth

    def publish_in_place(self, ranks: int) -> float:
        """Samplers on the learners' GPUs gather the weights and copy them."""
        num_bytes = self.setup.element_bytes * self.setup.shape.num_parameters
        return self._gather_weights(ranks) + 2 * num_bytes / self.work.bandwidth

    def _gather_weights(self, ranks: int, whole: Whole | None = None) -> float:
        """Of one model, layer by layer unless weights are whole."""
        shape = self.setup.shape
        calls = 1 if whole is not None and whole.weights else shape.layers
        num_bytes = self.setup.element_bytes * shape.num_parameters
        return self.cluster.gather_s(num_bytes, ranks, calls=calls)

    @staticmethod
    def _micro_batches(samples: int, tokens: float, ranks: int, most: int) -> int:
        """Of the rank with most of the `samples`, which have `tokens` each and are not split.

        A micro-batch has at most `most` tokens.
        """
        at_a_time = max(1, int(most / tokens))
        own = math.ceil(samples / ranks)
        return math.ceil(own / at_a_time)

    @staticmethod
    def _imbalance(samples: int, ranks: int) -> float:
        """Whole samples are dealt out, so the rank with most has more than the mean."""
        return -(-samples // ranks) * ranks / samples
