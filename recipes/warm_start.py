"""Make an embedded model from scratch: tokenizer, demonstrations, training, model card.

    python recipes/warm_start.py nano --out moored/models/nano --seed 0

The same seed gives the same tokenizer and demonstrations, byte for byte, and on one machine and
version of torch the same weights up to the rounding of parallel sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from pathlib import Path

from recipes.corpus import make_corpus
from recipes.sizes import SIZES, Size
from recipes.tokenizer import build_tokenizer

# torch is imported inside `main`: the processes that make demonstrations start without it.


def main() -> None:
    begin = time.perf_counter()
    options = parse_options()
    size = chosen_size(options)
    tokenizer = build_tokenizer()
    corpus_begin = time.perf_counter()
    corpus = make_corpus(
        tokenizer.backend_tokenizer, size.num_dialogues, options.seed, num_workers=options.workers
    )
    corpus_s = time.perf_counter() - corpus_begin
    print(f"{size.num_dialogues:,} dialogues, {len(corpus.ids):,} tokens in {corpus_s:.1f} s")

    import torch

    from recipes.card import Making, rates_table, write_card
    from recipes.finetune import build_model, train
    from recipes.start_rates import measure_start

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(size, tokenizer, options.seed)
    print(f"{options.name}: {model.num_parameters():,} parameters on {device}")
    training = train(
        model,
        corpus,
        size,
        seed=options.seed,
        device=device,
        max_minutes=options.minutes,
        use_graphs=device.startswith("cuda") and not options.no_graphs,
    )
    rates = measure_start(model, tokenizer, num_tasks=options.tasks, seed=options.seed)
    model.save_pretrained(options.out)
    # Weights are written readable only by their owner; a package is for everybody.
    (options.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(options.out)
    total_s = time.perf_counter() - begin
    making = Making(
        options.name, command_line(options), options.seed, options.workers, corpus_s, total_s
    )
    write_card(options.out / "README.md", making, model, corpus, training, rates)
    print(
        f"\nloss {training.loss:.3f} nats, {training.num_steps} steps, "
        f"{training.tokens_per_s:,.0f} tokens/s, training {training.train_s:.0f} s, "
        f"all {total_s:.0f} s\n\n{rates_table(rates)}"
    )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make an embedded model.")
    parser.add_argument("name", choices=sorted(SIZES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit of the training")
    parser.add_argument("--dialogues", type=int, help="demonstrations to make")
    parser.add_argument("--batch-tokens", type=int, help="tokens of one step, padding included")
    parser.add_argument("--no-graphs", action="store_true", help="do not record CUDA graphs")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tasks", type=int, default=128, help="validation tasks per environment")
    return parser.parse_args()


def chosen_size(options: argparse.Namespace) -> Size:
    """The model's size, with what the command line changes."""
    size = SIZES[options.name]
    return dataclasses.replace(
        size,
        num_steps=options.steps or size.num_steps,
        num_dialogues=options.dialogues or size.num_dialogues,
        batch_tokens=options.batch_tokens or size.batch_tokens,
    )


def command_line(options: argparse.Namespace) -> str:
    """The command that makes this model again, options left at their default not named."""
    flags = {
        "out": f"moored/models/{options.name}",
        "seed": options.seed,
        "steps": options.steps,
        "minutes": None if math.isinf(options.minutes) else options.minutes,
        "dialogues": options.dialogues,
        "batch-tokens": options.batch_tokens,
    }
    given = [f"--{flag} {value}" for flag, value in flags.items() if value is not None]
    return " ".join(["python recipes/warm_start.py", options.name, *given])


if __name__ == "__main__":
    main()
