"""Do the fast and the plain engine compute the same? Log-probabilities and gradients, each against
float32.

    python benchmarks/agreement.py sokoban grpo model=smollm2 rollout.num_groups=4 [--out FILE]
    python benchmarks/agreement.py sokoban grpo model=FOLDER --rounds 3

moored's sampler plays the episodes of a step. Then three learners with the same weights score what
it wrote and compute the gradients of one update: moored's own, the model's own code in the same
precision (`engine.learner=plain`), and the latter in float32, which counts as exact; a run in
float32 has the first and the last alone. Advantages are drawn from a normal distribution, so that
every token has a gradient, whatever was rewarded.

In bfloat16 both are off. What matters is that moored's learner is no further off than the other:
`off` is the mean and the largest difference of a log-probability from the exact one in nats, and
for gradients the length of the difference over the length of the exact gradient. `--rounds` does
it for so many steps (other tasks and replies, same weights) and shows each.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table

from moored.cli.options import read_config
from moored.config import Config
from moored.engine.device import pick_device, uses_bf16
from moored.engine.local.learner import LocalLearner
from moored.models.load import load_model
from moored.train import build_run
from moored.training.samples import LossSample, Sample, build_samples, token_weights
from moored.types import ScoreRequest

UNCHANGED = ["optimizer.grad_clip=1e9", "optimizer.lora_rank=0", "engine.sampler=auto"]
"""Gradients are compared as they are, of all weights."""
MOORED, PLAIN, EXACT = "moored's learner", "the model's own code", "float32"
SIDES = {
    MOORED: ["engine.learner=auto"],
    PLAIN: ["engine.learner=plain"],
    EXACT: ["engine.learner=plain", "engine.dtype=float32"],
}
Figures = dict[str, Any]


class Reader(LocalLearner):
    """Keeps the gradients of an update on the host instead of applying them."""

    found: list[torch.Tensor]

    def _take_in(self, lr_factor: float | None) -> None:
        # Sums over the minibatch; a copy, since recorded passes write to the same place again.
        self.found = [each.detach().float().cpu() for each in self._trained[0].gradients()]
        super()._take_in(None)


def play(words: Sequence[str], rounds: int) -> list[list[Sample]]:
    """What moored's sampler writes in the first steps of a run, with its log-probabilities."""
    config = read_config([*words, *UNCHANGED, "collapse.every=0", f"num_steps={rounds}"])
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(config, Path(folder) / "run")
        try:
            return [build_samples(run.ahead.take(step)) for step in range(1, rounds + 1)]
        finally:
            run.close()


def loss_samples(samples: Sequence[Sample], config: Config, seed: int) -> list[LossSample]:
    """An update on all of them, with advantages that are drawn for each trajectory."""
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=max(sample.trajectory for sample in samples) + 1)
    longest = config.rollout.max_response_tokens
    weights = token_weights(samples, "token_mean", max_length=longest)
    return [
        LossSample(
            sample=sample,
            advantages_T=np.where(sample.loss_mask_T, advantages[sample.trajectory], 0.0),
            weights_T=share_T,
            mean_weights_T=share_T,
        )
        for sample, share_T in zip(samples, weights, strict=True)
    ]


def compute(config: Config, rounds: Sequence[Sequence[Sample]]) -> list[Figures]:
    """Log-probabilities of the sampled tokens, and gradients, of each round."""
    device = pick_device(config.engine.device)
    exact = not uses_bf16(config.engine.dtype, device)
    learner = Reader(load_model(config.model, device, exact=exact).model, config)
    found = []
    for seed, samples in enumerate(rounds):
        scored = learner.score([ScoreRequest(s.prompt, [s.ids_T], [s.images]) for s in samples])
        own = [logp[s.loss_mask_T] for s, (logp,) in zip(samples, scored, strict=True)]
        stats = next(learner.step([loss_samples(samples, config, seed)]))
        if not np.isfinite(list(stats.values())).all():
            raise SystemExit(f"an update is not finite: {stats}")
        found.append({"logp": np.concatenate(own), "gradients": learner.found})
    return found


def difference(own: Figures, exact: Figures) -> Figures:
    """How far a side is off: nats per token, and lengths of gradients over that of the exact."""
    gaps = np.abs(own["logp"] - exact["logp"])
    found = {"logp_mean": float(gaps.mean()), "logp_max": float(gaps.max())}
    if "gradients" in own:
        pairs = list(zip(own["gradients"], exact["gradients"], strict=True))
        # Lengths in float64: millions of squares are added up.
        off = sum(float((a - b).double().square().sum()) for a, b in pairs)
        size = sum(float(b.double().square().sum()) for _, b in pairs)
        product = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
        length = sum(float(a.double().square().sum()) for a, _ in pairs)
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 0)
        found |= {
            "gradient": (off / size) ** 0.5,
            "gradient_worst_weight": worst,
            "cosine": product / (size * length) ** 0.5,
        }
    return found


def measure(words: Sequence[str], rounds: int) -> list[Figures]:
    """How far sampler and learners are off the exact side, in each round."""
    samples, sides = play(words, rounds), {}
    for name, options in SIDES.items():
        config = read_config([*words, *UNCHANGED, *options])
        if name == PLAIN and not uses_bf16(config.engine.dtype, pick_device(config.engine.device)):
            continue
        sides[name] = compute(config, samples)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return [compare(played, each) for played, each in zip(samples, rows_of(sides), strict=True)]


def rows_of(sides: Mapping[str, Sequence[Figures]]) -> list[dict[str, Figures]]:
    """The sides of each round."""
    return [dict(zip(sides, each, strict=True)) for each in zip(*sides.values(), strict=True)]


def compare(samples: Sequence[Sample], sides: Mapping[str, Figures]) -> Figures:
    """The figures of one round."""
    written = np.concatenate([s.old_logprobs_T[s.loss_mask_T] for s in samples])
    exact = sides[EXACT]
    found: Figures = {
        "num_tokens": len(written),
        "exact_gradient_norm": _length(exact["gradients"]),
        "sampler, as it wrote": difference({"logp": written}, exact),
        MOORED: difference(sides[MOORED], exact),
    }
    if PLAIN in sides:
        found[PLAIN] = difference(sides[PLAIN], exact)
        found["one from the other"] = difference(sides[MOORED], sides[PLAIN])
    return found


def _length(gradients: Sequence[torch.Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in gradients) ** 0.5


def table_of(rounds: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("round", "what is off", title="off by")
    for column in ("log-prob., mean", "largest", "gradient", "its worst weight", "cosine"):
        table.add_column(column, justify="right")
    for index, found in enumerate(rounds):
        for name, each in found.items():
            if isinstance(each, Mapping):
                figures = [f"{value:.3g}" for value in list(each.values())[:4]]
                cosine = [f"{each['cosine']:.6f}"] if "cosine" in each else []
                table.add_row(str(index), name, *figures, *cosine)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="fast against plain engine, and float32")
    parser.add_argument("words", nargs="+", help="presets and key=value, as for moored train")
    parser.add_argument("--rounds", type=int, default=1, help="steps to compare")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    given = parser.parse_intermixed_args(arguments)  # words may stand behind options too
    config = read_config(given.words)
    device = pick_device(config.engine.device)
    found = measure(given.words, given.rounds)
    console = make_console()
    console.print(table_of(found))
    sizes = [{"tokens": each["num_tokens"]} for each in found]
    console.print(json.dumps(sizes), highlight=False)
    machine = describe_machine(device, bf16=uses_bf16(config.engine.dtype, device))
    show_machine(console, machine)
    write_record(given.out, machine, {"words": given.words, "rounds": found})


if __name__ == "__main__":
    main()
