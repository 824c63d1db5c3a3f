"""One GRPO step, single turn: moored against TRL's GRPOTrainer without vLLM.

    python benchmarks/train_step.py [--model nano] [--device cpu] [--trl-micro-batch 128 32 8]

A step samples `--groups` x `--group-size` replies to the same Sokoban tasks, scores them with the
same environment, and updates the policy on all of them. Both sides have the same weights, prompts,
lengths, precision, loss and optimiser settings; replies are forced to `--reply-tokens` tokens, so
the work is the same. A moored step runs between any two steps of TRL. TRL has no logging, saving,
reference model or gradient checkpointing; of the micro-batch sizes its fastest counts. On a GPU
both keep float32 weights and compute in bfloat16; `--trl-bf16-weights` also tries TRL on bfloat16
weights, which costs precision that moored keeps.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from harness import (
    Timing,
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    show_machine,
    timed,
    timing_table,
    write_record,
)
from rich.console import Console
from trl_side import (
    ENV_OPTIONS,
    LEARNING_RATE,
    PromptRow,
    TrlVariant,
    has_trl,
    time_trl,
    trl_variants,
)

from moored.config import Config, load_config
from moored.envs.mix import make_env
from moored.rollout.render import Renderer
from moored.train import Run, _plan, build_run, train_step

WARM_UP = 2
"""Rounds before measuring; the first one's time is the start-up."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Timings of both sides, taken in turn."""

    variant: TrlVariant | None
    moored: Timing
    trl: Timing | None

    @property
    def name(self) -> str:
        return "moored alone" if self.variant is None else self.variant.name

    @property
    def speed_up(self) -> float | None:
        return None if self.trl is None else self.trl.median_s / self.moored.median_s

    def record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "moored": self.moored.record(),
            "trl": None if self.trl is None else self.trl.record(),
            "speed_up": self.speed_up,
        }


class MooredSide:
    """Steps of `moored train`, as its configuration builds them."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.run = build_run(make_config(arguments), folder)
        renderer = self.run.engine.renderer
        assert isinstance(renderer, Renderer)
        # Forced replies: no token ends one.
        renderer.stop_ids = ()
        self.timing = Timing()
        self._step = 0

    def step(self) -> int:
        """One training step; returns the number of tokens it sampled and trained on."""
        self._step += 1
        return int(train_step(self.run, self._step).metrics["tokens/trained"])

    def measure(self) -> None:
        seconds, tokens = timed(self.step, torch.device(self.run.config.engine.device))
        self.timing.add(seconds, tokens, self.run.seconds)


def make_config(arguments: argparse.Namespace) -> Config:
    """GRPO with only rollouts and updates in the step."""
    device, bf16 = device_of(arguments)
    settings: dict[str, object] = {
        "model": arguments.model,
        "engine": {"device": str(device), "dtype": "bfloat16" if bf16 else "float32"},
        "env": {"name": "sokoban", "options": ENV_OPTIONS},
        "rollout": {
            "num_groups": arguments.groups,
            "group_size": arguments.group_size,
            "max_response_tokens": arguments.reply_tokens,
        },
        "algorithm": {
            "name": "grpo",
            "clip_high": 0.2,
            "dual_clip": None,
            "entropy_coef": 0.0,
            "kl_coef": 0.0,
        },
        "optimizer": {
            "lr": LEARNING_RATE,
            "num_minibatches": 1,
            "num_epochs": arguments.iterations,
        },
        "filter": {"rule": "none"},
        "collapse": {"every": 0},
        "log": {"rollouts_every": 0},
    }
    return load_config(settings, arguments.set)


def prompt_rows(run: Run, num_steps: int) -> list[PromptRow]:
    """The tasks of moored's first steps, in order."""
    env, rows = make_env("sokoban", **ENV_OPTIONS), []
    for step in range(1, num_steps + 1):
        for task in _plan(run, step, 0, run.config.rollout.num_groups):
            rows.append(PromptRow(env.reset(task.task_seed), task.task_seed))
    return rows


def compare(arguments: argparse.Namespace, console: Console) -> list[Pair]:
    """Time every variant of TRL in turn with moored; without TRL, moored alone."""
    variants = trl_variants(arguments) if has_trl(console) else []
    num_rounds = WARM_UP + arguments.repeats
    with tempfile.TemporaryDirectory() as folder:
        moored = MooredSide(arguments, Path(folder))
        moored.measure()
        start_up_s = moored.timing.seconds[0]
        rows = prompt_rows(moored.run, num_rounds)
        pairs = []
        for variant in variants or [None]:
            moored.timing = Timing()
            trl = None
            if variant is None:
                for _ in range(num_rounds):
                    moored.measure()
            else:
                trl = time_trl(variant, rows, arguments, moored.measure).after(WARM_UP)
            timing = moored.timing.after(WARM_UP)
            timing.start_up_s = start_up_s
            pairs.append(Pair(variant, timing, trl))
            gc.collect()
        moored.run.close()
    return pairs


def fastest_rival(pairs: Sequence[Pair]) -> Pair:
    """The pair of TRL's fastest variant with weights as precise as moored's."""
    equals = [pair for pair in pairs if pair.variant is None or not pair.variant.bf16_weights]
    return min(equals, key=lambda pair: (pair.trl or pair.moored).median_s)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One GRPO step against TRL.")
    parser.add_argument("--model", default="nano", help="nano, mini, a folder or a hub id")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=1, help="updates on each batch")
    parser.add_argument("--trl-micro-batch", type=int, nargs="*", help="sizes to try; all at once")
    parser.add_argument("--trl-bf16-weights", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="moored options")
    add_common_options(parser, repeats=5)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    device, bf16 = device_of(arguments)
    machine = describe_machine(device, bf16=bf16)
    console = make_console()
    pairs = compare(arguments, console)
    best = fastest_rival(pairs)
    rivals = {pair.name: pair.trl for pair in pairs if pair.trl is not None}
    speed_ups = {pair.name: pair.speed_up for pair in pairs if pair.speed_up is not None}
    timings = {"moored": best.moored, **rivals}
    title = f"{arguments.model}, {arguments.groups} x {arguments.group_size} replies of "
    console.print(timing_table(f"{title}{arguments.reply_tokens} tokens", timings, speed_ups))
    for name, timing in timings.items():
        parts = (f"{phase} {median(s):.3f}" for phase, s in timing.phases.items())
        console.print(f"{name}: {', '.join(parts)} s", highlight=False)
    if best.speed_up is not None:
        console.print(f"moored is {best.speed_up:.2f} times as fast as {best.name}")
    show_machine(console, machine)
    figures = {"speed_up": best.speed_up, "pairs": [pair.record() for pair in pairs]}
    write_record(arguments.out, machine, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
