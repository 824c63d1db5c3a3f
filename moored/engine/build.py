"""From a configuration to a `Run`: model, sampler, learner, monitor and run directory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from moored.algo import check_filter
from moored.config import Config, load_config
from moored.diagnostics.monitor import CollapseMonitor
from moored.engine.base import Sampler, SamplingParams
from moored.engine.check import check_engine
from moored.engine.checkpoint import newest_checkpoint
from moored.engine.fast.decoder import can_decode
from moored.engine.fast.sampler import SlotSampler
from moored.engine.local.learner import LearnerOptions, LocalLearner
from moored.engine.local.sampler import LocalSampler
from moored.engine.local.state import load_weights
from moored.envs.base import Split
from moored.envs.mix import EnvMix
from moored.errors import MooredError
from moored.evaluate import Evaluation, evaluate
from moored.models.load import LoadedModel, load_model
from moored.rollout.render import Renderer
from moored.runlog.log import RunLog
from moored.runlog.sinks import require_sinks
from moored.train import Run
from moored.training.algorithms import Algorithm, load_algorithm
from moored.training.losses import LossOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build(config: Config, folder: Path, *, resume: bool = False) -> Run:
    """Assemble a run that trains in this process."""
    require_sinks(config.log.sinks)
    algorithm = load_algorithm(config.algorithm)
    check_filter(config.filter.score, config.filter.rule)
    device = pick_device(config.device)
    mix = EnvMix.parse([env.model_dump() for env in config.env])
    for env in mix.make():
        env.close()
    loaded = load_model(config.model, device)
    renderer = Renderer(loaded.tokenizer)
    bf16 = uses_bf16(config.dtype, device)
    learner = _learner(config, algorithm, loaded, bf16)
    monitor = CollapseMonitor(
        score=learner.score,
        views=config.collapse.views,
        num_pairs=config.collapse.num_pairs,
        num_prompts=config.collapse.num_prompts or config.rollout.num_groups,
        bootstrap=config.collapse.bootstrap,
        permutations=config.collapse.permutations,
        ema_decay=config.collapse.ema_decay,
        seed=config.seed,
    )
    sampler = make_sampler(
        learner.model, bf16=bf16, max_context=config.max_context, plain=config.plain
    )
    check_engine(
        learner.model,
        learner,
        sampler,
        temperature=config.rollout.temperature,
        max_context=config.max_context,
        bf16=bf16,
    )
    return Run(
        config=config,
        algorithm=algorithm,
        mix=mix,
        renderer=renderer,
        sampler=sampler,
        learner=learner,
        monitor=monitor,
        log=RunLog(folder, resume=resume),
    )


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MooredError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MooredError("device is cuda, but no GPU is visible; use device=cpu or auto")
    return device


def uses_bf16(dtype: str, device: torch.device) -> bool:
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")


def make_sampler(model: nn.Module, *, bf16: bool, max_context: int, plain: bool = False) -> Sampler:
    """A sampler for the learner's model: on slots where its shape is known, else on its own code.

    In bfloat16 either holds a copy of the weights, which stay float32 in the learner.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    if can_decode(model) and not plain:
        return SlotSampler(model, dtype=dtype, max_context=max_context)
    if not bf16:
        return LocalSampler(model)
    twin = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False)
    return LocalSampler(twin, shares_weights=False)


def add_lora(model: PreTrainedModel, config: Config) -> nn.Module:
    """The model as the run trains it: with LoRA layers, or as it is."""
    if not config.optimizer.lora_rank:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.optimizer.lora_rank,
        lora_alpha=config.optimizer.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return get_peft_model(model, lora)  # pyright: ignore[reportReturnType]


def _learner(config: Config, algorithm: Algorithm, loaded: LoadedModel, bf16: bool) -> LocalLearner:
    optimizer, loss = config.optimizer, config.algorithm
    if optimizer.gradient_checkpointing:
        loaded.model.gradient_checkpointing_enable()
    return LocalLearner(
        add_lora(loaded.model, config),
        LearnerOptions(
            lr=optimizer.lr,
            critic_lr=optimizer.critic_lr,
            weight_decay=optimizer.weight_decay,
            grad_clip=optimizer.grad_clip,
            micro_batch_tokens=optimizer.micro_batch_tokens,
            row_tokens=optimizer.row_tokens,
            temperature=config.rollout.temperature,
            bf16=bf16,
            compile=optimizer.compile,
            plain=config.plain,
        ),
        LossOptions(
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
            kl_coef=loss.kl_coef,
            kl_estimator=loss.kl_estimator,
            entropy_coef=loss.entropy_coef,
            sequence_ratio=algorithm.sequence_ratio,
            value_clip=loss.value_clip,
        ),
        with_critic=algorithm.needs_critic,
    )


def evaluate_source(
    source: str,
    mix: EnvMix | None,
    *,
    num_tasks: int,
    num_samples: int,
    temperature: float,
    max_tokens: int,
    split: Split,
    seed: int,
    on_replies: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a run directory (its newest checkpoint) or a model by name."""
    folder = Path(source)
    is_run = (folder / "config.yaml").is_file()
    config = load_config(folder / "config.yaml" if is_run else {"model": source})
    if mix is None and not is_run:
        raise MooredError("a model has no environment of its own; give --env, e.g. --env sokoban")
    mix = mix or EnvMix.parse([env.model_dump() for env in config.env])
    device = pick_device(config.device)
    loaded = load_model(config.model, device)
    model = add_lora(loaded.model, config)
    if is_run:
        load_weights(model, newest_checkpoint(folder) / "policy.safetensors")
    renderer = Renderer(loaded.tokenizer)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, stop_ids=renderer.stop_ids
    )
    return evaluate(
        mix,
        sampler=make_sampler(
            model,
            bf16=uses_bf16(config.dtype, device),
            max_context=config.max_context,
        ),
        renderer=renderer,
        params=params,
        max_context=config.max_context,
        num_tasks=num_tasks,
        num_samples=num_samples,
        split=split,
        seed=seed,
        on_replies=on_replies,
    )
