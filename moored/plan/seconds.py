"""Seconds of a training step by phase: the work of each over the rates of a GPU, times the share of
them that was measured on one H200 (benchmarks/results; to calibrate, run `benchmarks/plan.py`).

Left out: environments, looks at collapse, evaluations, logging, and what ranks send each other. All
groups are taken to be kept and all replies to be of one length.
"""

from __future__ import annotations

from collections.abc import Mapping

from moored.engine.local.batches import forward_tokens
from moored.plan.gpus import Gpu
from moored.plan.setup import Lengths, Setup

MATRIX_SHARE = 775 / 989
"""Large bfloat16 products reach 775 of the 989 Tflop/s of an H200's data sheet. All other shares of
the matrix rate are of this."""
DECODE_LAYER_S, DECODE_MATRIX_SHARE, DECODE_CACHE_SHARE, DRAW_PASSES = 0.0152e-3, 0.81, 0.75, 3.0
"""Kernels of one layer of a decoding step that the next ones leave out; of the bandwidth (few rows)
or the matrix rate (many); of the bandwidth, while attention reads keys and values; how often
drawing a token goes over its logits. Fitted to steps of 16, 128 and 1,024 rows of 576 tokens, which
they reproduce within 11 % from 0.5 to 3 billion parameters and 15 % at 0.1 (decode_h200.json)."""
VLLM_ROW_S = 22e-6
"""What vLLM 0.26 adds to a decoding step for each row: steps took 4.0 and 29 ms at 0.5 B (128 and
1,024 rows) and 4.7 and 39 ms at 3 B. This gives 3.7, 27, 5.8 and 40 ms."""
PREFILL_SHARE, FORWARD_SHARE, UPDATE_SHARE = 0.88, 0.69, 0.62
"""Of the matrix rate for a large model; smaller ones get `_share_of_size` of these. Prompts of 512
tokens were read at 59 % with 0.5 B and 74 % with 3 B; passes without gradients at 33 % with 0.5 B
and layers of transformers; updates with fused layers at 37 and 56 % (sizes_h200.json)."""
UNFUSED_SHARE, HALF_SIZE = 0.8, 0.35e9
"""Of the last two, with other layers; parameters of the model that gets half of a share."""
RECORDED_TIMES = 1.25
"""How many times as fast updates of models are that are CUDA graphs (plan_h200.json)."""
LAUNCH_LAYER_S = 1.5e-3
"""Of the host, for one layer of a forward pass that is not recorded; backwards twice as long. PPO
with critic and KL on 3 B in micro-batches of two trajectories was bound by it (plan_h200.json)."""
LAYERWISE_TIMES = 1.109
"""What FSDP2 costs an update that gathers layer by layer, with a single rank (ranks_h200.json)."""
TIMED_FROM = 100_000_000
"""Parameters of the smallest model whose steps are timed. Host and short kernels bound those of
smaller ones: `mini` would get rollouts over three times too short (train_step_h200.json)."""
OPTIMIZER_SHARE = 0.8
"""Of the bandwidth, for an AdamW update."""
HOST_COPY_BYTES_S, HOST_UPDATE_BYTES_S = 50e9, 100e9
"""Between GPU and pinned main memory over PCIe 5; AdamW on the processor is bound by its memory."""


def why_untimed(setup: Setup, gpu: Gpu) -> str | None:
    """Why no seconds are planned; None where they are."""
    if not setup.bf16:
        return "not planned in float32, because the rates of GPUs are those of bfloat16"
    if setup.shape.num_parameters < TIMED_FROM:
        return (
            f"not planned below {TIMED_FROM / 1e9:g} billion parameters, because the host bounds "
            f"steps of such models; `moored train` says after three steps how long a run will take"
        )
    if gpu.tflops is None or gpu.bandwidth_tbs is None:
        return f"the rates of {gpu.name} are not known; name one with --gpu"
    return None


def plan_seconds(
    setup: Setup, gpu: Gpu, lengths: Lengths, *, rows: int, tokens: int, checkpointing: bool
) -> Mapping[str, float]:
    """Seconds by phase; `rows` episodes are written at a time, micro-batches have `tokens`.

    Without those of the rollout where the plain sampler writes: they depend on the model's code.
    """
    work = Work(setup, gpu, lengths)
    rollout = {"prefill": work.prefill(), "decode": work.decode(rows)}
    return {
        **({} if setup.has_plain_sampler else rollout),
        "advantages": work.advantages(tokens),
        "update": work.update(tokens, checkpointing) + work.optimizer(),
        "publish": work.publish(),
    }


class Work:
    """The work of each phase, and the seconds it takes."""

    def __init__(self, setup: Setup, gpu: Gpu, lengths: Lengths) -> None:
        assert gpu.tflops is not None and gpu.bandwidth_tbs is not None, "rates are known here"
        self.setup, self.lengths, self.memory_bytes = setup, lengths, gpu.memory_bytes
        self.rate = gpu.tflops * 1e12 * MATRIX_SHARE
        self.bandwidth = gpu.bandwidth_tbs * 1e12
        # Launches and narrow matrices cost small models most of the rate.
        size = setup.shape.num_parameters
        self.sampler_rate = self.rate * size / (size + HALF_SIZE)
        is_fused = setup.layer_kind == "fused"
        self.learner_rate = self.sampler_rate * (1.0 if is_fused else UNFUSED_SHARE)
        self.policy_flop = self._flop(setup.shape.head_parameters)
        self.trunk_flop = self._flop(0)
        rows, groups = setup.num_episodes, setup.num_groups
        self.step_tokens = groups * lengths.prompt + rows * lengths.continuation
        """With the prompt of a group computed once."""
        # Minibatches deal the trajectories of a group out, and each has its prompt.
        prompts = min(groups, setup.minibatch_samples) * setup.num_minibatches
        self.epoch_tokens = prompts * lengths.prompt + rows * lengths.continuation
        self.epochs = setup.config.optimizer.num_epochs
        is_recorded = setup.records_passes(checkpointing=False)
        self.launch_s = 0.0 if is_recorded else setup.shape.layers * LAUNCH_LAYER_S
        """What the host takes for a forward pass."""

    def _flop(self, head: int) -> float:
        """Of a forward pass, for one token: twice the weights of its products, and attention."""
        shape = self.setup.shape
        attention = 4 * shape.layers * shape.query_width * self.lengths.trajectory / 2
        return 2 * (shape.layers * shape.layer_parameters + head) + attention

    def _forward(self, flop: float, tokens: int) -> float:
        """A pass of the learner without gradients."""
        return flop * tokens / (self.learner_rate * FORWARD_SHARE)

    def prefill(self) -> float:
        """The head is asked for the last token of a prompt alone."""
        setup, lengths = self.setup, self.lengths
        tokens = setup.num_groups * lengths.prompt
        tokens += setup.num_episodes * (lengths.turns - 1) * lengths.observation
        return self.trunk_flop * tokens / (self.sampler_rate * PREFILL_SHARE)

    def decode(self, rows: int) -> float:
        episodes = self.setup.num_episodes
        full, rest = divmod(episodes, rows)
        steps = full * self.decode_step(rows) + (self.decode_step(rest) if rest else 0.0)
        steps += VLLM_ROW_S * episodes if self.setup.has_vllm else 0.0
        return self.lengths.turns * self.lengths.reply * steps

    def decode_step(self, rows: int) -> float:
        """One token for each row, at the mean length of an episode."""
        shape, element = self.setup.shape, self.setup.element_bytes
        weights = shape.layers * shape.layer_parameters + shape.head_parameters
        matrices = max(element * weights / self.bandwidth, 2 * weights * rows / self.rate)
        context = self.lengths.prompt + self.lengths.continuation / 2
        cache = rows * context * shape.cache_bytes(element) / self.bandwidth
        logits = rows * shape.vocabulary * 4 / self.bandwidth
        return (
            shape.layers * DECODE_LAYER_S
            + matrices / DECODE_MATRIX_SHARE
            + cache / DECODE_CACHE_SHARE
            + logits * DRAW_PASSES
        )

    def advantages(self, tokens: int) -> float:
        """Values of the critic, and log-probabilities where the learner's own are used."""
        setup = self.setup
        scores_old = setup.config.algorithm.old_logprobs == "learner"
        flop = setup.has_critic * self.trunk_flop + scores_old * self.policy_flop
        launched = self._scoring_launches(self.step_tokens, tokens)
        launched *= setup.has_critic + scores_old
        return max(self._forward(flop, self.step_tokens), launched)

    def update(self, tokens: int, checkpointing: bool) -> float:
        """The GPU computes while the host launches; the slower one counts.

        LoRA saves the gradients of weights. The reference of a large model is copied from main
        memory and scores all samples at once, that of a small one every minibatch.
        """
        setup, again = self.setup, int(checkpointing)
        flop = self.policy_flop + setup.has_critic * self.trunk_flop
        flop *= self.epochs * self.epoch_tokens
        computed = ((2 if setup.lora_rank else 3) + again) * flop
        computed /= self.learner_rate * UPDATE_SHARE
        passes = self._num_passes(self.epoch_tokens, tokens)
        launched = self.epochs * (1 + setup.has_critic) * (3 + again) * passes * self.launch_s
        if setup.parks_reference:
            copied = setup.weight_bytes / HOST_COPY_BYTES_S
            scored = copied + self._forward(self.policy_flop, self.step_tokens)
            launches = self._scoring_launches(self.step_tokens, tokens)
            return max(computed, launched) + max(scored, launches)
        if setup.config.algorithm.kl_coef > 0.0:
            computed += self._forward(self.policy_flop, self.epoch_tokens * self.epochs)
            launched += self.epochs * self._scoring_launches(self.epoch_tokens, tokens)
        if setup.records_passes(checkpointing):
            return computed / RECORDED_TIMES
        if setup.ranks > 1 and not setup.held_whole(self.memory_bytes).weights:
            computed *= LAYERWISE_TIMES
        return max(computed, launched)

    def _scoring_launches(self, whole: int, tokens: int) -> float:
        """Of a model that scores all samples, `whole` tokens."""
        asked = forward_tokens(tokens, "cuda", can_record=False)
        return self._num_passes(whole, asked) * self.launch_s

    def _num_passes(self, whole: int, tokens: int) -> int:
        """Of `tokens` at most, over the `whole` of all episodes; none is split."""
        episodes = self.setup.num_episodes
        return -(-episodes // max(1, tokens * episodes // whole))

    def optimizer(self) -> float:
        """Read weights, moments and gradients, write all but the gradients."""
        setup = self.setup
        trained = (setup.policy_trained + setup.critic_trained) / setup.ranks
        moments = 8 if setup.config.optimizer.kind == "adamw" else 2
        moved = 2 * (moments + 4) + 4 + (2 if setup.bf16 else 0)
        seconds = trained * moved / (self.bandwidth * OPTIMIZER_SHARE)
        if setup.states_on_host:
            seconds = trained * (4 + setup.element_bytes) / HOST_COPY_BYTES_S
            seconds += trained * moved / HOST_UPDATE_BYTES_S
        return setup.num_minibatches * self.epochs * seconds

    def publish(self) -> float:
        """Nothing where the sampler computes with the learner's weights; else a copy of them."""
        setup = self.setup
        shares = setup.has_fast_sampler and not setup.lora_rank and setup.ranks == 1
        return 0.0 if shares else 2 * setup.weight_bytes / self.bandwidth
