"""Runs of TRL on the embedded nano model, with completions that are fixed or sampled.

`several_processes` is what the processes of `test_trl.py` run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

ROOT = Path(__file__).parent.parent.parent
NANO = ROOT / "moored" / "models" / "nano"
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TWO_PROCESSES = {"KDK": ("grpo", "bnpo", "dr_grpo", "dapo"), "KD": ("grpo", "bnpo")}
"""Prompts -> losses that are run in two processes."""
GROUP = 4
WORDS = ("<think>go left</think>", "<think>go right and up</think>", "<think>wait")


@dataclass
class Run:
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    trainer: Any


class KeepGradients(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = kwargs["model"]
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters()})


def write_fixed(prompts, trainer):
    """Completions that depend on the prompt and the place in the group alone."""
    tokenizer = trainer.processing_class
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    prompt_ids = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    start = trainer.accelerator.process_index * len(prompts)
    completions = []
    for row, prompt in enumerate(prompts, start=start):
        rng = np.random.default_rng([len(prompt), row % GROUP])
        completions.append(rng.integers(10, 1000, 3 + 2 * (row % GROUP)).tolist())
    logprobs = [[0.0] * len(ids) for ids in completions]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}


def reward_length(completion_ids, differs, **_):
    """Completions of 3, 5, 7 and 9 tokens earn 0, 1, 0, 1 where rewards differ at all."""
    rows = zip(completion_ids, differs, strict=True)
    return [float(len(ids) // 2 % 2 == 0) if differ else 1.0 for ids, differ in rows]


OWN = {
    "group_filter",
    "loss_scale",
    "loss_mean",
    "max_empty_generations",
    "stop_when_empty",
    "collapse",
}
"""Parameters of `FilteredGRPOTrainer` that `GRPOTrainer` does not have."""
SETTINGS: dict[str, Any] = {
    "num_generations": GROUP,
    "max_completion_length": 16,
    "max_steps": 1,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.0,
    "shuffle_dataset": False,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 3,
}
"""What every run is told besides its folder and batch."""


def train(
    folder: Path,
    prompts: str,
    *,
    rows: int,
    accumulate: int = 1,
    perturb: bool = True,
    **options: Any,
) -> Run:
    """Train nano; `prompts` has a K for each prompt whose rewards differ and a D for the others."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from moored.integrations.trl import FilteredGRPOTrainer

    ours = {name: options.pop(name) for name in OWN & options.keys()}
    kind = options.pop("trainer", FilteredGRPOTrainer if ours else GRPOTrainer)
    reward = options.pop("reward", reward_length)
    rollout = options.pop("rollout", write_fixed)
    resume = options.pop("resume", None)
    used = [(index, kind) for index, kind in enumerate(prompts) if kind != "."]
    columns = {
        "prompt": ["go" + " left" * (index + 1) for index, _ in used],
        "differs": [kind == "K" for _, kind in used],
    }
    gradients = KeepGradients()
    settings = {
        **SETTINGS,
        "output_dir": str(folder),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulate,
    }
    trainer: Any = kind(
        model=str(NANO),
        reward_funcs=reward,
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_dict(columns),
        rollout_func=rollout,
        callbacks=[gradients],
        **ours,
    )
    if perturb:  # away from the reference model, where the gradient of KL is zero
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Run(gradients.steps, weights, trainer.state.log_history, trainer)


def with_regularisers(loss_type: str) -> dict[str, Any]:
    level = "sequence" if loss_type == "luspo" else "token"
    return {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.5,
        "entropy_coef": 0.5,
        "epsilon_high": 5.0 if loss_type == "cispo" else 0.2,
    }


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, in units of the largest entry of the second."""
    largest = max(float(x.abs().max()) for x in b.values())
    return max(float((a[name] - x).abs().max()) for name, x in b.items()) / largest


FILTER: dict[str, Any] = {"rule": "top_p", "value": 0.9}


def write_dialogues(prompts, trainer):
    """The same completions with two observation tokens in the middle."""
    found = write_fixed(prompts, trainer)
    found["completion_ids"] = [[*ids[:2], 7, 8, *ids[2:]] for ids in found["completion_ids"]]
    found["logprobs"] = [[0.0] * len(ids) for ids in found["completion_ids"]]
    found["env_mask"] = [[1, 1, 0, 0] + [1] * (len(ids) - 4) for ids in found["completion_ids"]]
    return found


def write_thoughts(prompts, trainer):
    """Replies with reasoning; every third one is cut off before its closing tag."""
    found = write_fixed(prompts, trainer)
    texts = [WORDS[row % len(WORDS)] for row in range(len(prompts))]
    found["completion_ids"] = [trainer.processing_class.encode(text) for text in texts]
    found["logprobs"] = [[0.0] * len(ids) for ids in found["completion_ids"]]
    return found


def several_processes() -> None:
    """What each of two processes runs; the first one saves the gradients in the folder."""
    folder = Path(sys.argv[1])
    from moored.integrations.trl import CollapseOptions

    for layout, loss_types in TWO_PROCESSES.items():
        for loss_type in loss_types:
            run = train(
                folder,
                layout,
                rows=GROUP * len(layout) // 2,
                group_filter=FILTER,
                collapse=CollapseOptions(think_tags=None),
                ddp_backend="gloo",
                **with_regularisers(loss_type),
            )
            if run.trainer.accelerator.is_main_process:
                torch.save((run.gradients, run.log), folder / f"{layout}_{loss_type}.pt")
