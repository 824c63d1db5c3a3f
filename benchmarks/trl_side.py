"""TRL's half of `train_step.py`: GRPOTrainer at its fastest for the job, on the clock."""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness import Timing, device_of, synchronize
from rich.console import Console
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from transformers.utils import logging

from moored.envs.mix import make_env
from moored.errors import MooredError
from moored.models.load import load_model
from moored.types import Message

ENV_OPTIONS: dict[str, object] = {"max_turns": 1, "max_actions_per_turn": 10}
LEARNING_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class TrlVariant:
    """One way to run TRL."""

    micro_batch: int
    bf16_weights: bool = False

    @property
    def name(self) -> str:
        return f"TRL, micro-batch {self.micro_batch}" + ", bf16 weights" * self.bf16_weights


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One task as TRL takes it."""

    messages: list[Message]
    task_seed: int


def trl_variants(arguments: argparse.Namespace) -> list[TrlVariant]:
    batch = arguments.groups * arguments.group_size
    sizes = arguments.trl_micro_batch or [batch]
    for size in sizes:
        if batch % size:
            raise MooredError(f"--trl-micro-batch must divide the {batch} replies, got {size}")
    precisions = (False, True) if arguments.trl_bf16_weights else (False,)
    return [TrlVariant(size, bf16) for bf16 in precisions for size in sizes]


def has_trl(console: Console) -> bool:
    try:
        for name in ("trl", "datasets", "accelerate"):
            importlib.import_module(name)
    except ImportError as error:
        hint = f"Without TRL: {error}; pip install 'moored[trl]' to compare."
        console.print(hint, markup=False)
        return False
    return True


class TurnAbout(TrainerCallback):
    """Times TRL's steps and runs something else between them, off the clock."""

    def __init__(
        self, updates_per_round: int, device: torch.device, between: Callable[[], None]
    ) -> None:
        self.timing = Timing()
        self.num_tokens = 0
        self._updates_per_round = updates_per_round
        self._device = device
        self._between = between
        self._rollout_s = 0.0
        self._start = 0.0

    def scored(self, num_tokens: int) -> None:
        """Replies are sampled and scored; the rest of the round is the update."""
        synchronize(self._device)
        self._rollout_s = time.perf_counter() - self._start
        self.num_tokens = num_tokens

    def on_train_begin(self, args, state, control, **_: object) -> None:
        self._begin()

    def on_step_end(self, args, state, control, **_: object) -> None:
        if state.global_step % self._updates_per_round:
            return
        synchronize(self._device)
        seconds = time.perf_counter() - self._start
        phases = {"rollout": self._rollout_s, "update": seconds - self._rollout_s}
        self.timing.add(seconds, self.num_tokens, phases)
        self._between()
        self._begin()

    def _begin(self) -> None:
        synchronize(self._device)
        self._start = time.perf_counter()


def time_trl(
    variant: TrlVariant,
    rows: Sequence[PromptRow],
    arguments: argparse.Namespace,
    between: Callable[[], None],
) -> Timing:
    """Seconds of TRL's rounds, one for every `--groups` rows."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    logging.set_verbosity_error()
    device, _ = device_of(arguments)
    loaded = load_model(arguments.model, device)
    if variant.bf16_weights:
        loaded.model.bfloat16()
    clock = TurnAbout(arguments.iterations, device, between)
    chats = [[{"role": m.role, "content": m.content} for m in row.messages] for row in rows]
    dataset = Dataset.from_dict({"prompt": chats, "task_seed": [row.task_seed for row in rows]})
    never = loaded.model.config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=loaded.model,
            processing_class=loaded.tokenizer,
            reward_funcs=_make_reward(clock),
            args=_trl_settings(variant, arguments, folder, len(rows) // arguments.groups, never),
            train_dataset=dataset,
            callbacks=[clock],
        )
        # Forced replies: an id beyond the vocabulary ends them.
        trainer.eos_token_ids = [never]
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    expected = arguments.groups * arguments.group_size * arguments.reply_tokens
    assert clock.num_tokens == expected, f"TRL wrote {clock.num_tokens} tokens, not {expected}"
    return clock.timing


def _trl_settings(
    variant: TrlVariant, arguments: argparse.Namespace, folder: str, num_rounds: int, never: int
):
    """TRL at its fastest for this job."""
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]

    device, bf16 = device_of(arguments)
    batch = arguments.groups * arguments.group_size
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=variant.micro_batch,
        gradient_accumulation_steps=batch // variant.micro_batch,
        num_generations=arguments.group_size,
        num_iterations=arguments.iterations,
        max_steps=num_rounds * arguments.iterations,
        max_completion_length=arguments.reply_tokens,
        generation_kwargs={"eos_token_id": never},
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=bf16,
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _make_reward(clock: TurnAbout) -> Callable[..., list[float | None]]:
    env = make_env("sokoban", **ENV_OPTIONS)

    def reward(
        completions: list[list[dict[str, str]]],
        completion_ids: list[list[int]],
        task_seed: list[int],
        **_: object,
    ) -> list[float | None]:
        found: list[float | None] = []
        for completion, seed in zip(completions, task_seed, strict=True):
            env.reset(seed)
            found.append(env.step(completion[0]["content"]).reward)
        clock.scored(sum(map(len, completion_ids)))
        return found

    return reward
