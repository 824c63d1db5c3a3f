"""What a look at collapse costs inside TRL's `GRPOTrainer`.

    python benchmarks/trl_collapse.py [--model nano] [--groups 4] [--group-size 8] [--out FILE]

Scores the same pairs in two ways: each prompt computed once, and prompt and reasoning as a whole
row for each pair, as TRL computes log-probabilities. Then trains with a look at every step, and
sets its seconds against those of the rest of the step. Replies have a fixed number of tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import (
    add_common_options,
    describe_machine,
    device_of,
    interleave,
    make_console,
    show_machine,
    timing_table,
    write_record,
)
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from transformers.utils import logging

from moored.models.load import load_model
from moored.types import Prompt, ScoreRequest

WARM_UP = 1


class StepTimes(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []

    def on_step_begin(self, args, state, control, **_: object) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **_: object) -> None:
        self.steps_s.append(time.perf_counter() - self._start)


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Collapse metrics inside TRL.")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each run")
    add_common_options(parser, repeats=3)
    return parser.parse_args(words)


def build_trainer(given: argparse.Namespace, folder: str) -> Any:
    """A trainer on replies of fixed length that measures collapse at every step."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]

    from moored.integrations.trl import CollapseOptions, FilteredGRPOTrainer

    device, bf16 = device_of(given)
    loaded = load_model(given.model, device)
    never, num_prompts = loaded.model.config.vocab_size, given.groups
    rng = np.random.default_rng(0)
    words = [
        loaded.tokenizer.decode(rng.integers(10, 1000, given.prompt_tokens).tolist())
        for _ in range(num_prompts * (given.steps + WARM_UP))
    ]
    trainer = FilteredGRPOTrainer(
        model=loaded.model,
        processing_class=loaded.tokenizer,
        reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=num_prompts * given.group_size,
            num_generations=given.group_size,
            max_completion_length=given.reply_tokens,
            generation_kwargs={"eos_token_id": never},
            max_steps=given.steps + WARM_UP,
            gradient_checkpointing=False,
            bf16=bf16,
            use_cpu=device.type == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": words}),
        group_filter={"rule": "none"},
        collapse=CollapseOptions(every=1, think_tags=None, num_prompts=num_prompts),
    )
    trainer.eos_token_ids = [never]
    trainer.remove_callback(PrinterCallback)
    return trainer


def step_and_look_s(given: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a step without its look, and of the look."""
    clock = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(given, folder)
        trainer.add_callback(clock)
        trainer.train()
    logged = trainer.state.log_history
    looks_s = np.array([row["collapse/measure_s"] for row in logged if "loss" in row])
    rest_s = np.array(clock.steps_s) - looks_s
    return float(np.median(rest_s[WARM_UP:])), float(np.median(looks_s[WARM_UP:]))


@torch.no_grad()
def whole_rows(trainer: Any, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
    """Prompt and reasoning again for each pair, by TRL's own function."""
    found = []
    for request in requests:
        width = max(map(len, request.continuations))
        prompt = np.tile(request.prompt.ids, (len(request.continuations), 1))
        ids = torch.from_numpy(np.hstack([prompt, np.stack(request.continuations)]))
        ids = ids.to(trainer.accelerator.device)
        scored = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            *(ids, torch.ones_like(ids), width),
            batch_size=trainer.args.per_device_train_batch_size,
        )[0]
        found.append(scored.float().cpu().numpy())
    return found


def time_scoring(given: argparse.Namespace):
    """Both ways on the same requests: timings, and the largest difference of a log-prob."""
    device, _ = device_of(given)
    rng = np.random.default_rng(1)
    num_rows = given.groups * given.group_size
    rows = list(rng.integers(10, 1000, (num_rows, given.reply_tokens)))
    prompts = rng.integers(10, 1000, (given.groups, given.prompt_tokens))
    requests = [ScoreRequest(Prompt(ids), rows) for ids in prompts]
    found: dict[str, Any] = {}

    def run(name: str, score: Callable[[Sequence[ScoreRequest]], Any]) -> int:
        found[name] = score(requests)
        return num_rows * given.reply_tokens * given.groups

    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(given, folder)
        trainer.model.eval()
        ways = {"once": trainer.score, "whole rows": partial(whole_rows, trainer)}
        timings = interleave(
            {name: partial(run, name, score) for name, score in ways.items()}, given.repeats, device
        )
    both = [np.array(found[name]) for name in ways]
    return timings, float(np.abs(both[0] - both[1]).max())


def main(words: Sequence[str] | None = None) -> int:
    given = parse_arguments(words)
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.set_verbosity_error()
    device, bf16 = device_of(given)
    machine, console = describe_machine(device, bf16=bf16), make_console()
    timings, difference = time_scoring(given)
    ratio = timings["whole rows"].median_s / timings["once"].median_s
    title = f"{given.model}: {given.groups} prompts x {given.groups * given.group_size} reasonings"
    console.print(timing_table(title, timings, {"whole rows": ratio}))
    console.print(f"largest difference of a token's log-probability: {difference:.2g} nats")
    step_s, look_s = step_and_look_s(given)
    before_s = look_s * ratio
    console.print(
        f"a step takes {step_s:.2f} s; a look takes {look_s:.2f} s, which adds "
        f"{look_s / step_s:.0%} at every step and {look_s / step_s / 5:.0%} at every fifth"
    )
    console.print(f"whole rows: {before_s / step_s:.0%} and {before_s / step_s / 5:.0%}")
    show_machine(console, machine)
    figures = {name: timing.record() for name, timing in timings.items()}
    numbers = {"difference": difference, "step_s": step_s, "look_s": look_s}
    write_record(given.out, machine, {"speed_up": ratio, **numbers, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
