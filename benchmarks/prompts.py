"""How fast the sampler reads prompts: one forward pass over many, whose tokens go into slots.

    python benchmarks/prompts.py [--shape 0.5b 3b] [--prompts 64] [--tokens 512] [--before 0] \
      [--rows 1024 32768] [--out FILE]

Random weights. Milliseconds of a pass as it is, with the outputs of all tokens instead of the last
ones alone, and with the library's products for gated units; for GPUs of the Hopper generation also
gated units alone, by the library and by the kernel, for so many `--rows`. `--before` tokens are in
every slot already. `--profile` says which kernels take the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from decode import recorded
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
from moored.engine.fast.rows import rows_of
from moored.engine.fast.sampler import SlotSampler
from moored.engine.fast.slots import Job, Session

AT_ONCE = 10
"""Products of gated units that are recorded and timed together."""


def median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    def count() -> int:
        run()
        return 1

    found = [1e3 * timed(count, device)[0] for _ in range(2 + repeats)]
    return median(found[2:])


def read(model: Any, options: argparse.Namespace, *, bf16: bool) -> dict[str, float]:
    """Milliseconds of a pass, as it is and with other choices."""
    device, dtype = model.device, torch.bfloat16 if bf16 else torch.float32
    context = options.before + options.tokens + 1
    sampler = SlotSampler(model, dtype=dtype, max_context=context, shares=True)
    sampler.reserve(options.prompts, context, SamplingParams(max_tokens=1))
    sampler.cache.normal_()
    rng = np.random.default_rng(0)
    jobs = [
        Job(
            Session(slot, slot, 0, np.zeros(0, dtype=np.int64)),
            options.before,
            rng.integers(0, model.config.vocab_size, options.tokens),
        )
        for slot in range(options.prompts)
    ]
    rows, ids, lasts = rows_of(jobs, device)

    def run(wanted: torch.Tensor | None) -> float:
        return median_ms(
            lambda: sampler.decoder.forward(sampler.cache, ids, rows, wanted),
            device,
            options.repeats,
        )

    found = {"present_ms": run(lasts), "all_outputs_ms": run(None)}
    if has_own_gates(device):
        found["library_gates_ms"] = with_library(lambda: run(lasts))
    if options.profile:
        for name, (ms, count) in profile(
            lambda: sampler.decoder.forward(sampler.cache, ids, rows, lasts), device
        ).items():
            print(f"{ms:9.3f} ms {count:6d} x {name}")
    return found


def has_own_gates(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def with_library(run: Callable[[], float]) -> float:
    """The same while no gated units have a kernel of their own."""
    from moored.engine.fast import kernels

    present = kernels.gated_tile
    kernels.gated_tile = lambda *_, **__: None
    try:
        return run()
    finally:
        kernels.gated_tile = present


def gates(config: Any, num_rows: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of gated units alone."""
    from moored.engine.fast import gated_kernels, kernels
    from moored.engine.fast.tiles import GatedTile

    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(num_rows, config.hidden_size, **options)
    gate_up = 0.02 * torch.randn(2 * config.intermediate_size, config.hidden_size, **options)
    gate, up = gate_up.chunk(2)

    def library() -> torch.Tensor:
        made = torch.nn.functional.linear(x, gate_up)
        return kernels.silu_mul(made, made.new_empty((num_rows, config.intermediate_size)))

    def kernel() -> torch.Tensor:
        return gated_kernels.gated_product(x, gate, up, GatedTile())

    difference = (kernel().float() - library().float()).norm() / library().float().norm()
    if not difference < 0.01:  # the library rounds before the gate
        raise SystemExit(f"gated units differ by {difference:.3g}")

    def milliseconds(run: Callable[[], object]) -> float:
        several = recorded(lambda: [run() for _ in range(AT_ONCE)], device)
        return median_ms(several, device, repeats) / AT_ONCE

    return {"library_ms": milliseconds(library), "kernel_ms": milliseconds(kernel)}


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the reading of prompts.")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.5b", "3b"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--before", type=int, default=0, help="tokens in every slot before")
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 2048, 4096, 32768])
    parser.add_argument("--profile", action="store_true", help="print what takes the time")
    add_common_options(parser, repeats=9)
    options = parser.parse_args(words)
    device, bf16 = device_of(options)
    figures: dict[str, Any] = {}
    table = Table("shape", "what", "ms")
    for name in options.shape:
        figures[name] = found = read(make_model(name, device, bf16=bf16), options, bf16=bf16)
        for rows in options.rows if has_own_gates(device) else ():
            alone = gates(SHAPES[name], rows, device, options.repeats)
            found |= {f"gated units, {rows} rows, {what}": ms for what, ms in alone.items()}
        for what, ms in found.items():
            table.add_row(name, what.removesuffix("_ms"), f"{ms:.3f}")
    console, machine = make_console(), describe_machine(device, bf16=bf16)
    console.print(table)
    show_machine(console, machine)
    write_record(options.out, machine, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
