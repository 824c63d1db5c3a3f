"""Update, decoding and cross-scoring at the sizes of real models, with random weights.

    python benchmarks/sizes.py --shape 0.5b 1.5b 3b --what update decode score [--set KEY=VALUE …]

- update: one optimiser step on 8 groups of 16 trajectories, a prompt of 200 tokens and 800 more
  each; tokens are those computed, a shared prompt once. `--critic` adds critic and KL.
- decode: replies of 128 tokens to prompts of 512, another prompt for every row; a step is what
  is left of the whole after the first token.
- score: 64 reasonings of about 80 tokens after each of 16 prompts of about 300.

With `--profile` one more call is broken down into kernels (operations, on a CPU): milliseconds and
calls of the ten that take longest, and of all.

The share is of the matrix rate given by `--tflops`: 2 floating-point operations a parameter and
token forwards, 6 with the backward pass, attention not counted.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import (
    Timing,
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    make_sampler,
    show_machine,
    timed,
    write_record,
)
from sampler import SHAPES as SMALL
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from moored.config import load_config
from moored.engine.base import Request, SamplingParams, write_replies
from moored.engine.local.learner import LocalLearner
from moored.training.samples import LossSample, Sample
from moored.types import Prompt, ScoreRequest


def _qwen(width: int, inner: int, layers: int, heads: int, kv: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151936 if tied else 152064,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        tie_word_embeddings=tied,
    )


SHAPES = {
    "toy": SMALL["toy"],
    "135m": SMALL["llama-135m"],
    "0.5b": _qwen(896, 4864, 24, 14, 2, True),
    "1.5b": _qwen(1536, 8960, 28, 12, 2, True),
    "3b": _qwen(2048, 11008, 36, 16, 2, True),
    "7b": _qwen(3584, 18944, 28, 28, 4, False),
}
Figures = dict[str, Any]


def make_model(name: str, device: torch.device, *, bf16: bool) -> Any:
    """Random weights, made where they stay."""
    config = SHAPES[name]
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen2ForCausalLM
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if bf16 else torch.float32)
    try:
        with torch.device(device):
            return kind(config)  # pyright: ignore[reportArgumentType]
    finally:
        torch.set_default_dtype(before)


def make_samples(options: argparse.Namespace, vocabulary: int) -> list[LossSample]:
    """Groups of trajectories, each 0.9 to 1.1 times as long as asked for."""
    rng, found = np.random.default_rng(0), []
    total = options.groups * options.group_size
    for group in range(options.groups):
        prompt = Prompt(rng.integers(3, vocabulary, size=options.prompt_tokens))
        for member in range(options.group_size):
            length = (
                int(rng.integers(9 * options.reply_tokens, 11 * options.reply_tokens + 1)) // 10
            )
            sample = Sample(
                prompt=prompt,
                ids_T=rng.integers(3, vocabulary, size=length),
                loss_mask_T=np.ones(length, dtype=bool),
                old_logprobs_T=np.full(length, -np.log(vocabulary)),
                turn_ends_T=np.arange(length) == length - 1,
                rewards_T=np.zeros(length),
                group=group,
                trajectory=group * options.group_size + member,
            )
            share = np.full(length, 1.0 / (total * length))
            found.append(
                LossSample(
                    sample=sample,
                    advantages_T=np.full(length, 1.0 if member % 2 else -1.0),
                    weights_T=share,
                    mean_weights_T=share,
                    returns_T=np.zeros(length),
                    old_values_T=np.zeros(length),
                )
            )
    return found


def computed_tokens(samples: Sequence[LossSample]) -> int:
    prompts = {id(each.sample.prompt): len(each.sample.prompt.ids) for each in samples}
    return sum(prompts.values()) + sum(len(each.sample.ids_T) for each in samples)


def measure_update(name: str, options: argparse.Namespace, device: torch.device, bf16: bool):
    model = make_model(name, device, bf16=bf16)
    size = sum(weight.numel() for weight in model.parameters())
    words = {"algorithm": {"kl_coef": 0.001 if options.critic else 0.0, "entropy_coef": 0.001}}
    words["engine"] = {"dtype": options.dtype}
    config = load_config(words, options.set)
    learner = LocalLearner(model, config, with_critic=options.critic)
    samples = make_samples(options, SHAPES[name].vocab_size)
    tokens = computed_tokens(samples)

    def step() -> int:
        next(learner.step([samples]))
        return tokens

    timing = repeated(step, options, device, warm_up=2)
    passes = 6 + (2 + 6 if options.critic else 0)
    return {**timing.record(), **rate(timing, passes * size, options), **peak(device)}


def measure_decode(name: str, options: argparse.Namespace, device: torch.device, bf16: bool):
    model = make_model(name, device, bf16=bf16)
    found: Figures = {}
    for rows in options.rows:
        sampler = make_sampler(model, bf16=bf16, max_context=640, shares=True)
        ids = np.random.default_rng(0).integers(1, SHAPES[name].vocab_size, (rows, 512))
        requests = [Request(session=i, prompt=Prompt(ids[i]), seed=i) for i in range(rows)]

        def write(tokens: int, sampler: Any = sampler, requests: Any = requests) -> int:
            replies = write_replies(sampler, requests, SamplingParams(max_tokens=tokens))
            return sum(len(reply.token_ids) for reply in replies)

        whole = repeated(partial(write, 128), options, device, warm_up=2)
        first = repeated(partial(write, 1), options, device, warm_up=2)
        found[f"{rows} rows"] = {
            "decode_ms": 1e3 * (whole.median_s - first.median_s) / 127,
            "prefill_s": first.median_s,
            "tokens_per_s": whole.tokens_per_s,
            **peak(device),
        }
        del sampler
        clear(device)
    return found


def measure_score(name: str, options: argparse.Namespace, device: torch.device, bf16: bool):
    model = make_model(name, device, bf16=bf16)
    size = sum(weight.numel() for weight in model.parameters())
    config = load_config({"engine": {"dtype": options.dtype}}, options.set)
    learner = LocalLearner(model, config, trains=False)
    rng, vocabulary = np.random.default_rng(0), SHAPES[name].vocab_size
    prompts = [Prompt(rng.integers(3, vocabulary, size=n)) for n in rng.integers(240, 361, 16)]
    replies = [rng.integers(3, vocabulary, size=n) for n in rng.integers(64, 97, 64)]

    def score() -> int:
        learner.score([ScoreRequest(prompt, replies) for prompt in prompts])
        return sum(len(p.ids) for p in prompts) + len(prompts) * sum(map(len, replies))

    timing = repeated(score, options, device, warm_up=3)
    return {**timing.record(), **rate(timing, 2 * size, options), **peak(device)}


def repeated(call: Any, options: argparse.Namespace, device: torch.device, warm_up: int) -> Timing:
    timing = Timing()
    for _ in range(warm_up):
        timing.start_up_s = max(timing.start_up_s, timed(call, device)[0])
    for _ in range(options.repeats):
        timing.add(*timed(call, device))
    if options.profile:
        for name, (ms, count) in profile(call, device).items():
            print(f"{ms:9.3f} ms {count:6d} x {name}")
    return timing


def profile(call: Any, device: torch.device, most: int = 10) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of the kernels that take longest, then of all of them."""
    is_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with torch_profile(activities=[activity]) as found:
        timed(call, device)
    events = found.key_averages()
    times = {
        e.key[:100]: (
            (e.self_device_time_total if is_gpu else e.self_cpu_time_total) / 1e3,
            e.count,
        )
        for e in events
    }
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    ms, counts = zip(*times.values(), strict=True)
    return {**dict(longest), "all": (sum(ms), sum(counts))}


def rate(timing: Timing, flops_per_token: float, options: argparse.Namespace) -> Figures:
    return {"share": timing.tokens_per_s * flops_per_token / (options.tflops * 1e12)}


def peak(device: torch.device) -> Figures:
    """Since the last `clear`."""
    if device.type != "cuda":
        return {}
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30}


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


MEASURES = {"update": measure_update, "decode": measure_decode, "score": measure_score}


def measure_all(
    options: argparse.Namespace, device: torch.device, bf16: bool
) -> Iterator[tuple[str, str, Figures]]:
    for name in options.shape:
        for what in options.what:
            clear(device)
            try:
                found = MEASURES[what](name, options, device, bf16)
            except Exception as error:
                # One size that does not fit must not cost the figures of the others.
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            yield name, what, found


def rows_of(found: Figures) -> list[str]:
    if "error" in found:
        return [found["error"]]
    if "median_s" in found:
        parts = (f"{found['median_s']:.3f} s", f"{found['tokens_per_s']:,.0f} tokens/s")
        more = (f"{found['share']:.1%}", f"first {found['start_up_s']:.1f} s", _memory(found))
        return [", ".join((*parts, *more))]
    return [
        f"{rows}: {each['decode_ms']:.2f} ms a step, prefill {each['prefill_s']:.3f} s, "
        f"{each['tokens_per_s']:,.0f} tokens/s, {_memory(each)}"
        for rows, each in found.items()
    ]


def _memory(found: Figures) -> str:
    return f"peak {found['peak_gib']:.1f} GiB" if "peak_gib" in found else ""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="speed at the sizes of real models")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.5b"])
    parser.add_argument("--what", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--reply-tokens", type=int, default=800)
    parser.add_argument("--critic", action="store_true", help="with critic and KL")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options")
    parser.add_argument("--tflops", type=float, default=775.0)
    parser.add_argument("--profile", action="store_true", help="print what takes the time")
    add_common_options(parser, repeats=3)
    options = parser.parse_args(words)
    device, bf16 = device_of(options)
    console, figures = make_console(), {}
    for name, what, found in measure_all(options, device, bf16):
        figures.setdefault(name, {})[what] = found
        for row in rows_of(found):
            console.print(f"{name:>5} {what:>6}: {row}", highlight=False)
    machine = describe_machine(device, bf16=bf16)
    show_machine(console, machine)
    write_record(options.out, machine, figures)


if __name__ == "__main__":
    main()
