"""What to change about a cluster on which nothing fits; each piece was planned again and fits."""

from __future__ import annotations

from dataclasses import replace

from moored.errors import MooredError
from moored.plan.advice import LORA_RANK, Options, with_options
from moored.plan.cluster import plan_cluster
from moored.plan.layouts import ClusterPlan

NODES = (*range(2, 17), 24, 32, 48, 64, 96, 128)
"""Sizes of larger clusters that are looked at, in nodes."""


def cluster_remedy(found: ClusterPlan) -> str:
    """More groups, more GPUs, or adapters: whatever helps, in one sentence."""
    pieces = []
    if found.samplers is not None or found.ways is not None:
        free = replace(found, samplers=None, ways=None)
        if _fits(free):
            pieces.append("leave out --samplers and --tensor-parallel, to have the split chosen")
    num_gpus = smallest_cluster(found)
    if num_gpus is not None:
        more = "" if _fits(found, num_gpus) else f" with rollout.num_groups={num_gpus}"
        pieces.append(f"give it {num_gpus} GPUs (--gpus {num_gpus}){more}")
    if not found.setup.lora_rank and _fits(found, options={"optimizer.lora_rank": LORA_RANK}):
        pieces.append(f"set optimizer.lora_rank={LORA_RANK} (only adapters are trained)")
    if pieces:
        return ", or ".join(pieces)
    return "neither more GPUs of this kind nor adapters help; take a smaller model or larger GPUs"


def smallest_cluster(found: ClusterPlan) -> int | None:
    """GPUs of the smallest cluster of the same kind that fits, with a group for each if need be.

    From one node on it has whole nodes.
    """
    node, own = found.cluster.gpus_per_node, found.cluster.num_gpus
    sizes = [*range(1, node + 1), *(node * number for number in NODES)]
    for num_gpus in sizes:
        if num_gpus < own:
            continue
        groups = max(num_gpus, found.setup.num_groups)
        if _fits(found, num_gpus, {"rollout.num_groups": groups}):
            return num_gpus
    return None


def _fits(found: ClusterPlan, num_gpus: int | None = None, options: Options | None = None) -> bool:
    cluster = replace(found.cluster, num_gpus=num_gpus or found.cluster.num_gpus)
    config = with_options(found.config, options or {})
    try:
        planned = plan_cluster(
            config,
            found.setup.shape,
            cluster,
            found.lengths,
            samplers=found.samplers,
            ways=found.ways,
        )
    except MooredError:
        # So few GPUs for the samplers that were given.
        return False
    return planned.fits
