"""Which tiles make a decoding step fastest: `engine/fast/tiles.py` follows from it.

    python benchmarks/tiles.py [--shape 0.5b 3b] [--rows 16 64 128] [--out FILE]

Milliseconds of a whole step, recorded as in `decode.py`: as it is, and with another tile for one of
its products or for attention, all else as it is. A product alone would not tell, since kernels
overlap. The library and the kernels for other GPUs are among the others, and so is a step in which
norms keep the products behind them waiting. Every step has to agree with the present one. For a GPU
of the Hopper generation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
from decode import STEPS, fill, recorded
from harness import (
    add_common_options,
    describe_machine,
    make_console,
    show_machine,
    timed,
    write_record,
)
from rich.table import Table
from sizes import SHAPES, make_model

from moored.engine.fast.sampler import SlotSampler
from moored.engine.fast.tiles import MAX_ROWS, AttentionTile, Tile, attention_tile, tile_of

SHARED_BYTES = 226_000
TOLERANCE = 0.08
"""Of the outputs of a step: rounding alone makes those of 36 random layers differ by 0.04."""
KINDS = ("qkv", "out", "gate_up", "down")
SHOWN = 3


def head_of(config: Any) -> int:
    return config.hidden_size // config.num_attention_heads


def sizes_of(config: Any) -> dict[str, tuple[int, int]]:
    """Lines and columns of the products of a layer."""
    width, inner = config.hidden_size, config.intermediate_size
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_of(config)
    return {
        "qkv": (heads, width),
        "out": (width, width),
        "gate_up": (2 * inner, width),
        "down": (width, inner),
    }


def products(
    kind: str, lines: int, columns: int, rows: int, parts_of_heads: int
) -> Iterator[Tile | None]:
    """Tiles to try for a product; None: the library."""
    yield None
    gated = kind == "gate_up"
    most_parts = {"qkv": parts_of_heads, "gate_up": 1}.get(kind, 8)
    yield tile_of(rows, lines, columns, torch.bfloat16, gated=gated, most_parts=most_parts)
    own = lines // 2 if gated else lines
    filled = next(size for size in (16, 32, 64, 128) if rows <= size)
    shapes = [(64, 4), (128, 8)] if gated else [(64, 4)]
    for (each, warps), step, parts in product(shapes, (64, 128, 256), (1, 2, 3, 4, 6, 8)):
        blocks = -(-columns // step)
        if parts > min(most_parts, blocks) or -(-own // each) * parts > 264:
            continue
        size = 2 * step * (filled + each * (1 + gated)) + 8
        stages = min(12, -(-blocks // parts), SHARED_BYTES // size)
        if stages > 1 or blocks == parts:
            yield Tile(filled, each, step, parts, warps, stages, is_early=True)


def attentions(rows: int, config: Any) -> Iterator[AttentionTile]:
    head = head_of(config)
    pairs = rows * config.num_key_value_heads
    group = config.num_attention_heads // config.num_key_value_heads
    yield attention_tile(pairs, group, head, 2)
    for (cells, warps), splits in product([(32, 1), (64, 2), (64, 4), (128, 4)], (1, 2, 4, 8)):
        if splits > 1 and pairs * splits > 264:
            continue
        for stages in (2, 3, 6):
            if stages * cells * head * 4 <= SHARED_BYTES:
                yield AttentionTile(cells, warps, stages, splits, is_early=True)


class Step:
    """A decoding step of a model, whose tiles can be exchanged."""

    def __init__(self, model: Any, rows: int, cells: int) -> None:
        self.sampler = SlotSampler(
            model, dtype=torch.bfloat16, max_context=cells + STEPS, shares=True
        )
        self.rows, self._put_back = rows, fill(self.sampler, rows, cells)
        self.sampler.cache.normal_()
        self._expected = self._outputs()

    def _outputs(self) -> torch.Tensor:
        self._put_back()
        state = self.sampler.state
        one_each, ids = state.one_token_each(self.rows), state.tokens[: self.rows]
        return self.sampler.decoder.forward(self.sampler.cache, ids, one_each).float()

    def milliseconds(self, repeats: int) -> float:
        """Raise where the step computes something else than at first."""
        difference = (self._outputs() - self._expected).norm() / self._expected.norm()
        if not difference < TOLERANCE:
            raise SystemExit(f"the step differs by {difference:.3g}")
        self._put_back()
        step = recorded(lambda: self.sampler.decode(self.rows), self.sampler.device)

        def steps() -> int:
            for _ in range(STEPS):
                step()
            return STEPS * self.rows

        found = []
        for _ in range(2 + repeats):
            self._put_back()
            found.append(1e3 * timed(steps, self.sampler.device)[0] / STEPS)
        return median(found[2:])


def with_tile(size: tuple[int, int], tile: Tile | None) -> Callable[..., Tile | None]:
    def choose(rows: int, lines: int, columns: int, *rest: Any, **options: Any) -> Tile | None:
        if (lines, columns) == size:
            return tile
        return tile_of(rows, lines, columns, *rest, **options)

    return choose


def with_attention(tile: AttentionTile) -> Callable[..., AttentionTile]:
    return lambda *_, **__: tile


@torch.no_grad()
def measure(model: Any, config: Any, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    from moored.engine.fast import kernels, norm_kernels

    step = Step(model, rows, options.cells)
    found: dict[str, Any] = {"present": step.milliseconds(options.repeats)}

    def tried(module: Any, name: str, others: Sequence[tuple[str, Any]]) -> list[Any]:
        present, figures = getattr(module, name), []
        for text, other in others:
            setattr(module, name, other)
            try:
                figures.append((step.milliseconds(options.repeats), text))
            finally:
                setattr(module, name, present)
        return sorted(figures)

    sizes = sizes_of(config)
    pairs = rows * config.num_key_value_heads
    group, head = config.num_attention_heads // config.num_key_value_heads, head_of(config)
    # Early attention alone adds up queries, keys and values in parts.
    parts_of_heads = 2 if attention_tile(pairs, group, head, 2, copies=True).is_early else 1
    for kind in KINDS if rows <= MAX_ROWS else ():
        tiles = list(dict.fromkeys(products(kind, *sizes[kind], rows, parts_of_heads)))
        others = [(str(tile or "library"), with_tile(sizes[kind], tile)) for tile in tiles]
        found[kind] = tried(kernels, "tile_of", others)
    tiles = list(dict.fromkeys(attentions(rows, config)))
    if parts_of_heads > 1:
        tiles = [tile for tile in tiles if tile.is_early]
    others = [(str(tile), with_attention(tile)) for tile in tiles]
    found["attention"] = tried(kernels, "attention_tile", others)
    found["norms"] = tried(norm_kernels, "EARLY_WIDTH", [("waiting", 0), ("early", 8192)])
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare tiles of decoding steps.")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.5b", "3b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--cells", type=int, default=576)
    add_common_options(parser, repeats=7)
    options = parser.parse_args(words)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("this compares kernels for a GPU of the Hopper generation; there is none")
    device, console, figures = torch.device("cuda"), make_console(), {}
    machine = describe_machine(device, bf16=True)
    for name in options.shape:
        model = make_model(name, device, bf16=True)
        for rows in options.rows:
            found = measure(model, SHAPES[name], rows, options)
            figures[f"{name}, {rows} rows"] = found
            table = Table("what", "ms", "with", title=f"{name}, {rows} rows")
            table.add_row("present", f"{found['present']:.4f}", "")
            for kind, others in found.items():
                for ms, text in others[:SHOWN] if kind != "present" else ():
                    table.add_row(kind, f"{ms:.4f}", text)
            console.print(table)
            write_record(options.out, machine, figures)
    show_machine(console, machine)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
