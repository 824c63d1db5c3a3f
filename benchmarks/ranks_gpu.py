"""What one rank of torchrun costs against one process: the update and `publish`, random weights.

    python benchmarks/ranks_gpu.py --shape 0.5b [--layers] [--groups 8 --group-size 16] [--out FILE]

All sides train the same random model on the same samples, in turn and in one process: the local
learner, and the learner of ranks (FSDP2) with one rank. `cost` is how much longer the latter takes.
With `--layers` also that learner with nothing whole during an update, as larger models have it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Timing,
    add_common_options,
    describe_machine,
    device_of,
    interleave,
    make_console,
    make_sampler,
    show_machine,
    timing_table,
    write_record,
)
from sizes import SHAPES, computed_tokens, make_model, make_samples
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh

from moored.config import Config, load_config
from moored.engine.fsdp import whole
from moored.engine.fsdp.learner import ShardedLearner
from moored.engine.local.learner import LocalLearner

SIDES = ("local", "torchrun")
LAYERS = "in layers"


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """The process group of a single rank."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_side(name: str, model: Any, config: Config, options: argparse.Namespace) -> tuple:
    """A learner and a sampler on a model of their own."""
    bf16 = device_of(options)[1]
    if name == "local":
        learner = LocalLearner(model, config, with_critic=options.critic)
        return learner, make_sampler(model, bf16=bf16, max_context=640, shares=True)
    sampler = make_sampler(model, bf16=bf16, max_context=640)
    counts = dist.new_group(backend="gloo")
    assert isinstance(counts, dist.ProcessGroup)
    mesh = init_device_mesh(model.device.type, (1,))
    share = whole.WHOLE_SHARE
    whole.WHOLE_SHARE = 0.0 if name == LAYERS else share
    learner = ShardedLearner(model, config, mesh=mesh, counts=counts, with_critic=options.critic)
    whole.WHOLE_SHARE = share
    return learner, sampler


def measure(options: argparse.Namespace, device: torch.device, bf16: bool) -> dict[str, Any]:
    """Timings of both sides by what was timed."""
    words = {"algorithm": {"kl_coef": 0.001 if options.critic else 0.0, "entropy_coef": 0.001}}
    config = load_config({**words, "engine": {"dtype": options.dtype}}, options.set)
    sides = {
        name: make_side(name, make_model(options.shape, device, bf16=bf16), config, options)
        for name in (*SIDES, *([LAYERS] if options.layers else []))
    }
    samples = make_samples(options, SHAPES[options.shape].vocab_size)
    tokens = computed_tokens(samples)

    def update(learner: Any) -> Callable[[], int]:
        def call() -> int:
            next(learner.step([samples]))
            return tokens

        return call

    def publish(learner: Any, sampler: Any) -> Callable[[], int]:
        def call() -> int:
            sampler.load_weights(learner.weights(), learner.version)
            return 1

        return call

    updates = {name: update(learner) for name, (learner, _) in sides.items()}
    publishes = {name: publish(*side) for name, side in sides.items()}
    interleave(updates, 1, device)  # a second warm-up: kernels are tuned by then
    return {
        "update": interleave(updates, options.repeats, device),
        "publish": interleave(publishes, options.repeats, device),
    }


def cost_of(timings: dict[str, Timing], side: str = "torchrun") -> float:
    """How much longer a rank takes, as a share of the time of one process."""
    return timings[side].median_s / timings["local"].median_s - 1.0


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="what one rank of torchrun costs")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--reply-tokens", type=int, default=800)
    parser.add_argument("--critic", action="store_true", help="with critic and KL")
    parser.add_argument("--layers", action="store_true", help="also with nothing held whole")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options")
    add_common_options(parser, repeats=5)
    options = parser.parse_args(words)
    device, bf16 = device_of(options)
    console = make_console()
    with one_rank(device):
        found = measure(options, device, bf16)
    figures = {}
    for what, timings in found.items():
        console.print(timing_table(f"{options.shape}: {what}", timings, {}))
        figures[what] = {name: timing.record() for name, timing in timings.items()}
        figures[what]["cost"] = cost_of(timings)
        for side in list(timings)[1:]:
            cost = f"{cost_of(timings, side):+.1%}"
            console.print(f"{what}: one rank ({side}) takes {cost}", highlight=False)
    machine = describe_machine(device, bf16=bf16)
    show_machine(console, machine)
    write_record(options.out, machine, {options.shape: figures})


if __name__ == "__main__":
    main()
