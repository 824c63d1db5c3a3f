"""Raw sampling speed: moored's sampler against `model.generate` with each of its caches.

    python benchmarks/sampler.py [--rows 128 1024] [--shape mini llama-135m] [--out FILE]

Every row is another prompt of `--prompt-tokens` random tokens and gets exactly `--new-tokens` new
ones, by models of random weights. Tokens per second count the prefill in; decoding is the rest,
per token of all rows. The first call (compiling, capturing) is apart. Peak memory is what a sampler
adds on the GPU, its copy of the weights included.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from harness import (
    PlainSampler,
    Timing,
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    make_sampler,
    plain_model,
    show_machine,
    timed,
    write_record,
)
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from moored.engine.base import Request, Sampler, SamplingParams, write_replies
from moored.types import Prompt

SHAPES = {
    "mini": LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "llama-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "toy": LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
}


@dataclass(slots=True)
class Case:
    """A sampler on one shape and number of rows: whole replies, first tokens alone, memory."""

    shape: str
    rows: int
    name: str
    new_tokens: int
    whole: Timing
    first_token: Timing
    peak_bytes: int | None

    @property
    def decode_ms(self) -> float:
        """Milliseconds of one decoding step."""
        decoding_s = self.whole.median_s - self.first_token.median_s
        return 1e3 * decoding_s / (self.new_tokens - 1)

    def record(self) -> dict[str, object]:
        return {
            "shape": self.shape,
            "rows": self.rows,
            "sampler": self.name,
            "tokens_per_s": self.whole.tokens_per_s,
            "decode_ms": self.decode_ms,
            "peak_bytes": self.peak_bytes,
            "whole": self.whole.record(),
            "first_token": self.first_token.record(),
        }


def sampler_makers(
    model: PreTrainedModel, *, bf16: bool, max_context: int
) -> dict[str, Callable[[], Sampler]]:
    def plain(cache: str | None) -> Sampler:
        return PlainSampler(plain_model(model, bf16=bf16), cache=cache)

    return {
        "generate": partial(plain, None),
        "generate, static cache": partial(plain, "static"),
        "moored": partial(make_sampler, model, bf16=bf16, max_context=max_context),
    }


def make_requests(rows: int, prompt_tokens: int, vocabulary: int) -> list[Request]:
    """A different prompt for every row."""
    ids = np.random.default_rng(0).integers(1, vocabulary, (rows, prompt_tokens))
    return [Request(session=i, prompt=Prompt(ids[i]), seed=i) for i in range(rows)]


def measure_shape(
    shape: str, rows: int, arguments: argparse.Namespace, device: torch.device, *, bf16: bool
) -> list[Case]:
    """All samplers on one shape, in turn."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPES[shape]).to(device)  # pyright: ignore[reportArgumentType]
    requests = make_requests(rows, arguments.prompt_tokens, SHAPES[shape].vocab_size)
    max_context = arguments.prompt_tokens + arguments.new_tokens
    makers = sampler_makers(model, bf16=bf16, max_context=max_context)
    cases: dict[str, Case] = {}
    samplers: dict[str, Sampler] = {}
    for name in arguments.sampler or makers:
        before = _reset_peak(device)
        samplers[name] = makers[name]()
        call = partial(generate, samplers[name], requests, arguments.new_tokens)
        whole = Timing(start_up_s=timed(call, device)[0])
        peak = None if before is None else torch.cuda.max_memory_allocated(device) - before
        cases[name] = Case(shape, rows, name, arguments.new_tokens, whole, Timing(), peak)
        timed(partial(generate, samplers[name], requests, 1), device)
    for _ in range(arguments.repeats):
        for name, sampler in samplers.items():
            whole = partial(generate, sampler, requests, arguments.new_tokens)
            cases[name].whole.add(*timed(whole, device))
            cases[name].first_token.add(*timed(partial(generate, sampler, requests, 1), device))
    return list(cases.values())


def generate(sampler: Sampler, requests: Sequence[Request], new_tokens: int) -> int:
    """Write replies of a fixed length from scratch; returns the number of tokens."""
    completions = write_replies(sampler, requests, SamplingParams(max_tokens=new_tokens))
    return sum(len(completion.token_ids) for completion in completions)


def _reset_peak(device: torch.device) -> int | None:
    """Bytes in use on the GPU now; the peak is counted from here."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def show(cases: Sequence[Case], title: str) -> Table:
    table = Table("shape", "rows", "sampler", title=title)
    for column in ("tokens/s", "seconds (min–max)", "decode ms", "first call s", "peak GiB"):
        table.add_column(column, justify="right")
    for case in cases:
        whole, peak = case.whole, case.peak_bytes
        table.add_row(
            case.shape,
            f"{case.rows:,}",
            case.name,
            f"{whole.tokens_per_s:,.0f}",
            f"{whole.median_s:.3f} ({min(whole.seconds):.3f}–{max(whole.seconds):.3f})",
            f"{case.decode_ms:.3f}",
            f"{whole.start_up_s:.1f}",
            "" if peak is None else f"{peak / 2**30:.2f}",
        )
    return table


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Raw sampling speed.")
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=["mini", "llama-135m"])
    parser.add_argument("--rows", nargs="*", type=int, help="128 and 1024; 8 without a GPU")
    parser.add_argument("--sampler", nargs="*", help="only these, by the names in the table")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    add_common_options(parser, repeats=5)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    device, bf16 = device_of(arguments)
    machine = describe_machine(device, bf16=bf16)
    rows = arguments.rows or ([128, 1024] if device.type == "cuda" else [8])
    console, cases = make_console(), []
    for shape in arguments.shape:
        for count in rows:
            cases += measure_shape(shape, count, arguments, device, bf16=bf16)
            gc.collect()
    title = f"{arguments.prompt_tokens} tokens of prompt, {arguments.new_tokens} new"
    console.print(show(cases, title))
    show_machine(console, machine)
    write_record(arguments.out, machine, [case.record() for case in cases])
    return 0


if __name__ == "__main__":
    sys.exit(main())
