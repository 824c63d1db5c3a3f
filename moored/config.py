"""All options: name, default and meaning of each.

`load_config` reads a YAML file (or a mapping), applies dotted overrides such as
`filter.value=0.8`, and rejects what it does not know with a close match. Maths never sees these
objects: callers pass plain values on.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moored.config_engine import EngineConfig, OptimizerConfig, Section
from moored.config_rules import GROUP_BASELINES, with_algorithm_defaults
from moored.config_text import explain, read_yaml, set_option
from moored.errors import ConfigError
from moored.names import (
    ALGORITHMS,
    DIVIDES_BY_STD,
    ESTIMATORS,
    RULES,
    SCORES,
    Aggregation,
    FilterAction,
    FilterReward,
    LossScale,
    check_rule_value,
)


class EnvConfig(Section):
    """One environment of the mix."""

    name: str = Field(min_length=1, coerce_numbers_to_str=True)
    """Registered name, also with a main option (`textarena:TicTacToe-v0`), or `module:Class`."""
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Relative share of the groups."""
    options: dict[str, object] = Field(default={})
    """Keyword arguments of the environment."""


class RolloutConfig(Section):
    """How experience is gathered."""

    num_groups: int = Field(default=8, ge=1)
    """P: prompts per step."""
    group_size: int = Field(default=16, ge=1)
    """G: trajectories per prompt."""
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Sampling temperature; log-probabilities are taken at it everywhere."""
    max_response_tokens: int = Field(default=400, ge=1)
    """Longest reply of one turn."""
    env_workers: int = Field(default=1, ge=1)
    """Calls of environments at a time; more help where they wait, e.g. for a server."""
    env_timeout_s: float = Field(default=60.0, gt=0.0, le=1e9)
    """A call of an environment that takes longer is given up, and its episode is an error."""
    max_context: int = Field(default=2048, ge=16)
    """Longest dialogue in tokens; an episode that outgrows it is cut off."""
    max_lag: int = Field(default=0, ge=0, le=1)
    """Updates that the weights of a rollout may lag behind. 1 rolls out the next groups while an
    update runs, with the weights from before it; for engines whose samplers have their own."""


class AlgorithmConfig(Section):
    """The policy-gradient pieces that all algorithms share.

    Some names have defaults of their own, see `moored.config_rules`.
    """

    name: typing.Annotated[str, AfterValidator(ALGORITHMS.check)] = "ppo"
    """Registered name or `module:attribute`, a `moored.training.algorithms.Algorithm`."""
    advantage: typing.Annotated[str, AfterValidator(ESTIMATORS.check)] | None = None
    """How rewards become advantages: `gae`, `bilevel_gae` (over turns first, then over tokens),
    `grpo`, `dr_grpo`, `rloo`, `reinforce_pp`, or `module:attribute`, a function as in
    `moored.training.algorithms`; null takes the algorithm's own."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount from token to token."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE lambda."""
    ddof: typing.Literal[0, 1] = 0
    """Std of a group in `grpo`: 0 divides by its size, 1 by one less, as TRL and verl do."""
    gamma_turn: float = Field(default=0.95, ge=0.0, le=1.0)
    """Discount from turn to turn, for `bilevel_gae`."""
    bootstrap_truncated: bool = True
    """GAE: an episode that a limit cut off goes on with the critic's value; false: it ends there,
    as where the limit of turns is part of the task."""
    clip_low: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1.0)
    """Bound on the loss of a negative advantage; null turns it off."""
    value_clip: float | None = Field(default=0.5, gt=0.0)
    """How far a value of the critic may move from its old one in an update; null: any."""
    aggregation: Aggregation | None = None
    """How token losses become one number; null takes the algorithm's own."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """0 turns KL off, and no reference model is loaded."""
    kl_estimator: typing.Literal["k2", "k3"] = "k3"
    """How KL to the reference model is estimated from one sample; k1 as a loss would have zero
    expected gradient."""
    old_logprobs: typing.Literal["sampler", "learner"] = "sampler"
    """Whose log-probabilities the ratio starts from: the sampler's own, or the learner's, computed
    once before the update, where the two engines differ too much."""
    importance_cap: float | None = Field(default=None, ge=1.0)
    """Weigh the loss of every token by learner over sampler, at most by this (truncated importance
    sampling); needs old_logprobs: learner. null: no weights."""
    entropy_coef: float = Field(default=0.001, ge=0.0)
    """Weight of the entropy bonus, a mean over tokens."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before max_response_tokens over which a reply loses up to 1 of its reward; 0: none."""

    @property
    def divides_by_std(self) -> bool:
        """Advantages are divided by the std of the group's rewards."""
        return (self.advantage or self.name) in DIVIDES_BY_STD

    @model_validator(mode="after")
    def _cap_needs_both_engines(self) -> AlgorithmConfig:
        if self.importance_cap is not None and self.old_logprobs != "learner":
            raise ValueError(
                "importance_cap does nothing with old_logprobs: sampler, which corrects for the "
                "sampler already; set algorithm.old_logprobs=learner, or leave the cap out"
            )
        return self


class FilterConfig(Section):
    """SNR-aware filtering; see `moored.algo.select_groups`."""

    score: typing.Annotated[str, AfterValidator(SCORES.check)] = "variance"
    """Registered name or `module:attribute`, a function as in `moored.algo.groups`."""
    reward: FilterReward = "task"
    """What is scored: `task` leaves out penalties for malformed replies, so that a group of
    failures is not kept because one of them was malformed too; `total` is all that was earned;
    `success` is the outcome, 1 or 0."""
    ddof: typing.Literal[0, 1] = 0
    """Variance of a group: 0 divides by its size, 1 by one less."""
    rule: typing.Annotated[str, AfterValidator(RULES.check)] = "top_p"
    """Registered name or `module:attribute`, a function as in `moored.algo.filters`."""
    value: float = 0.9
    """The number of the rule: of `top_p` a share of the total score, of others a fraction or count
    of groups; see docs/filtering.md."""
    eps: float = Field(default=0.0, ge=0.0)
    """Taken off the total that `top_p` has to reach; `nonzero` drops scores up to it."""
    largest: bool = True
    """Keep the groups that score highest; false keeps the lowest."""
    keep_zero: bool = False
    """Let groups that score 0 be kept."""
    action: FilterAction = "drop"
    """What happens to the groups that are not kept."""
    best_and_worst: int = Field(default=0, ge=0)
    """Train on this many of the best and as many of the worst trajectories of each kept group; 0
    trains on all. With `rule: none` this is the trajectory-level baseline."""
    loss_scale: LossScale = "none"
    """Scales the learning rates of a step by the kept fraction or its root; a factor on the loss
    would do nothing under AdamW."""
    max_empty_steps: int = Field(default=5, ge=1)
    """Steps in a row without a kept group after which the run stops."""
    max_refills: int = Field(default=4, ge=0)
    """Extra rounds of sampling under `refill`."""

    @model_validator(mode="after")
    def _value_fits_rule(self) -> FilterConfig:
        check_rule_value(self.rule, self.value)
        return self


class CollapseConfig(Section):
    """When and how input dependence is measured."""

    every: int = Field(default=5, ge=0)
    """Steps between measurements, the first step included; 0 turns them off."""
    num_pairs: int = Field(default=64, ge=2)
    """Reasonings per view and environment; at least one for every prompt."""
    num_prompts: int | None = Field(default=None, ge=2)
    """N of the first-turn view and of the swaps, per environment, fixed over a run; null
    takes rollout.num_groups, and of several environments what each has of them in every step."""
    bootstrap: int = Field(default=0, ge=0)
    """Draws for percentile intervals in the log; 0: none. Standard errors come without."""
    permutations: int = Field(default=999, ge=0)
    """Draws for the p-value that the verdict rests on: about 6 ms a view; 0 turns it off."""
    ema_decay: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Weight of the past in the running spread of the marginal, by which MI-ZScore-EMA divides."""
    views: list[
        typing.Literal[
            "first_turn", "observation_swap", "episode_swap", "trajectory", "positions", "chain"
        ]
    ] = Field(default=["first_turn", "observation_swap", "episode_swap", "trajectory"])
    """What is measured; verdict, regime and alarm follow episode swap in environments of several
    turns, the first turn in others."""


class GradientsConfig(Section):
    """When and how gradients are measured by reward variance; see docs/gradients.md."""

    every: int = Field(default=0, ge=0)
    """Steps between measurements, the first step included; 0 turns them off."""
    num_buckets: int = Field(default=6, ge=1)
    """Buckets of equal numbers of groups, by reward variance; at most one for each group."""
    params: typing.Literal["all", "lora", "last-block"] = "all"
    """Which weights: all that are trained, LoRA's, or those of the last block (cheap)."""


class EvaluationConfig(Section):
    """Success on validation tasks while training."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations, the last step included; 0 turns them off."""
    num_tasks: int = Field(default=512, ge=1)
    """The first tasks of the split."""
    num_samples: int = Field(default=1, ge=1)
    """Episodes of each task, for pass@k."""
    temperature: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)
    """0 takes the most likely token."""
    split: typing.Literal["train", "validation", "test"] = "validation"
    """Where the tasks come from."""


Threshold = tuple[
    typing.Annotated[float, Field(ge=0.0)],
    typing.Annotated[int, Field(ge=1)],
]


class StopConfig(Section):
    """When a run ends early."""

    low_variance: Threshold = (0.1, 10)
    """`[share, steps]`, or the share alone: stop when RV stays below this share of its mean over
    the first 10 steps, for so many steps in a row; 0: never."""
    min_success: Threshold = (0.01, 5)
    """`[rate, evaluations]`, or the rate alone: stop when validation success stays below it for so
    many evaluations in a row; 0: never."""
    alarm: bool = False
    """Stop when the collapse alarm goes off: MI fell far below what the run had held."""

    @field_validator("low_variance", "min_success", mode="before")
    @classmethod
    def _with_usual_patience(cls, value: object, info: ValidationInfo) -> object:
        is_alone = isinstance(value, int | float | str)
        return (value, cls.model_fields[str(info.field_name)].default[1]) if is_alone else value


class LogConfig(Section):
    """What is kept of a run besides its metrics, and where they are sent as well."""

    rollouts_every: int = Field(default=10, ge=0)
    """Steps between stored rollouts, the first step included; 0 stores none."""
    sinks: list[typing.Literal["wandb", "tensorboard", "trackio"]] = Field(default=[])
    """Each needs the extra of its name: `pip install 'moored[wandb]'`."""
    project: str = Field(default="moored", min_length=1)
    """Project of the run in W&B and trackio."""


class Options(Section):
    """Base of whole configurations."""

    command: typing.ClassVar[str]
    """The command that a run directory with such a `config.yaml` belongs to."""


OptionsT = typing.TypeVar("OptionsT", bound=Options)


class Config(Options):
    """One run."""

    command = "train"

    seed: int = Field(default=0, ge=0)
    """Everything random in the run follows from it."""
    num_steps: int = Field(default=400, ge=1)
    """Length of the run in training steps."""
    model: str = "nano"
    """`nano`, `mini`, `smollm2`, a folder, or a hub id."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints, from which a run can be resumed; the last step has one too."""
    keep_checkpoints: int = Field(default=2, ge=0)
    """How many of the newest are kept; more let you go back to before a collapse. 0: one, and none
    once all steps are done and the model is written."""
    profile: bool = False
    """Print seconds and token rates of each phase; write a Chrome trace of step 4 to trace.json."""
    env: list[EnvConfig] = Field(default=[EnvConfig(name="sokoban")], min_length=1)
    """What is played, several by weight; short: `env=sokoban`, `env=[sokoban, bandit]`."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    filter: FilterConfig = FilterConfig()
    collapse: CollapseConfig = CollapseConfig()
    gradients: GradientsConfig = GradientsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stop: StopConfig = StopConfig()
    log: LogConfig = LogConfig()

    @field_validator("env", mode="before")
    @classmethod
    def _expand_env(cls, value: object) -> object:
        return expand_env(value)

    @model_validator(mode="before")
    @classmethod
    def _follow_the_algorithm(cls, data: object) -> object:
        longest = RolloutConfig().max_response_tokens
        return with_algorithm_defaults(data, longest) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Config:
        if self.rollout.group_size > 1:
            return self
        remedy = "but rollout.group_size is 1; set it to 2 or more, or choose"
        if self.filter.rule != "none" and ":" not in self.filter.score:
            raise ValueError(
                f"filter.score = {self.filter.score} needs several trajectories of each prompt, "
                f"{remedy} filter.rule=none"
            )
        advantage = self.algorithm.advantage or self.algorithm.name
        if advantage in GROUP_BASELINES:
            raise ValueError(
                f"{advantage} compares the trajectories of a group, {remedy} algorithm.name=ppo or "
                f"reinforce_pp"
            )
        return self

    @model_validator(mode="after")
    def _lag_has_samplers(self) -> Config:
        kind = self.engine.kind
        if self.rollout.max_lag and kind != "ray" and ":" not in kind:
            raise ValueError(
                f"rollout.max_lag needs samplers with weights of their own, but engine {kind!r} "
                f"samples with the learner's; set engine.kind=ray, or rollout.max_lag=0"
            )
        return self

    @model_validator(mode="after")
    def _measured_weights_exist(self) -> Config:
        if (
            self.gradients.every
            and self.gradients.params == "lora"
            and not self.optimizer.lora_rank
        ):
            raise ValueError("gradients.params = lora needs optimizer.lora_rank above 0")
        return self

    @model_validator(mode="after")
    def _every_prompt_has_a_pair(self) -> Config:
        """Views with a fixed number of prompts, each of which is to have a reasoning."""
        collapse, fixed = self.collapse, {"first_turn", "observation_swap", "episode_swap"}
        num_prompts = collapse.num_prompts or self.rollout.num_groups
        is_short = collapse.num_pairs < num_prompts
        if collapse.every and is_short and fixed & set(collapse.views):
            option = "collapse.num_prompts" if collapse.num_prompts else "rollout.num_groups"
            raise ValueError(
                f"collapse.num_pairs = {collapse.num_pairs} leaves some of the {option} = "
                f"{num_prompts} prompts without a reasoning; set collapse.num_pairs to "
                f"{num_prompts} or more, or collapse.num_prompts to {collapse.num_pairs} or less"
            )
        return self


def expand_env(value: object) -> object:
    """`env: sokoban`, `env: {name: sokoban}` and `env: [sokoban, bandit]` are short forms."""
    items = value if isinstance(value, list) else [value]
    return [item if isinstance(item, Mapping | EnvConfig) else {"name": item} for item in items]


def load_config(
    source: str | Path | Mapping[str, object] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Build a `Config` from a YAML file or mapping (None: all defaults) and dotted overrides."""
    return load_options(Config, {} if source is None else source, overrides)


def load_options(
    kind: type[OptionsT], source: str | Path | Mapping[str, object], overrides: Sequence[str] = ()
) -> OptionsT:
    """Build a whole configuration of some kind from a YAML file or mapping and overrides."""
    data = dict(source) if isinstance(source, Mapping) else read_yaml(source)
    command = data.pop("command", _command_of(data, kind))
    if command != kind.command:
        given = "this configuration" if isinstance(source, Mapping) else repr(str(source))
        raise ConfigError(
            f"{given} belongs to a run of `moored {command}`, not of `moored {kind.command}`; the "
            f"model of that run is in the folder `model` beside its config.yaml"
        )
    defaults = kind.model_construct().model_dump(mode="json")
    for override in overrides:
        if "env" in data:
            data = {**data, "env": expand_env(data["env"])}
        data = set_option(data, override, defaults)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(kind, item) for item in error.errors())) from None


def _command_of(data: Mapping[str, object], kind: type[Options]) -> str:
    """Of a file that names none: `train`, whose files do not, where only that has its sections."""
    own = Config.model_fields.keys() - kind.model_fields.keys()
    return Config.command if len(own & data.keys()) > 1 else kind.command


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
