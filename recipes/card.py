"""Try a finished model and write its card next to the weights.

    python recipes/card.py nano runs/nano --out moored/models/nano

The run is that of `moored sft`: its log says what was learnt and for how long.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import yaml

from moored.config import EnvConfig, load_config
from moored.engine.build import build_engine
from moored.envs.mix import EnvMix
from moored.evaluate import Evaluation, evaluate
from moored.runlog.log import read_records
from moored.runlog.machine import describe_machine, installed_versions
from moored.sft.demonstrations import TraceMix
from moored.sft.options import SftConfig, load_sft_config

TEMPLATE = Path(__file__).with_name("model_card.md")
LAST_STEPS = 100
"""Steps over which the loss of the card is averaged."""
ONE_TURN: Mapping[str, object] = {"max_turns": 1, "max_actions_per_turn": 10}
START_TASKS: tuple[EnvConfig, ...] = (
    EnvConfig(name="sokoban", options=dict(ONE_TURN)),
    EnvConfig(name="frozen_lake", options=dict(ONE_TURN)),
    EnvConfig(name="countdown"),
    EnvConfig(name="bandit"),
    EnvConfig(name="metamath", options={"level": 1, "max_turns": 1}),
)
"""What a finished model is tried on: the one-turn form of each environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a run of `moored sft` learnt from, and what that cost."""

    num_steps: int
    num_dialogues: int
    num_tokens: int
    target_share: float
    loss: float
    """Nats per reply token."""
    held_out_loss: float
    train_s: float
    tokens_per_s: float


def read_run(run: Path) -> Learnt:
    """Add up the log of a run."""
    steps = [record for record in read_records(run) if "train/loss" in record]
    seconds = [record["step_s"] for record in read_records(run, "timing")]

    def total(name: str) -> float:
        return sum(float(str(record[f"train/{name}"])) for record in steps)

    num_tokens, train_s = total("num_tokens"), sum(float(str(s)) for s in seconds)
    return Learnt(
        num_steps=len(steps),
        num_dialogues=int(total("num_dialogues")),
        num_tokens=int(num_tokens),
        target_share=total("num_reply_tokens") / num_tokens,
        loss=fmean(float(str(record["train/loss"])) for record in steps[-LAST_STEPS:]),
        held_out_loss=float(str(steps[-1]["evaluation/loss"])),
        train_s=train_s,
        tokens_per_s=num_tokens / train_s,
    )


def measure_start(model: Path, *, num_tasks: int, seed: int) -> list[Evaluation]:
    """Try the model on validation tasks, one sample each at temperature 1."""
    config = load_config(
        {
            "model": str(model),
            "seed": seed,
            "evaluation": {"num_tasks": num_tasks, "temperature": 1.0},
            "rollout": {"max_response_tokens": 128, "max_context": 2048},
        }
    )
    with closing(build_engine(config, trains=False)) as engine:
        return [evaluate(engine, EnvMix([task]), config) for task in START_TASKS]


def card_text(
    name: str, run: Path, config: SftConfig, learnt: Learnt, rates: Sequence[Evaluation]
) -> str:
    """The template filled in."""
    shape = yaml.safe_load((run / "model" / "config.json").read_text(encoding="utf-8"))
    machine = describe_machine()
    return TEMPLATE.read_text(encoding="utf-8").format(
        name=name,
        seed=config.seed,
        lr=config.optimizer.lr,
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        num_heads=shape["num_attention_heads"],
        vocab_size=shape["vocab_size"],
        max_positions=shape["max_position_embeddings"],
        dtype=shape["dtype"],
        learnt=learnt,
        batch_tokens=config.batch_tokens,
        hardware=f"{machine['cpu']}, {machine['cores']} cores",
        versions=", ".join(f"{key} {value}" for key, value in installed_versions().items()),
        noise=config.demonstrations.noise,
        mix_table=mix_table(config),
        num_tasks=rates[0].num_tasks,
        rates_table=rates_table(rates),
    )


def mix_table(config: SftConfig) -> str:
    """Share of every task, and of the kinds of reply in it."""
    lines = [
        "| environment | options | share | grounded | noised | plain |",
        "|---|---|---|---|---|---|",
    ]
    total = sum(spec.weight for spec in config.env)
    for spec in config.env:
        given = spec.demonstrations or config.demonstrations
        shares = TraceMix(given.grounded, given.noised).shares
        kinds = " | ".join(f"{share:.0%}" for share in shares.values())
        share = f"{spec.weight / total:.0%}"
        lines.append(f"| {spec.name} | {options_text(spec.options)} | {share} | {kinds} |")
    return "\n".join(lines)


def rates_table(rates: Sequence[Evaluation]) -> str:
    """Start rates, one environment per line."""
    lines = [
        "| environment | options | success | valid | reply tokens |",
        "|---|---|---|---|---|",
    ]
    for task, rate in zip(START_TASKS, rates, strict=True):
        lines.append(
            f"| {task.name} | {options_text(task.options)} | {rate.success_rate:.0%} "
            f"| {rate.validity_rate:.0%} | {rate.mean_reply_tokens:.0f} |"
        )
    return "\n".join(lines)


def options_text(options: Mapping[str, object]) -> str:
    """`rows=5, cols=7`, or `default`."""
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "default"


def main() -> None:
    parser = argparse.ArgumentParser(description="Try a model of `moored sft`, write its card.")
    parser.add_argument("name")
    parser.add_argument("run", type=Path, help="run directory of moored sft")
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--tasks", type=int, default=128, help="tasks of each environment")
    options = parser.parse_args()
    config = load_sft_config(options.run / "config.yaml")
    rates = measure_start(options.run / "model", num_tasks=options.tasks, seed=config.seed)
    text = card_text(options.name, options.run, config, read_run(options.run), rates)
    shutil.copytree(options.run / "model", options.out, dirs_exist_ok=True)
    # Weights are written readable only by their owner; a package is for everybody.
    (options.out / "model.safetensors").chmod(0o644)
    (options.out / "README.md").write_text(text, encoding="utf-8")
    print(rates_table(rates))


if __name__ == "__main__":
    main()
