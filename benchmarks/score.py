"""Cross-scoring: every reasoning after every prompt, against concatenating and running again.

    python benchmarks/score.py [--model nano] [--prompts 16] [--reasonings 64] [--out FILE]

The naive way runs each of prompts x reasonings sequences whole, padded, in batches of the same
number of tokens, and takes log-probabilities of the reasoning alone. Both sides must agree. The
ceiling is the rate of one large matrix product on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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
    plain_model,
    show_machine,
    timed,
    timing_table,
    write_record,
)
from sampler import SHAPES
from torch import nn
from transformers import LlamaForCausalLM

from moored.config import load_config
from moored.engine.local.batches import default_tokens
from moored.engine.local.learner import LocalLearner
from moored.models.load import load_model
from moored.types import Prompt, ScoreRequest

Scores = dict[tuple[int, int], np.ndarray]


def shared(
    learner: LocalLearner, prompts: Sequence[Prompt], replies: Sequence[np.ndarray], found: Scores
) -> int:
    """moored's way; returns the scored tokens."""
    scored = learner.score([ScoreRequest(prompt, replies) for prompt in prompts])
    found.update(((i, j), logp) for i, row in enumerate(scored) for j, logp in enumerate(row))
    return sum(map(len, replies)) * len(prompts)


@torch.no_grad()
def naive(
    model: nn.Module,
    prompts: Sequence[Prompt],
    replies: Sequence[np.ndarray],
    budget: int,
    found: Scores,
) -> int:
    """One row for every pair, logits for the reasoning only."""
    pairs = [(i, j) for i in range(len(prompts)) for j in range(len(replies))]
    longest = max(len(p.ids) for p in prompts) + max(map(len, replies))
    device, size = next(model.parameters()).device, max(1, budget // longest)
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        ids = np.zeros((len(part), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, (i, j) in enumerate(part):
            whole = np.concatenate([prompts[i].ids, replies[j]])
            ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
        tokens = torch.from_numpy(ids).to(device)
        first = min(len(prompts[i].ids) for i, _ in part) - 1
        logits = model(
            input_ids=tokens,
            attention_mask=torch.from_numpy(mask).to(device),
            use_cache=False,
            logits_to_keep=longest - first,
        ).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), dim=-1)
        logp = logp.gather(-1, tokens[:, first + 1 :, None]).squeeze(-1).cpu().numpy()
        for row, (i, j) in enumerate(part):
            at = len(prompts[i].ids) - 1 - first
            found[i, j] = logp[row, at : at + len(replies[j])]
    return sum(map(len, replies)) * len(prompts)


def work(model: nn.Module, prompts: Sequence[Prompt], replies: Sequence[np.ndarray]) -> float:
    """Floating-point operations that cannot be avoided: each prompt once, each pair's reasoning."""
    config: Any = model.config
    head = config.vocab_size * config.hidden_size
    trunk = sum(p.numel() for name, p in model.named_parameters() if "layers" in name)
    inner = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    lengths = np.array([len(ids) for ids in replies], dtype=float)
    total = 0.0
    for size in (len(prompt.ids) for prompt in prompts):
        tokens, seen = size + lengths.sum(), size**2 / 2 + (lengths * size + lengths**2 / 2).sum()
        total += 2 * trunk * tokens + 2 * head * lengths.sum()
        total += 4 * config.num_hidden_layers * inner * seen
    return total


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in the best of ten large matrix products."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    seconds = [timed(lambda: int((a @ a).shape[0]), device)[0] for _ in range(11)]
    return 2.0 * size**3 / min(seconds[1:])


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cross-scoring.")
    parser.add_argument("--model", default="nano", help=f"a model, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--reasonings", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--reasoning-tokens", type=int, default=80)
    add_common_options(parser, repeats=3)
    return parser.parse_args(words)


def make_model(name: str, device: torch.device) -> nn.Module:
    """A model by name, or one of `SHAPES` with random weights."""
    torch.manual_seed(0)
    if name in SHAPES:
        return LlamaForCausalLM(SHAPES[name]).to(device)  # pyright: ignore[reportArgumentType]
    return load_model(name, device).model


def draw_tokens(
    rng: np.random.Generator, vocabulary: int, count: int, most: int
) -> list[np.ndarray]:
    """Sequences of unequal length, 0.8 to 1.2 times as long."""
    lengths = rng.integers(most * 4 // 5, most * 6 // 5 + 1, size=count)
    return [rng.integers(3, vocabulary, size=length) for length in lengths]


def main(words: Sequence[str] | None = None) -> int:
    given = parse_arguments(words)
    device, bf16 = device_of(given)
    machine = describe_machine(device, bf16=bf16)
    model: Any = make_model(given.model, device)
    vocabulary = int(model.config.vocab_size)
    draw = partial(draw_tokens, np.random.default_rng(0), vocabulary)
    prompts = [Prompt(ids) for ids in draw(given.prompts, given.prompt_tokens)]
    replies = draw(given.reasonings, given.reasoning_tokens)
    budget = default_tokens(device.type)
    # Before the learner changes precision and layers of its own.
    plain = plain_model(model, bf16=bf16).eval()
    plain.set_attn_implementation("sdpa")  # pyright: ignore[reportCallIssue]
    learner = LocalLearner(
        model,
        load_config(
            {"engine": {"dtype": "bfloat16" if bf16 else "float32", "micro_batch_tokens": budget}}
        ),
    )
    ours: Scores = {}
    theirs: Scores = {}
    timings = interleave(
        {
            "moored": partial(shared, learner, prompts, replies, ours),
            "concatenated": partial(naive, plain, prompts, replies, budget, theirs),
        },
        given.repeats,
        device,
    )
    difference = max(float(np.abs(ours[pair] - theirs[pair]).max()) for pair in ours)
    ratio = timings["concatenated"].median_s / timings["moored"].median_s
    console = make_console()
    title = f"{given.model}: {given.prompts} prompts x {given.reasonings} reasonings"
    console.print(timing_table(title, timings, {"concatenated": ratio}))
    console.print(f"largest difference of a token's log-probability: {difference:.2g} nats")
    half = {
        "half the prompts": partial(shared, learner, prompts[::2], replies, {}),
        "half the reasonings": partial(shared, learner, prompts, replies[::2], {}),
    }
    growth = interleave(half, given.repeats, device)
    shares = {name: t.median_s / timings["moored"].median_s for name, t in growth.items()}
    console.print(", ".join(f"{name} take {share:.2f} of it" for name, share in shares.items()))
    needed = work(model, prompts, replies)
    ceiling = matmul_rate(device, torch.bfloat16 if bf16 else torch.float32)
    share = needed / timings["moored"].median_s / ceiling
    console.print(
        f"moored: {needed / 1e12:.2f} Tflop at {share:.0%} of the {ceiling / 1e12:.2f} Tflop/s of "
        f"a large matrix product"
    )
    show_machine(console, machine)
    limits = {
        "growth": shares,
        "flop": needed,
        "ceiling_flop_s": ceiling,
        "share_of_ceiling": share,
    }
    figures = {name: timing.record() for name, timing in timings.items()}
    write_record(
        given.out, machine, {"speed_up": ratio, "difference": difference, **limits, **figures}
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
