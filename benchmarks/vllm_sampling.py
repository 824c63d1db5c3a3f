"""Sampling: moored's fast sampler against vLLM itself, each in a process of its own.

    python benchmarks/vllm_sampling.py [--shape 135m 0.5b 3b] [--rows 128 1024] \
      [--lengths equal geometric turns] [--engine moored vllm] [--out FILE]

Random weights, log-probabilities of the sampled tokens, temperature 1. `equal`: another prompt of
`--prompt-tokens` for each row and exactly `--new-tokens` new ones. `geometric`: likewise,
replies end at the end-of-sequence token, after 60 tokens on average and 400 at most. `turns`:
groups of 16 share a prompt, and five such replies follow one another with 50 tokens between them;
a row goes on as soon as its reply is there. Tokens per second count new tokens and the whole time.
The longest reply decides how many steps there are, so both sides write the same lengths: vLLM ends
each reply where moored's, which always comes first, has ended (`same_lengths` in the file). With
`--engine vllm` alone it draws its own.

moored records the steps of a number of rows when it first has that many: where lengths vary it
takes a few calls (`--warm-up`) until all numbers have come. vLLM, which records all when it starts,
has the last of these calls to warm up.

vLLM runs at its best as far as is known: CUDA graphs for up to as many rows as are asked for, its
engine in a process of its own with asynchronous scheduling, prefix caching, no detokenizing.
`--vllm-in-process` and `--eager` are for machines without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import (
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    make_sampler,
    show_machine,
    write_record,
)
from random_model import write_model
from rich.table import Table
from sizes import SHAPES

LENGTHS = ("equal", "geometric", "turns")
MEAN_TOKENS, MOST_TOKENS = 60, 400
TURNS, OBSERVATION_TOKENS, GROUP_SIZE = 5, 50, 16


class MooredSide:
    """The fast sampler, through streams."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        import torch

        from moored.models.load import load_model

        device, bf16 = device_of(options)
        model: Any = load_model(folder, device, exact=not bf16).model.eval()
        model = model.to(torch.bfloat16 if bf16 else torch.float32)
        self._make = partial(make_sampler, model, bf16=bf16)
        self._context, self._sampler, self._stream = 0, None, None

    def prepare(self, context: int) -> None:
        """Rows have slots of this size, so each case gets a sampler with what it needs."""
        if context != self._context:
            self._sampler = self._stream = None
            self._context, self._sampler = context, self._make(max_context=context, shares=True)

    def begin(self, most: int, stop: int | None) -> None:
        from moored.engine.base import SamplingParams

        assert self._sampler is not None
        stops = () if stop is None else (stop,)
        self._stream: Any = self._sampler.stream(SamplingParams(max_tokens=most, stop_ids=stops))

    def submit(self, row: int, ids: np.ndarray, seed: int, _length: int | None) -> None:
        from moored.engine.base import Request
        from moored.types import Prompt

        self._stream.submit(Request(session=row, prompt=Prompt(ids), seed=seed))

    def poll(self) -> list[tuple[int, np.ndarray]]:
        return [(row, completion.token_ids) for row, completion in self._stream.poll()]

    def forget(self, row: int) -> None:
        """As a rollout does when an episode is over."""
        self._stream.end([row])

    def end(self) -> None:
        self._stream.close()


class VllmSide:
    """vLLM's engine, driven as its own `LLM.generate` does."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        if options.vllm_in_process:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # A forked process could not use a GPU that this one has asked for.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        import vllm  # pyright: ignore[reportMissingImports]

        most = max(options.rows)
        graphs = (
            {} if options.eager else {"compilation_config": {"max_cudagraph_capture_size": most}}
        )
        _, bf16 = device_of(options)
        llm = vllm.LLM(
            model=folder,
            dtype="bfloat16" if bf16 else "float32",
            skip_tokenizer_init=True,
            max_model_len=max(longest_context(lengths, options) for lengths in options.lengths),
            max_num_seqs=most,
            enable_prefix_caching=True,
            enforce_eager=options.eager,
            disable_log_stats=True,
            **graphs,
            **({"gpu_memory_utilization": 0.85} if bf16 else {}),
        )
        self._engine, self._make_params = llm.llm_engine, vllm.SamplingParams
        self._params: Any = None
        self._number = 0
        self._rows: dict[str, int] = {}

    def prepare(self, context: int) -> None:
        """Keys and values are paged: one engine serves all cases."""

    def begin(self, most: int, stop: int | None) -> None:
        self._params = {
            "max_tokens": most,
            "temperature": 1.0,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": stop is None,
            "stop_token_ids": None if stop is None else [stop],
        }

    def submit(self, row: int, ids: np.ndarray, seed: int, length: int | None) -> None:
        name = str(self._number)
        self._number += 1
        self._rows[name] = row
        prompt: Any = {"prompt_token_ids": ids.tolist()}
        params = dict(self._params)
        if length is not None:
            params |= {"max_tokens": length, "ignore_eos": True, "stop_token_ids": None}
        # Without a seed of its own: seeds for each row make vLLM draw one row at a time.
        self._engine.add_request(name, prompt, self._make_params(**params))

    def poll(self) -> list[tuple[int, np.ndarray]]:
        found: list[tuple[int, np.ndarray]] = []
        while not found and self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    ids = np.asarray(output.outputs[0].token_ids)
                    found.append((self._rows.pop(output.request_id), ids))
        return found

    def forget(self, row: int) -> None:
        """It keeps pages as long as it has no better use for them."""

    def end(self) -> None:
        assert not self._rows


SIDES = {"moored": MooredSide, "vllm": VllmSide}


def longest_context(lengths: str, options: argparse.Namespace) -> int:
    most = {
        "equal": options.new_tokens,
        "geometric": MOST_TOKENS,
        "turns": TURNS * (MOST_TOKENS + OBSERVATION_TOKENS),
    }
    return options.prompt_tokens + most[lengths]


def write(
    side: MooredSide | VllmSide,
    lengths: str,
    rows: int,
    stop: int,
    options: argparse.Namespace,
    seed: int,
    forced: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """All replies of one call; returns the length of each, by row and turns left.

    `forced` has the same, of another side: those lengths are written.
    """
    vocabulary = SHAPES[options.shape[0]].vocab_size
    # Other prompts in each case: those of an earlier one may still be in a cache.
    rng = np.random.default_rng([seed, LENGTHS.index(lengths), rows])

    def random_ids(count: int) -> np.ndarray:
        return rng.integers(stop + 1, vocabulary, count)

    share = GROUP_SIZE if lengths == "turns" else 1
    prompts = [random_ids(options.prompt_tokens) for _ in range(-(-rows // share))]
    dialogues = {seed * rows + row: prompts[row // share] for row in range(rows)}
    turns = dict.fromkeys(dialogues, 1 if lengths != "turns" else TURNS)
    is_equal = lengths == "equal"
    side.begin(options.new_tokens if is_equal else MOST_TOKENS, None if is_equal else stop)
    written: dict[str, int] = {}

    def submit(row: int) -> None:
        length = None if forced is None else forced[f"{row} {turns[row]}"]
        side.submit(row, dialogues[row], row + turns[row] * 1_000_003, length)

    for row in dialogues:
        submit(row)
    while dialogues:
        for row, reply in side.poll():
            written[f"{row} {turns[row]}"] = len(reply)
            turns[row] -= 1
            if not turns[row]:
                del dialogues[row]
                side.forget(row)
                continue
            dialogues[row] = np.concatenate([dialogues[row], reply, random_ids(OBSERVATION_TOKENS)])
            submit(row)
    side.end()
    return written


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    """One engine on one shape: figures by lengths and rows."""
    (name,), (shape,) = options.engine, options.shape
    _, bf16 = device_of(options)
    figures: dict[str, Any] = {}
    drawn: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(options.model_folder or scratch)
        if options.model_folder is None:
            make_model(shape, Path(folder), bf16=bf16)
        drawn_file = Path(folder) / "lengths.json"
        if drawn_file.exists():
            drawn = json.loads(drawn_file.read_text())
        stop = json.loads((Path(folder) / "config.json").read_text())["eos_token_id"]
        begin = time.perf_counter()
        side = SIDES[name](folder, options)
        figures["start_s"] = time.perf_counter() - begin
        for lengths in options.lengths:
            side.prepare(longest_context(lengths, options))
            for rows in options.rows:
                seconds, tokens, longest = [], [], []
                first = options.warm_up
                begin_at = 0 if name == "moored" else max(0, first - 1)
                for number in range(begin_at, first + options.repeats):
                    case = f"{lengths} {rows} {number}"
                    forced = drawn.get(case) if name == "vllm" else None
                    begin = time.perf_counter()
                    written = write(side, lengths, rows, stop, options, number, forced)
                    seconds.append(time.perf_counter() - begin)
                    tokens.append(sum(written.values()))
                    longest.append(max(written.values()))
                    if name == "moored":
                        drawn[case] = written
                        drawn_file.write_text(json.dumps(drawn))
                warm = len(seconds) - options.repeats
                rates = [t / s for t, s in zip(tokens[warm:], seconds[warm:], strict=True)]
                figures[f"{lengths} {rows}"] = {
                    "tokens_per_s": median(rates),
                    "seconds": seconds[warm:],
                    "tokens": tokens[warm:],
                    "longest": longest[warm:],
                    "same_lengths": forced is not None,
                    "warm_up_s": seconds[:warm],
                }
                if options.child is not None:  # a child that is stopped has not worked for nothing
                    options.child.write_text(json.dumps(figures))
    return figures


def make_model(shape: str, folder: Path, *, bf16: bool) -> None:
    import torch

    write_model(shape, folder, torch.bfloat16 if bf16 else torch.float32, MEAN_TOKENS)


def run_child(
    words: Sequence[str], shape: str, name: str, folder: Path, out: Path | None
) -> dict[str, Any]:
    """The same command for one engine and shape, in a process that ends with its memory.

    Its figures lie beside `out` as soon as there are any: a command that is stopped keeps them.
    """
    file = (out or folder / "figures.json").with_suffix(f".{shape}.{name}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    own = ["--shape", shape, "--engine", name, "--model-folder", str(folder), "--child", str(file)]
    done = subprocess.run([sys.executable, __file__, *words, *own], check=False)
    if done.returncode:
        return {"error": f"exit status {done.returncode}"}
    found = json.loads(file.read_text())
    file.unlink()
    return found


def show(shape: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("lengths, rows", title=shape)
    for name in found:
        table.add_column(f"{name}, tokens/s", justify="right")
    table.add_column("moored / vllm", justify="right")
    cases = dict.fromkeys(case for side in found.values() for case in side if " " in case)
    for case in cases:
        rates = [side.get(case, {}).get("tokens_per_s") for side in found.values()]
        ratio = f"{rates[0] / rates[1]:.2f}" if len(rates) == 2 and all(rates) else ""
        table.add_row(case, *("" if r is None else f"{r:,.0f}" for r in rates), ratio)
    return table


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sampling: moored against vLLM.")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["135m", "0.5b", "3b"])
    parser.add_argument("--engine", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 1024])
    parser.add_argument(
        "--lengths",
        nargs="+",
        choices=LENGTHS,
        default=list(LENGTHS),
    )
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument(
        "--warm-up", type=int, default=3, help="calls before those that count: lengths vary"
    )
    parser.add_argument("--vllm-in-process", action="store_true")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument("--model-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    add_common_options(parser, repeats=3)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = parse_arguments(words)
    if options.child is not None:
        run_side(options)
        return 0
    device, bf16 = device_of(options)
    console, figures = make_console(), {}
    machine = describe_machine(device, bf16=bf16)
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            make_model(shape, folder, bf16=bf16)
            found = figures.setdefault(shape, {})
            for name in (each for each in SIDES if each in options.engine):
                found[name] = run_child(words, shape, name, folder, options.out)
                write_record(options.out, machine, figures)
        console.print(show(shape, found))
    show_machine(console, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
