"""Planned against measured: memory and seconds of whole steps of random models.

    python benchmarks/plan.py [--size 0.1 0.5 1.5 3 7] [--algorithm grpo ppo] [--set KEY=VALUE …] \
      [--out FILE]

Random models of real shapes, made on the device, take training steps through the engine: replies
of forced lengths to random prompts, turn by turn; values and log-probabilities; minibatch updates;
publishing. There are no environments. Peak memory is `torch.cuda.max_memory_allocated` of each
phase, and what the sampler's cache has at its end where torch does not count it: models whose
updates use that memory. Seconds are medians over `--repeats` steps after `--warm-up`. A size that
runs out of memory is recorded as such. On a CPU `--size tiny` shows that it works; memory is not
measured there.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import (
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    show_machine,
    synchronize,
    write_record,
)
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moored.config import Config, load_config
from moored.engine.base import Request, SamplingParams, new_session
from moored.engine.fast.sampler import SlotSampler
from moored.engine.gpu import present_gpu
from moored.engine.local import engine as local_engine
from moored.engine.passes import OutOfMemoryError
from moored.models.find import embedded_models
from moored.models.known import KNOWN, Facts
from moored.models.load import LoadedModel
from moored.models.shapes import shape_from_config
from moored.plan import GPUS, Lengths, Plan, known_gpu, plan
from moored.plan.gpus import GIB
from moored.training.samples import LossSample, Sample
from moored.types import Prompt, ScoreRequest

SIZES: dict[str, Facts] = {
    "tiny": Facts("qwen2", 128, 32, 64, 2, 2, 1, 16, True),
    "0.1": KNOWN["HuggingFaceTB/SmolLM2-135M"],
    "0.5": KNOWN["Qwen/Qwen2.5-0.5B"],
    "1.5": KNOWN["Qwen/Qwen2.5-1.5B"],
    "3": KNOWN["Qwen/Qwen2.5-3B"],
    "7": KNOWN["Qwen/Qwen2.5-7B"],
}
"""By billions of parameters."""
PLANNED_PHASES = {
    "rollout": ("prefill", "decode"),
    "scoring": ("advantages",),
    "update": ("update",),
    "publish": ("publish",),
}
"""What a plan calls the seconds of each measured phase."""
PLANNED_MEMORY = {"update": ("reference", "update")}
"""What it calls the memory, where there may be several phases: a reference of a large model scores
at the start of the updates."""


@dataclass(slots=True)
class Measured:
    """Seconds of each repetition and most bytes of each phase."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(
        self, name: str, device: torch.device, *, counts: bool, uncounted: Callable[[], int]
    ) -> Iterator[None]:
        """Measure a block; its seconds only where it `counts`.

        `uncounted` says how many bytes there are at its end that torch does not know of.
        """
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        yield
        synchronize(device)
        if counts:
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        if device.type == "cuda":
            most = torch.cuda.max_memory_allocated(device) + uncounted()
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), most)


class Steps:
    """An engine over a random model, and training steps of given lengths."""

    def __init__(self, config: Config, facts: Facts, lengths: Lengths, device: torch.device):
        self.config, self.lengths, self.device = config, lengths, device
        self.vocabulary = facts.vocab_size
        with _random_model(facts):
            self.engine = local_engine.LocalEngine(config)
        self.rng = np.random.default_rng(0)
        self.measured = Measured()

    def step(self, *, counts: bool) -> None:
        """Roll out, score, update, publish."""

        def phase(name: str):
            return self.measured.phase(
                name, self.device, counts=counts, uncounted=self._uncounted_bytes
            )

        with phase("rollout"):
            samples = self._roll_out()
        with phase("scoring"):
            values = self._score(samples)
        with phase("update"):
            for _ in self.engine.learner.step(self._minibatches(samples, values)):
                pass
        with phase("publish"):
            self.engine.publish()

    def _uncounted_bytes(self) -> int:
        sampler = self.engine.sampler
        return sampler.uncounted_bytes if isinstance(sampler, SlotSampler) else 0

    def _random_ids(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.vocabulary, count)

    def _roll_out(self) -> list[Sample]:
        rollout, lengths = self.config.rollout, self.lengths
        first = [Prompt(self._random_ids(lengths.prompt)) for _ in range(rollout.num_groups)]
        episodes = [_Episode(prompt) for prompt in first for _ in range(rollout.group_size)]
        params = SamplingParams(max_tokens=lengths.reply)
        with closing(self.engine.sampler.stream(params)) as stream:
            by_session = {episode.session: episode for episode in episodes}
            for episode in episodes:
                stream.submit(episode.request())
            while by_session:
                for session, completion in stream.poll():
                    episode = by_session[session]
                    episode.take(completion.token_ids, completion.logprobs)
                    if episode.num_turns == lengths.turns:
                        del by_session[session]
                        stream.end([session])
                        continue
                    episode.see(self._random_ids(lengths.observation))
                    stream.submit(episode.request())
        return [
            episode.sample(index // rollout.group_size, index)
            for index, episode in enumerate(episodes)
        ]

    def _score(self, samples: Sequence[Sample]) -> list[np.ndarray | None]:
        learner = self.engine.learner
        if self.config.algorithm.old_logprobs == "learner":
            learner.score([ScoreRequest(s.prompt, [s.ids_T]) for s in samples])
        if learner.critic is None:
            return [None] * len(samples)
        return [values[:-1] for values in learner.values(samples)]

    def _minibatches(
        self, samples: Sequence[Sample], values: Sequence[np.ndarray | None]
    ) -> list[list[LossSample]]:
        optimizer, found = self.config.optimizer, []
        for _ in range(optimizer.num_epochs):
            order = self.rng.permutation(len(samples))
            for part in np.array_split(order, min(optimizer.num_minibatches, len(samples))):
                total = sum(samples[index].num_loss_tokens for index in part)
                found.append(
                    [self._loss_sample(samples[i], values[i], total) for i in part.tolist()]
                )
        return found

    def _loss_sample(self, sample: Sample, values: np.ndarray | None, total: int) -> LossSample:
        shares = sample.loss_mask_T / total
        return LossSample(
            sample=sample,
            advantages_T=np.where(sample.loss_mask_T, self.rng.normal(size=len(shares)), 0.0),
            weights_T=shares,
            mean_weights_T=shares,
            returns_T=values,
            old_values_T=values,
        )


class _Episode:
    """A prompt, and the replies and observations that follow it."""

    def __init__(self, prompt: Prompt) -> None:
        self.session = new_session()
        self.num_turns = 0
        self._prompt = prompt
        self._pieces: list[tuple[np.ndarray, np.ndarray | None]] = []

    def request(self) -> Request:
        ids = np.concatenate([self._prompt.ids, *(ids for ids, _ in self._pieces)])
        return Request(session=self.session, prompt=Prompt(ids), seed=self.session)

    def take(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._pieces.append((ids, logprobs))
        self.num_turns += 1

    def see(self, ids: np.ndarray) -> None:
        self._pieces.append((ids, None))

    def sample(self, group: int, number: int) -> Sample:
        ids = np.concatenate([ids for ids, _ in self._pieces])
        parts = [np.zeros(len(i)) if logp is None else logp for i, logp in self._pieces]
        mask = np.concatenate([np.full(len(i), logp is not None) for i, logp in self._pieces])
        return Sample(
            prompt=self._prompt,
            ids_T=ids,
            loss_mask_T=mask,
            old_logprobs_T=np.concatenate(parts),
            turn_ends_T=np.zeros(len(ids), dtype=bool),
            rewards_T=np.zeros(len(ids)),
            group=group,
            trajectory=number,
        )


@contextmanager
def _random_model(facts: Facts) -> Iterator[None]:
    """Let the engine load a random model, made on the device, instead of one from files."""
    load = local_engine.load_model

    def make(name: str, device: torch.device, *, exact: bool = True) -> LoadedModel:
        sizes = asdict(facts)
        kind = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        torch.manual_seed(0)
        with torch.device(device):
            dtype = torch.float32 if exact else torch.bfloat16
            model = AutoModelForCausalLM.from_config(kind, dtype=dtype)
        return LoadedModel(model, AutoTokenizer.from_pretrained(embedded_models()["nano"]))

    local_engine.load_model = make
    try:
        yield
    finally:
        local_engine.load_model = load


def make_config(arguments: argparse.Namespace, algorithm: str) -> Config:
    device, bf16 = device_of(arguments)
    context = arguments.prompt_tokens + arguments.turns * arguments.reply_tokens
    context += (arguments.turns - 1) * arguments.observation_tokens
    settings: dict[str, object] = {
        "algorithm": {"name": algorithm},
        "engine": {"device": str(device), "dtype": "bfloat16" if bf16 else "float32"},
        "rollout": {
            "num_groups": arguments.groups,
            "group_size": arguments.group_size,
            "max_response_tokens": arguments.reply_tokens,
            "max_context": max(16, context),
        },
        "optimizer": {"lr": 1e-6, "critic_lr": 1e-5},
        "collapse": {"every": 0},
    }
    return load_config(settings, arguments.set)


def measure(
    config: Config, facts: Facts, lengths: Lengths, arguments: argparse.Namespace
) -> Measured:
    device, _ = device_of(arguments)
    steps = Steps(config, facts, lengths, device)
    for number in range(arguments.warm_up + arguments.repeats):
        steps.step(counts=number >= arguments.warm_up)
    return steps.measured


def compare(found: Plan, measured: Measured) -> dict[str, dict[str, float | None]]:
    """Planned and measured GiB and seconds of each phase."""
    rows: dict[str, dict[str, float | None]] = {}
    planned = found.seconds
    for phase, parts in PLANNED_PHASES.items():
        seconds = measured.seconds.get(phase)
        peak = measured.peak_bytes.get(phase)
        own = [each for each in PLANNED_MEMORY.get(phase, (phase,)) if each in found.memory.phases]
        most = max((found.memory.allocated_bytes(each) for each in own), default=None)
        rows[phase] = {
            "planned_gib": None if most is None else most / GIB,
            "measured_gib": None if peak is None or most is None else peak / GIB,
            "planned_s": _sum_of(planned, parts),
            "measured_s": None if seconds is None else median(seconds),
        }
    return rows


def _sum_of(planned: Mapping[str, float] | None, parts: Sequence[str]) -> float | None:
    """None where one of them is not planned."""
    found = [] if planned is None else [planned[part] for part in parts if part in planned]
    return sum(found) if len(found) == len(parts) else None


def run_case(arguments: argparse.Namespace, size: str, algorithm: str) -> dict[str, object]:
    """Plan and measure one model under one algorithm."""
    config, facts = make_config(arguments, algorithm), SIZES[size]
    lengths = Lengths(
        prompt=arguments.prompt_tokens,
        reply=arguments.reply_tokens,
        turns=arguments.turns,
        observation=arguments.observation_tokens,
    )
    here = present_gpu(config.engine.device)
    gpu = (here and known_gpu(here[0])) or GPUS["h200"]
    found = plan(config, shape_from_config(asdict(facts), size), gpu, lengths)
    case: dict[str, object] = {"size": size, "algorithm": algorithm, "plan": found.record()}
    try:
        measured = measure(config, facts, lengths, arguments)
    except (OutOfMemoryError, torch.OutOfMemoryError) as error:
        return {**case, "error": str(error), "phases": compare(found, Measured())}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {**case, "phases": compare(found, measured), "seconds": measured.seconds}


def show(console: Console, cases: Sequence[dict[str, Any]]) -> None:
    table = Table("model", "phase", "GiB planned", "measured", "s planned", "measured")
    for case in cases:
        for phase, row in case["phases"].items():
            cells = ["" if value is None else f"{value:.3f}" for value in row.values()]
            table.add_row(f"{case['size']} B {case['algorithm']}", phase, *cells)
        if "error" in case:
            table.add_row("", case["error"])
    console.print(table)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Planned against measured memory and seconds.")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["0.1", "0.5", "1.5"])
    parser.add_argument("--algorithm", nargs="+", default=["grpo"], help="grpo, ppo, …")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--reply-tokens", type=int, default=100)
    parser.add_argument("--observation-tokens", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are left out")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="moored options")
    add_common_options(parser, repeats=2)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    device, bf16 = device_of(arguments)
    machine = describe_machine(device, bf16=bf16)
    console = make_console()
    cases = []
    for size in arguments.size:
        for algorithm in arguments.algorithm:
            cases.append(run_case(arguments, size, algorithm))
            # After every case, so that a later one that fails loses nothing.
            write_record(arguments.out, machine, cases)
    show(console, cases)
    show_machine(console, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
