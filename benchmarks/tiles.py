"""Which tiles make the products of decoding steps fastest: `engine/fast/tiles.py` follows from it.

    python benchmarks/tiles.py [--shape 0.5b 3b] [--rows 128 64 16] [--out FILE]

Microseconds of each product with what belongs to it: gate and up with the gate, out and down with
the norm that adds them up. Each is one of a graph of many, with matrices of their own, so that none
is in a cache. Compared are the library, the present choice and all tiles of `wide_kernels` that fit
into shared memory. Every result is checked against float32. For a GPU of the Hopper generation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from harness import add_common_options, describe_machine, make_console, show_machine, write_record
from rich.table import Table
from sizes import SHAPES

from moored.engine.fast.tiles import Tile, tile_of

SHARED_BYTES = 226_000
MOST_BYTES, MOST_COPIES = 300_000_000, 40
"""Of all matrices of a graph: five times the cache of the second level."""
TOLERANCE = 1e-2
KINDS = ("out", "gate_up", "down")


def candidates(rows: int, *, gated: bool) -> Iterator[Tile]:
    """All tiles that are tried."""
    if gated:
        lines = [(128, 0), (64, 32), (64, 16), (64, 0), (32, 16), (32, 0)]
        steps, parts = [(64, 3), (64, 4), (64, 5), (64, 6), (128, 3)], [1]
    else:
        lines, parts = [(32, 0), (64, 0), (128, 0)], [2, 4, 8]
        steps = [(64, 4), (64, 6), (128, 3), (128, 4)]
    warps = (4, 8) if gated and rows > 64 else (4,)
    for (own, more), (columns, stages), number, count in product(lines, steps, parts, warps):
        needed = stages * columns * (rows + (1 + gated) * (own + more)) * 2
        if needed <= SHARED_BYTES:
            yield Tile(rows, own, columns, number, count, stages, is_wide=True, more_lines=more)


class Product:
    """One kind of product of a shape, with matrices to go round."""

    def __init__(self, name: str, kind: str, rows: int) -> None:
        config: Any = SHAPES[name]
        width, inner = config.hidden_size, config.intermediate_size
        sizes = {"out": (width, width), "gate_up": (2 * inner, width), "down": (width, inner)}
        lines, columns = sizes[kind]
        self.gated, self.lines = kind == "gate_up", inner if kind == "gate_up" else lines
        count = min(MOST_COPIES, max(3, MOST_BYTES // (2 * lines * columns)))
        torch.manual_seed(0)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [torch.randn(lines, columns, **options) / columns**0.5 for _ in range(count)]
        self.x = torch.randn(rows, columns, **options)
        self.out = torch.empty(rows, self.lines, **options)
        self.stream = torch.zeros(rows, self.lines, device="cuda")
        self.gain = torch.ones(self.lines, device="cuda")
        self.present = tile_of(
            rows,
            lines,
            columns,
            torch.bfloat16,
            gated=self.gated,
            in_parts=not self.gated,
            copies=True,
        )

    def compute(self, weight: torch.Tensor, tile: Tile | None) -> torch.Tensor:
        from moored.engine.fast import decode_kernels, kernels, wide_kernels

        if tile is None:
            made = F.linear(self.x, weight)
            if self.gated:
                return kernels.silu_mul(made, self.out)
        else:
            shape = (len(self.x), self.lines)
            dtype = torch.float32 if tile.parts > 1 else torch.bfloat16
            made = torch.empty(
                shape if self.gated else (tile.parts, *shape), dtype=dtype, device="cuda"
            )
            if tile.is_wide:
                wide_kernels.wide_linear(self.x, weight, made, tile, gated=self.gated)
            else:
                decode_kernels.linear(self.x, weight, None, made, tile, gated=self.gated)
        if not self.gated:
            kernels.add_norm(self.stream, made, self.gain, 1e-6, self.out)
        return made

    def check(self, tile: Tile) -> None:
        """Raise where a tile computes something else than float32 does."""
        found = self.compute(self.weights[0], tile).float()
        found = found if self.gated else found.sum(dim=0)
        expected = F.linear(self.x.float(), self.weights[0].float())
        if self.gated:
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        error = ((found - expected).norm() / expected.norm()).item()
        if not error < TOLERANCE:
            raise SystemExit(f"{tile} is wrong by {error:.3g}")

    def microseconds(self, tile: Tile | None, repeats: int) -> float:
        calls = [lambda weight=weight: self.compute(weight, tile) for weight in self.weights]
        return graph_us(calls, repeats)


def graph_us(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Of one call, in a graph of all of them: the fastest of several replays."""
    from moored.engine.fast.capture import capture, run_aside

    run_aside(calls[0])
    graph, _ = capture(lambda: [call() for call in calls], None)
    graph.replay()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / len(calls))
    return min(found)


def measure(name: str, kind: str, rows: int, repeats: int) -> dict[str, Any]:
    own = Product(name, kind, rows)
    tried = []
    for tile in candidates(128 if rows > 64 else 64, gated=own.gated):
        own.check(tile)
        tried.append((own.microseconds(tile, repeats), str(tile)))
    return {
        "library_us": own.microseconds(None, repeats),
        "present_us": own.microseconds(own.present, repeats),
        "present": str(own.present),
        "best": sorted(tried)[:6],
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare tiles of products.")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.5b", "3b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 64, 16])
    add_common_options(parser, repeats=4)
    options = parser.parse_args(words)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("this compares kernels for a GPU of the Hopper generation; there is none")
    figures: dict[str, Any] = {}
    table = Table("product", "library", "present", "best", "its tile", title="microseconds")
    for name, kind, rows in product(options.shape, KINDS, options.rows):
        found = measure(name, kind, rows, options.repeats)
        figures[f"{name} {kind}, {rows} rows"] = found
        (best, tile), *_ = found["best"]
        cells = [found["library_us"], found["present_us"], best]
        table.add_row(f"{name} {kind}, {rows} rows", *(f"{us:.2f}" for us in cells), tile)
    console, machine = make_console(), describe_machine(torch.device("cuda"), bf16=True)
    console.print(table)
    show_machine(console, machine)
    write_record(options.out, machine, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
