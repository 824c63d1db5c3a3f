"""The model card: what a model was made from, at what cost, and what it can do at the start."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import LlamaForCausalLM

from recipes.corpus import Corpus
from recipes.demonstrations import HARD_START, MIX, TaskSpec
from recipes.finetune import Training
from recipes.start_rates import StartRates

TEMPLATE = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True, slots=True)
class Making:
    """How a model was made: the command, and the wall time of its parts."""

    name: str
    command: str
    seed: int
    num_workers: int
    corpus_s: float
    total_s: float


def write_card(
    path: Path,
    making: Making,
    model: LlamaForCausalLM,
    corpus: Corpus,
    training: Training,
    rates: Sequence[StartRates],
) -> None:
    """Fill the template."""
    config = model.config
    text = TEMPLATE.read_text(encoding="utf-8").format(
        name=making.name,
        command=making.command,
        seed=making.seed,
        num_workers=making.num_workers,
        corpus_s=making.corpus_s,
        total_s=making.total_s,
        parameters=f"{model.num_parameters() / 1e6:.1f} M",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=str(model.dtype).removeprefix("torch."),
        num_dialogues=len(corpus.lengths),
        num_tokens=len(corpus.ids),
        target_share=corpus.is_target.mean(),
        train_s=training.train_s,
        num_steps=training.num_steps,
        batch_tokens=training.batch_tokens,
        tokens_per_s=training.tokens_per_s,
        loss=training.loss,
        hardware=hardware(model.device),
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        noise=HARD_START.noise,
        mix_table=mix_table(MIX),
        num_tasks=rates[0].num_tasks,
        rates_table=rates_table(rates),
    )
    path.write_text(text, encoding="utf-8")


def hardware(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def mix_table(mix: Sequence[TaskSpec]) -> str:
    """Share of every task, and of the kinds of reply in it."""
    lines = [
        "| environment | options | share | grounded | noised | plain |",
        "|---|---|---|---|---|---|",
    ]
    total = sum(spec.weight for spec in mix)
    for spec in mix:
        kinds = " | ".join(f"{share:.0%}" for share in spec.traces.shares.values())
        lines.append(
            f"| {spec.env} | {options_text(spec.options)} | {spec.weight / total:.0%} | {kinds} |"
        )
    return "\n".join(lines)


def rates_table(rates: Sequence[StartRates]) -> str:
    """Start rates, one environment per line."""
    lines = [
        "| environment | options | success | valid | states facts | prompt tokens | reply tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {rate.env} | {options_text(rate.options)} | {rate.success:.0%} | {rate.validity:.0%} "
        f"| {rate.grounded:.0%} | {rate.prompt_tokens:.0f} | {rate.reply_tokens:.0f} |"
        for rate in rates
    ]
    return "\n".join(lines)


def options_text(options: Mapping[str, object]) -> str:
    """`rows=5, cols=7`, or `default`."""
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "default"
