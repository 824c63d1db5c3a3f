"""What the speed comparisons share: interleaved timing, the plain sampler, the JSON record.

Everything that is compared runs in one process, in turn, so that a slow moment of the machine
affects all sides alike.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from moored.config import load_config
from moored.engine import samplers
from moored.engine.base import LockstepStream, ModelSampler, Request, SamplingParams
from moored.engine.device import pick_device, uses_bf16
from moored.errors import MooredError
from moored.types import Completion, FinishReason

PACKAGES = ("torch", "transformers", "trl", "accelerate", "numpy")


def show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A mistake of the user in one sentence, as commands say it; anything else as Python does."""
    if isinstance(error, MooredError):
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# For every script that imports this one; Python then leaves with exit code 1.
sys.excepthook = show_error


@dataclass(slots=True)
class Timing:
    """Seconds and sampled tokens of repeated calls; the first is the start-up, kept separately."""

    start_up_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the parts of each call, where they are known."""

    def add(self, seconds: float, tokens: int, phases: Mapping[str, float] | None = None) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        for name, part in (phases or {}).items():
            self.phases.setdefault(name, []).append(part)

    def after(self, warm_up: int) -> Timing:
        """The same without its first calls, of which the first is the start-up."""
        phases = {name: parts[warm_up:] for name, parts in self.phases.items()}
        return Timing(self.seconds[0], self.seconds[warm_up:], self.tokens[warm_up:], phases)

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        return median(n / s for n, s in zip(self.tokens, self.seconds, strict=True))

    def record(self) -> dict[str, object]:
        return {
            "median_s": self.median_s,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "tokens_per_s": self.tokens_per_s,
            "start_up_s": self.start_up_s,
            "phases_s": {name: median(parts) for name, parts in self.phases.items()},
            "seconds": self.seconds,
            "tokens": self.tokens,
        }


def timing_table(
    title: str, timings: Mapping[str, Timing], speed_ups: Mapping[str, float]
) -> Table:
    """One row per side of a comparison."""
    table = Table("", title=title)
    for column in ("seconds (min–max)", "tokens/s", "first call s", "speed-up of moored"):
        table.add_column(column, justify="right")
    for name, timing in timings.items():
        table.add_row(
            name,
            f"{timing.median_s:.3f} ({min(timing.seconds):.3f}–{max(timing.seconds):.3f})",
            f"{timing.tokens_per_s:,.0f}",
            f"{timing.start_up_s:.2f}",
            f"{speed_ups[name]:.2f}" if name in speed_ups else "",
        )
    return table


def timed(call: Callable[[], int], device: torch.device) -> tuple[float, int]:
    """Wall seconds until the device is done, and what the call returned."""
    synchronize(device)
    start = time.perf_counter()
    tokens = call()
    synchronize(device)
    return time.perf_counter() - start, tokens


def interleave(
    calls: Mapping[str, Callable[[], int]], repeats: int, device: torch.device
) -> dict[str, Timing]:
    """Time calls that return their number of tokens, in turn: a, b, a, b, …; a warm-up first."""
    timings = {name: Timing() for name in calls}
    for name, call in calls.items():
        timings[name].start_up_s = timed(call, device)[0]
    for _ in range(repeats):
        for name, call in calls.items():
            timings[name].add(*timed(call, device))
    return timings


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PlainSampler:
    """`model.generate` on the whole dialogue, again at every turn: the obvious way to write it.

    It keeps no log-probabilities, which saves it a pass over the vocabulary.
    """

    def __init__(self, model: nn.Module, *, cache: str | None = None) -> None:
        assert isinstance(model, PreTrainedModel)
        self.model = model.eval()
        self.cache = cache
        # `generate` fills gaps of its settings from here; an end of text would stop forced replies.
        self.model.generation_config = GenerationConfig()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        prompts = [request.prompt.ids for request in requests]
        ids, mask = left_padded(prompts, self.model.device)
        output = self.model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids, attention_mask=mask, generation_config=self._settings(params)
        )
        assert isinstance(output, torch.Tensor)
        replies = output[:, ids.shape[1] :].cpu().numpy()
        return [_completion(reply, params.stop_ids) for reply in replies]

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        pass

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        pass

    def _settings(self, params: SamplingParams) -> GenerationConfig:
        settings = GenerationConfig(
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
            eos_token_id=list(params.stop_ids) or None,
            cache_implementation=self.cache,
            do_sample=False,
        )
        if params.temperature:
            settings.update(do_sample=True, temperature=params.temperature, top_k=0, top_p=1.0)
        return settings


def left_padded(
    prompts: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of prompts that end in the same column."""
    width = max(map(len, prompts))
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _completion(reply: np.ndarray, stop_ids: tuple[int, ...]) -> Completion:
    is_stop = np.isin(reply, stop_ids)
    length = int(is_stop.argmax()) + 1 if is_stop.any() else len(reply)
    return Completion(
        token_ids=reply[:length].copy(),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason=FinishReason.STOP if is_stop.any() else FinishReason.LENGTH,
        policy_version=0,
    )


def plain_model(model: nn.Module, *, bf16: bool) -> nn.Module:
    """The same weights in the same precision, in a model of their own."""
    return copy.deepcopy(model).to(torch.bfloat16 if bf16 else torch.float32).requires_grad_(False)


def make_sampler(
    model: nn.Module, *, bf16: bool, max_context: int, shares: bool = False
) -> ModelSampler:
    """The sampler that moored takes for a model."""
    engine = {"dtype": "bfloat16" if bf16 else "float32"}
    # Of a run it is at least 16.
    rollout = {"max_context": max(16, max_context)}
    config = load_config({"engine": engine, "rollout": rollout})
    return samplers.make_sampler(model, config, shares=shares)


def add_common_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=repeats, help="measured rounds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")


def device_of(arguments: argparse.Namespace) -> tuple[torch.device, bool]:
    """Where to run, and whether in bfloat16."""
    device = pick_device(arguments.device)
    return device, uses_bf16(arguments.dtype, device)


def describe_machine(device: torch.device, *, bf16: bool) -> dict[str, object]:
    """Versions and hardware, as far as a reader needs them to judge a figure."""
    versions = {name: _version(name) for name in PACKAGES}
    machine: dict[str, object] = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
        "device": device.type,
        "dtype": "bfloat16" if bf16 else "float32",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return machine


def make_console() -> Console:
    """At least as wide as the tables, also where the output is not a terminal."""
    return Console(width=max(Console().width, 110))


def show_machine(console: Console, machine: Mapping[str, object]) -> None:
    text = ", ".join(f"{key} {value}" for key, value in machine.items())
    console.print(text, style="dim", highlight=False)


def write_record(path: Path | None, machine: Mapping[str, object], figures: object) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine, "figures": figures}, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
