"""All options of a warm start: name, default and meaning of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import Field, field_validator, model_validator

from moored.config import Config, EnvConfig, Options, expand_env, load_config, load_options
from moored.config_engine import EngineConfig, Section, UpdateConfig
from moored.errors import ConfigError, MooredError
from moored.models.lengths import exact_limit, usual_length
from moored.models.rates import SMALL_MODEL_PARAMETERS, count_parameters
from moored.models.shapes import description_of, shape_of
from moored.names import Schedule

USUAL_CONTEXT = 2048
USUAL_REPLY = 400
MOST_BATCH_TOKENS = 2**24
"""Llama 3 405B was pretrained on so many at a time. More are taken for a mistake: oracles play as
many dialogues as are asked for, and the first step would not end."""
LARGE_MODEL_PARAMETERS = 1_000_000_000
LORA_FACTOR = 10.0
"""Adapters start at zero and have few weights: they need larger steps than the whole model."""


class DemonstrationConfig(Section):
    """Which replies the oracle's episodes are written with; see docs/sft.md."""

    grounded: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of episodes whose reasoning states facts of the observation, where the environment has
    `reasoning`; the others are stock phrases and guesses, where it has `guess`."""
    noised: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the grounded episodes whose answers are spoilt."""
    noise: float = Field(default=0.3, ge=0.0, le=1.0)
    """Chance that an action of a spoilt answer is replaced by a random one."""


class SftEnvConfig(EnvConfig):
    """One environment of the mix, and how its episodes are written."""

    demonstrations: DemonstrationConfig | None = None
    """Kinds of replies in this environment; null: as in the section `demonstrations`."""


class SftOptimizerConfig(UpdateConfig):
    """How the weights are updated."""

    lr: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """null: by the size of the model, 1e-3 below 50 million parameters, 1e-4 below a billion, else
    1e-5; ten times as much for LoRA, up to 1e-3. A hub id outside the table of docs/plan.md counts
    as large."""
    schedule: Schedule = "cosine"
    """How the learning rate falls from the end of the warm-up to the last step."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps over which the learning rate rises to its value."""
    min_lr_ratio: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the learning rate that `linear` and `cosine` fall towards."""


class SftEvaluationConfig(Section):
    """What is measured before the first step and after the last."""

    every: int = Field(default=0, ge=0)
    """Steps between further measurements; 0: none."""
    num_dialogues: int = Field(default=64, ge=0)
    """Dialogues for the held-out loss: of validation tasks, or a tenth of the file at most; 0 turns
    it off."""
    num_tasks: int = Field(default=64, ge=0)
    """Validation tasks for validity and success, one episode each; 0 turns them off."""
    temperature: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)
    """Of these episodes; 0 takes the most likely token."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Longest reply in these episodes; null: 400, or half of max_context where that is less."""


class SftConfig(Options):
    """One warm start."""

    command = "sft"

    seed: int = Field(default=0, ge=0)
    """Everything random follows from it."""
    num_steps: int = Field(default=200, ge=1)
    """Optimiser steps."""
    model: str = "nano"
    """`nano`, `mini`, `smollm2`, a folder, or a hub id."""
    env: list[SftEnvConfig] = Field(default=[])
    """What is demonstrated, several by weight; with `dialogues`, what the model is tried on."""
    dialogues: str | None = None
    """JSON lines of dialogues to learn from instead of the oracles' episodes."""
    batch_tokens: int = Field(default=8192, ge=1, le=MOST_BATCH_TOKENS)
    """Tokens of a step, prompts included: as many whole dialogues as fit, at least one."""
    max_context: int | None = Field(default=None, ge=16)
    """Longest dialogue in tokens; a longer one is cut after the last reply that fits. null: 2,048,
    or what the model can read, or its layers look back, if that is less."""
    workers: int | None = Field(default=None, ge=0, le=256)
    """Processes that play and render dialogues ahead of the updates, each with environments, or
    the file, of its own; 0: none, each step makes its own; null: on a GPU up to 4, but fewer than
    the cores; on a CPU none. An engine given as 'module:attribute' has none."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints; the last step has one too."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    engine: EngineConfig = EngineConfig()

    @field_validator("env", mode="before")
    @classmethod
    def _expand_env(cls, value: object) -> object:
        return expand_env(value)

    @model_validator(mode="after")
    def _has_something_to_learn(self) -> SftConfig:
        if not self.env and self.dialogues is None:
            raise ValueError("there is nothing to learn from; give env=NAME or dialogues=FILE")
        if self.engine.kind == "endpoint":
            raise ValueError("an endpoint cannot be trained; leave engine.kind at local")
        return self


def load_sft_config(
    source: str | Path | Mapping[str, object], overrides: Sequence[str] = ()
) -> SftConfig:
    """Build an `SftConfig` from a YAML file or mapping and dotted overrides."""
    return load_options(SftConfig, source, overrides)


def dump_sft_config(config: SftConfig) -> str:
    """The configuration as YAML; its first key keeps other commands from reading it as theirs."""
    data = {"command": config.command, **config.model_dump(mode="json")}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def settle(config: SftConfig) -> SftConfig:
    """The configuration with numbers for what follows the model; reads no weights."""
    described = description_of(config.model)
    limit = exact_limit(described)
    if limit is not None and (config.max_context or 0) > limit:
        raise ConfigError(
            f"max_context = {config.max_context} is longer than the {limit} tokens that model "
            f"{config.model!r} was made for, or that its layers look back; set it to {limit} or "
            f"less"
        )
    context = config.max_context or min(USUAL_CONTEXT, usual_length(described) or USUAL_CONTEXT)
    reply = config.evaluation.max_response_tokens or min(USUAL_REPLY, context // 2)
    if reply >= context and config.env and config.evaluation.num_tasks:
        raise ConfigError(
            f"evaluation.max_response_tokens = {reply} leaves no room for a prompt in max_context "
            f"= {context}; lower it, or raise max_context"
        )
    settled = {
        "max_context": context,
        "optimizer": config.optimizer.model_copy(update={"lr": learning_rate(config)}),
        "evaluation": config.evaluation.model_copy(update={"max_response_tokens": reply}),
    }
    return config.model_copy(update=settled)


def learning_rate(config: SftConfig) -> float:
    """The rate that is set, or one for the size of the model; an unknown size counts as large."""
    if config.optimizer.lr is not None:
        return config.optimizer.lr
    size = _num_parameters(config.model) or LARGE_MODEL_PARAMETERS
    lr = 1e-5
    if size < LARGE_MODEL_PARAMETERS:
        lr = 1e-3 if size < SMALL_MODEL_PARAMETERS else 1e-4
    return min(1e-3, LORA_FACTOR * lr) if config.optimizer.lora_rank else lr


def _num_parameters(model: str) -> int | None:
    """By its weights, else by the shape that a config.json here or the table of hub ids tells."""
    count = count_parameters(model)
    if count is not None:
        return count
    try:
        return shape_of(model).num_parameters
    except MooredError:
        return None


def engine_config(config: SftConfig) -> Config:
    """What the engine and the evaluation read, from settled options."""
    evaluation, optimizer = config.evaluation, config.optimizer
    data: dict[str, object] = {
        "seed": config.seed,
        "num_steps": config.num_steps,
        "model": config.model,
        "rollout": {
            "max_context": config.max_context,
            "max_response_tokens": evaluation.max_response_tokens,
        },
        "algorithm": {"name": "moored.sft.samples:IMITATION", "entropy_coef": 0.0, "kl_coef": 0.0},
        "optimizer": optimizer.model_dump(),
        "engine": config.engine.model_dump(),
        "evaluation": {
            "num_tasks": max(1, evaluation.num_tasks),
            "temperature": evaluation.temperature,
        },
    }
    if config.env:
        data["env"] = [spec.model_dump(exclude={"demonstrations"}) for spec in config.env]
    return load_config(data)
