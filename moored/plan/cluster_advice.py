"""What to change about a cluster on which nothing fits; each piece was planned again and fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from moored.errors import MooredError
from moored.plan.advice import LORA_RANK, Options, with_options, words_of
from moored.plan.layouts import ClusterPlan
from moored.plan.links import MOST_GPUS
from moored.plan.setup import setup_of
from moored.plan.splits import any_fits

NODES = (*range(2, 17), 24, 32, 48, 64, 96, 128)
"""Sizes of larger clusters that are looked at, in nodes."""
PARTS = 16
"""Parts of a node that are looked at, at most about so many."""


def cluster_remedy(found: ClusterPlan) -> str:
    """Another sampler, more groups or GPUs, or adapters: whatever helps, in one sentence."""
    pieces = []
    if found.samplers is not None or found.ways is not None:
        free = replace(found, samplers=None, ways=None)
        if _fits(free):
            pieces.append("leave out --samplers and --tensor-parallel, to have the split chosen")
    sampler = _another_sampler(found)
    if sampler is not None:
        pieces.append(f"set engine.sampler={sampler} (the plain one writes all episodes at once)")
    larger = smallest_cluster(found)
    if larger is not None:
        pieces.append(_larger_text(found, larger))
    if not found.setup.lora_rank and _fits(found, options={"optimizer.lora_rank": LORA_RANK}):
        pieces.append(f"set optimizer.lora_rank={LORA_RANK} (only adapters are trained)")
    if pieces:
        return ", or ".join(pieces)
    return "neither more GPUs of this kind nor adapters help; take a smaller model or larger GPUs"


def _another_sampler(found: ClusterPlan) -> str | None:
    """One that fits where the plain one does not."""
    if found.setup.has_fast_sampler or found.setup.vllm_share:
        return None
    other = "auto" if found.setup.shape.is_fast else "vllm"
    return other if _fits(found, options={"engine.sampler": other}) else None


@dataclass(frozen=True, slots=True)
class Larger:
    """A cluster that fits, and the options that it needs for that."""

    num_gpus: int
    options: Options


def smallest_cluster(found: ClusterPlan) -> Larger | None:
    """The smallest cluster of the same kind that fits, with a group for each GPU if need be.

    From one node on it has whole nodes.
    """
    node, own = found.cluster.gpus_per_node, found.cluster.num_gpus
    part = max(1, node // PARTS)
    sizes = {own, *range(part, node + 1, part), *(node * number for number in NODES)}
    for num_gpus in sorted(size for size in sizes if own <= size <= MOST_GPUS):
        for options in _more_groups(found, num_gpus):
            if _fits(found, num_gpus, options):
                return Larger(num_gpus, options)
    return None


def _more_groups(found: ClusterPlan, num_gpus: int) -> Iterator[Options]:
    """None, then a group for each GPU, with a reasoning for each where the configuration asks."""
    yield {}
    if num_gpus <= found.setup.num_groups:
        return
    groups: Options = {"rollout.num_groups": num_gpus}
    try:
        with_options(found.config, groups)
    except ValidationError:
        groups = {**groups, "collapse.num_pairs": num_gpus}
    yield groups


def _larger_text(found: ClusterPlan, larger: Larger) -> str:
    words = words_of(larger.options)
    if larger.num_gpus == found.cluster.num_gpus:
        return f"set {words}"
    more = f" with {words}" if words else ""
    return f"give it {larger.num_gpus} GPUs (--gpus {larger.num_gpus}){more}"


def _fits(found: ClusterPlan, num_gpus: int | None = None, options: Options | None = None) -> bool:
    cluster = replace(found.cluster, num_gpus=num_gpus or found.cluster.num_gpus)
    try:
        config = with_options(found.config, options or {})
        setup = setup_of(config, found.setup.shape)
        return any_fits(setup, cluster, samplers=found.samplers, ways=found.ways)
    except (MooredError, ValidationError):
        # So few GPUs for the samplers that were given, or options that do not go together.
        return False
