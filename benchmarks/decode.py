"""A decoding step of the fast sampler as one CUDA graph: forward pass, logits and draw.

    python benchmarks/decode.py [--shape 0.5b 3b] [--rows 128 1024] [--cells 576] [--out FILE]

Random weights; every row has so many tokens in its slot. The bound is what a step must read at
`--bandwidth` (all weights once, keys and values) or compute at `--tflops`, whichever takes longer
for the products, and attention after them. `--profile` says which kernels take the time.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from harness import (
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    show_machine,
    timed,
    write_record,
)
from rich.table import Table
from sizes import SHAPES, make_model, profile

from moored.engine.base import SamplingParams
from moored.engine.fast.capture import capture, run_aside
from moored.engine.fast.sampler import SlotSampler

STEPS = 8
"""Launched one after the other and timed together."""


def fill(sampler: SlotSampler, rows: int, cells: int) -> Callable[[], None]:
    """Let the first lanes run, each with a slot of its own; returns what puts them back there."""
    params = SamplingParams(max_tokens=cells + STEPS)
    sampler.reserve(rows, cells + STEPS, params)
    state = sampler.state
    state.set_params(params)
    lanes = torch.arange(rows, dtype=torch.int32, device=sampler.device)
    for column in (state.requests, state.slots):
        column[:rows] = lanes
    state.tokens[:rows] = lanes + 3
    state.cells[:rows] = cells
    state.running[:rows] = 1
    before = state.columns.clone()

    def put_back() -> None:
        state.columns.copy_(before)

    return put_back


def recorded(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The step as one launch; on a CPU the step itself."""
    if device.type != "cuda":
        return step
    run_aside(step)
    return capture(step, None)[0].replay


@torch.no_grad()
def measure(model: Any, rows: int, options: argparse.Namespace, *, bf16: bool) -> list[float]:
    """Milliseconds of a step, over and over."""
    device = model.device
    dtype = torch.bfloat16 if bf16 else torch.float32
    context = options.cells + STEPS
    sampler = SlotSampler(model, dtype=dtype, max_context=context, shares=True)
    put_back = fill(sampler, rows, options.cells)
    step = recorded(lambda: sampler.decode(rows), device)

    def steps() -> int:
        for _ in range(STEPS):
            step()
        return STEPS * rows

    found = []
    for _ in range(2 + options.repeats):
        put_back()
        found.append(1e3 * timed(steps, device)[0] / STEPS)
    if options.profile:
        put_back()
        for name, (ms, count) in profile(steps, device).items():
            print(f"{ms:9.3f} ms {count:6d} x {name}")
    return found[2:]


def bound_ms(name: str, rows: int, options: argparse.Namespace) -> float:
    """Products, then attention."""
    config: Any = SHAPES[name]
    with torch.device("meta"):
        weights = sum(
            w.numel() for w in make_model(name, torch.device("meta"), bf16=True).parameters()
        )
    products = max(
        2 * weights / options.bandwidth / 1e12, 2 * weights * rows / options.tflops / 1e12
    )
    kv = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    cached = 2 * 2 * config.num_hidden_layers * kv * options.cells * rows
    return 1e3 * (products + cached / options.bandwidth / 1e12)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time a decoding step.")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.5b", "3b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--cells", type=int, default=576)
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s of the memory")
    parser.add_argument("--tflops", type=float, default=775.0, help="Tflop/s of matrix products")
    parser.add_argument("--profile", action="store_true", help="print what takes the time")
    add_common_options(parser, repeats=20)
    options = parser.parse_args(words)
    device, bf16 = device_of(options)
    figures: dict[str, Any] = {}
    table = Table("shape", "rows", "ms", "bound, ms")
    for name in options.shape:
        model = make_model(name, device, bf16=bf16)
        for rows in options.rows:
            found = measure(model, rows, options, bf16=bf16)
            bound = bound_ms(name, rows, options)
            figures[f"{name}, {rows} rows"] = {
                "median_ms": median(found),
                "min_ms": min(found),
                "max_ms": max(found),
                "bound_ms": bound,
            }
            table.add_row(name, str(rows), f"{median(found):.3f}", f"{bound:.2f}")
            gc.collect()
    console, machine = make_console(), describe_machine(device, bf16=bf16)
    console.print(table)
    show_machine(console, machine)
    write_record(options.out, machine, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
