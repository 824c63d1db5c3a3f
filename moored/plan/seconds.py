"""Seconds of a training step by phase, from the work of each and how near it comes to the limits.

Left out: what environments take, looks at collapse, evaluations and logging. All groups are taken
to be kept and all replies to be of one length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moored.config import Config
from moored.errors import MooredError
from moored.plan.coefficients import SpeedCoefficients, forward_tokens
from moored.plan.gpus import Gpu
from moored.plan.setup import Setup

PROMPT_TOKENS = 300
"""Of a first prompt where nothing else is known: Sokoban's, as Qwen2.5 writes it."""
OBSERVATION_TOKENS = 60
"""Of what a turn after the first begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of an episode."""

    prompt: int = PROMPT_TOKENS
    reply: int
    turns: int = 1
    observation: int = OBSERVATION_TOKENS

    def __post_init__(self) -> None:
        for name in ("prompt", "reply", "turns"):
            if getattr(self, name) < 1:
                raise MooredError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def trajectory(self) -> int:
        """All tokens of an episode."""
        return self.prompt + self.continuation

    @property
    def text(self) -> str:
        """What an episode adds up to."""
        found = (
            f"episodes of {self.trajectory:,} tokens: a prompt of {self.prompt}, then "
            f"{self.turns} x {self.reply}"
        )
        between = self.turns - 1
        return f"{found} and {between} x {self.observation} between them" if between else found

    @property
    def continuation(self) -> int:
        """Tokens after the first prompt."""
        return self.turns * self.reply + (self.turns - 1) * self.observation


def longest_lengths(
    config: Config, *, prompt: int = PROMPT_TOKENS, turns: int = 1, reply: int | None = None
) -> Lengths:
    """Every turn is played, with replies as long as the configuration allows (or of `reply`)."""
    rollout = config.rollout
    prompt = min(prompt, rollout.max_context - 1)
    room = rollout.max_context - prompt - (turns - 1) * OBSERVATION_TOKENS
    longest = max(1, min(rollout.max_response_tokens, room // turns))
    return Lengths(prompt=prompt, turns=turns, reply=longest if reply is None else reply)


def most_turns(config: Config, *, prompt: int = PROMPT_TOKENS, reply: int = 1) -> int:
    """Turns with replies of so many tokens that the context has room for."""
    room = config.rollout.max_context - prompt + OBSERVATION_TOKENS
    return max(1, room // (OBSERVATION_TOKENS + reply))


def check_lengths(config: Config, lengths: Lengths) -> None:
    """Refuse episodes that the configuration does not allow: their seconds would mean nothing."""
    rollout = config.rollout
    if lengths.reply > rollout.max_response_tokens:
        raise MooredError(
            f"replies of {lengths.reply} tokens are longer than rollout.max_response_tokens = "
            f"{rollout.max_response_tokens}; raise that, or lower --reply-tokens"
        )
    if lengths.trajectory > rollout.max_context:
        raise MooredError(
            f"an episode of {lengths.trajectory:,} tokens (a prompt of {lengths.prompt}, then "
            f"{lengths.turns} turn{'s' if lengths.turns > 1 else ''}) is longer than "
            f"rollout.max_context = {rollout.max_context}; raise that, or lower --turns, "
            f"--prompt-tokens or --reply-tokens"
        )


def why_untimed(setup: Setup, given: SpeedCoefficients) -> str | None:
    """Why no seconds are planned on any GPU; None where they are."""
    if not setup.bf16:
        return "not planned in float32, because the rates of GPUs are those of bfloat16"
    if setup.shape.num_parameters < given.timed_from:
        return (
            f"not planned below {given.timed_from / 1e9:g} billion parameters, because the host "
            f"bounds steps of such models; `moored train` says after three steps how long a run "
            f"will take"
        )
    return None


def plan_seconds(
    setup: Setup,
    gpu: Gpu,
    given: SpeedCoefficients,
    lengths: Lengths,
    *,
    rows: int,
    tokens: int,
    checkpointing: bool,
) -> Mapping[str, float]:
    """Seconds by phase; `rows` episodes are written at a time, micro-batches have `tokens`.

    Without those of the rollout where the plain sampler writes: they depend on the model's code.
    """
    work = Work(setup, gpu, given, lengths)
    scoring = max(work.advantages(), work.scoring_launches(tokens))
    rollout = {} if setup.has_plain_sampler else work.rollout(rows)
    return {
        **rollout,
        "advantages": scoring,
        "update": work.update_passes(tokens, checkpointing) + work.optimizer(),
        "publish": work.publish(),
    }


class Work:
    """The work of each phase, and the seconds it takes."""

    def __init__(self, setup: Setup, gpu: Gpu, given: SpeedCoefficients, lengths: Lengths) -> None:
        assert gpu.tflops is not None and gpu.bandwidth_tbs is not None, "rates are known here"
        self.setup, self.given, self.lengths = setup, given, lengths
        self.rate = gpu.tflops * 1e12 * given.matrix_share
        self.bandwidth = gpu.bandwidth_tbs * 1e12
        size = given.share_of_size(setup.shape.num_parameters)
        self.sampler_rate = self.rate * size
        is_fused = setup.layer_kind == "fused"
        self.learner_rate = self.rate * size * (1.0 if is_fused else given.unfused_share)
        self.policy_flop = self._flop(setup.shape.head_parameters)
        self.trunk_flop = self._flop(0)
        rows, groups = setup.num_episodes, setup.num_groups
        self.step_tokens = groups * lengths.prompt + rows * lengths.continuation
        """With the prompt of a group computed once."""
        # Minibatches deal the trajectories of a group out, and each has its prompt.
        per_epoch = setup.num_updates // setup.num_epochs
        prompts = min(groups, -(-rows // per_epoch)) * per_epoch
        self.epoch_tokens = prompts * lengths.prompt + rows * lengths.continuation

    def _flop(self, head: int) -> float:
        """Of a forward pass, for one token: twice the weights of its products, and attention."""
        shape = self.setup.shape
        attention = 4 * shape.layers * shape.query_width * self.lengths.trajectory / 2
        return 2 * (shape.layers * shape.layer_parameters + head) + attention

    def _forward(self, flop: float, tokens: int) -> float:
        """A pass of the learner without gradients."""
        return flop * tokens / (self.learner_rate * self.given.forward_share)

    def rollout(self, rows: int) -> Mapping[str, float]:
        """Of moored's own sampler or of vLLM, by phase."""
        return {"prefill": self.prefill(), "decode": self.decode(rows)}

    def prefill(self) -> float:
        """The head is asked for the last token of a prompt alone."""
        setup, lengths = self.setup, self.lengths
        tokens = setup.num_groups * lengths.prompt
        tokens += setup.num_episodes * (lengths.turns - 1) * lengths.observation
        return self.trunk_flop * tokens / (self.sampler_rate * self.given.prefill_share)

    def decode(self, rows: int) -> float:
        episodes = self.setup.num_episodes
        row_s = self.given.vllm_row_s if self.setup.has_vllm else 0.0
        full, rest = divmod(episodes, rows)
        steps = full * self.decode_step(rows) + (self.decode_step(rest) if rest else 0.0)
        return self.lengths.turns * self.lengths.reply * (steps + row_s * episodes)

    def decode_step(self, rows: int, *, ways: int = 1) -> float:
        """One token for each row, at the mean length of an episode.

        With tensor parallelism `ways` GPUs have a share each; what they tell each other is left
        out. Keys and values cannot be divided further than their heads.
        """
        shape, given, element = self.setup.shape, self.given, self.setup.element_bytes
        weights = shape.layers * shape.layer_parameters + shape.head_parameters
        matrices = max(element * weights / self.bandwidth, 2 * weights * rows / self.rate) / ways
        context = self.lengths.prompt + self.lengths.continuation / 2
        cache = rows * context * shape.cache_bytes(element) / self.bandwidth
        cache /= min(ways, shape.kv_heads)
        logits = rows * shape.vocabulary * 4 / self.bandwidth / ways
        return (
            shape.layers * given.decode_layer_s
            + matrices / given.decode_matrix_share
            + cache / given.decode_cache_share
            + logits * given.draw_passes
        )

    def advantages(self) -> float:
        """Values of the critic, and log-probabilities where the learner's own are used."""
        values = self.trunk_flop if self.setup.has_critic else 0.0
        scores = self.policy_flop if self.setup.scores_old else 0.0
        return self._forward(values + scores, self.step_tokens)

    def passes(self, checkpointing: bool) -> float:
        """Forward and backward, of policy and critic; LoRA saves the gradients of weights."""
        setup, tokens = self.setup, self.epoch_tokens * self.setup.num_epochs
        flop = self.policy_flop + (self.trunk_flop if setup.has_critic else 0.0)
        times = (2 if setup.lora_rank else 3) + checkpointing
        return times * flop * tokens / (self.learner_rate * self.given.update_share)

    def reference(self) -> float:
        """Passes of a reference that scores every minibatch of every epoch."""
        tokens = self.epoch_tokens * self.setup.num_epochs
        return self._forward(self.policy_flop, tokens) if self.setup.has_reference else 0.0

    def scoring_launches(self, tokens: int) -> float:
        """What the host takes to launch `advantages`."""
        models = self.setup.has_critic + self.setup.scores_old
        return models * self._step_launches(tokens)

    def _step_launches(self, tokens: int) -> float:
        """Of a model that scores all samples of a step at once."""
        return self._num_passes(self.step_tokens, forward_tokens(tokens)) * self.launch_s

    def update_passes(self, tokens: int, checkpointing: bool) -> float:
        """The GPU computes while the host launches; the slower one counts."""
        computed, launched = self.passes(checkpointing), self._launches(tokens, checkpointing)
        if self.setup.parks_reference(self.given.released_from):
            return max(computed, launched) + self._parked_reference(tokens)
        computed += self.reference()
        if self.setup.records_passes(self.given.recorded_to, checkpointing):
            return computed / self.given.recorded_times
        return max(computed, launched + self._reference_launches(tokens))

    def _parked_reference(self, tokens: int) -> float:
        """It is copied from main memory and scores all samples before the first update."""
        copied = self.setup.weight_bytes / self.given.host_copy_bytes_s
        scored = self._forward(self.policy_flop, self.step_tokens)
        return max(copied + scored, self._step_launches(tokens))

    def _launches(self, tokens: int, checkpointing: bool) -> float:
        """What the host takes to launch `passes`; backwards twice as long as forwards."""
        trained = (1 + self.setup.has_critic) * (3 + checkpointing)
        trained *= self._num_passes(self.epoch_tokens, tokens)
        return self.setup.num_epochs * trained * self.launch_s

    def _reference_launches(self, tokens: int) -> float:
        """What the host takes to launch `reference`."""
        passes = self._num_passes(self.epoch_tokens, forward_tokens(tokens))
        return self.setup.has_reference * self.setup.num_epochs * passes * self.launch_s

    @property
    def launch_s(self) -> float:
        """Of a forward pass through all layers."""
        setup, given = self.setup, self.given
        is_recorded = setup.records_passes(given.recorded_to, checkpointing=False)
        return 0.0 if is_recorded else setup.shape.layers * given.launch_layer_s

    def _num_passes(self, whole: int, tokens: int) -> int:
        """Of `tokens` at most, over the `whole` of all episodes; none is split."""
        episodes = self.setup.num_episodes
        at_a_time = max(1, tokens * episodes // whole)
        return -(-episodes // at_a_time)

    def optimizer(self) -> float:
        """Read weights, moments and gradients, write all but the gradients."""
        setup, given = self.setup, self.given
        trained = setup.policy_trained + setup.critic_trained
        moments = 8 if setup.optimizer == "adamw" else 2
        moved = trained * (2 * (moments + 4) + 4 + (2 if setup.bf16 else 0))
        if not setup.states_on_host:
            return setup.num_updates * moved / (self.bandwidth * given.optimizer_share)
        copied = trained * (4 + setup.element_bytes)
        seconds = copied / given.host_copy_bytes_s + moved / given.host_update_bytes_s
        return setup.num_updates * seconds

    def publish(self) -> float:
        """Nothing where the sampler computes with the learner's weights; else a copy of them."""
        setup = self.setup
        if setup.has_fast_sampler and not setup.lora_rank:
            return 0.0
        return 2 * setup.element_bytes * setup.shape.num_parameters / self.bandwidth
