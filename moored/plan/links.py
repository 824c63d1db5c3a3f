"""Links between GPUs, and how long collectives over them take.

No figure here was measured by moored: bandwidths are of data sheets, one direction, and each
assumption names its source. There has been no run on more than one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from moored.errors import MooredError
from moored.plan.gpus import Gpu, check_figure

NODE_GBS: dict[str, float] = {
    "b200": 900.0,
    "h200": 450.0,
    "gh200": 450.0,
    "h100": 450.0,
    "a100-80": 300.0,
    "a100-40": 300.0,
    "h100-pcie": 64.0,
    "rtx-5090": 64.0,
}
"""GB/s of a GPU to others of its node, one direction: NVLink 5, 4 and 3, or PCIe 5."""
PCIE_4_GBS = 32.0
"""Of the other GPUs of the table, which have no NVLink."""
NETWORK_GBITS_PER_GPU = 400.0
"""One ConnectX-7 card (NDR InfiniBand) for each GPU, as in NVIDIA's DGX and HGX H100 and H200."""
LINK_SHARE = 0.8
"""Of the data sheet's bandwidth. On H100 copies between two GPUs of a node reached 376 to 380 of
450 GB/s (github.com/NVIDIA/nccl, issue 1264)."""
MOST_GPUS = 16_384
MOST_GPUS_PER_NODE = 128
"""More are taken for a mistake: plans would take minutes. Llama 3 was trained on 16,384 GPUs."""
NODE_LATENCY_S = 20e-6
"""Of a collective within a node: an assumption."""
NETWORK_LATENCY_S = 50e-6
"""Of a collective between nodes: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8
    node_gbs: float
    """GB/s between GPUs of a node, one direction."""
    network_gbits: float
    """Gbit/s of a node to others, one direction, all its cards together."""

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    def bytes_per_s(self, ranks: int) -> float:
        """How fast a ring of `ranks` neighbouring GPUs moves data.

        Between nodes rings leave a node over all its cards, so its whole network counts.
        """
        within = self.node_gbs * 1e9
        between = self.network_gbits / 8 * 1e9
        return LINK_SHARE * (within if ranks <= self.gpus_per_node else min(within, between))

    def latency_s(self, ranks: int) -> float:
        return NODE_LATENCY_S if ranks <= self.gpus_per_node else NETWORK_LATENCY_S

    def gather_s(self, num_bytes: float, ranks: int, *, calls: int) -> float:
        """All-gather (or reduce-scatter) of `num_bytes` in all, in `calls` pieces, over a ring."""
        if ranks == 1:
            return 0.0
        moved = num_bytes * (ranks - 1) / ranks
        return moved / self.bytes_per_s(ranks) + calls * self.latency_s(ranks)

    def reduce_s(self, num_bytes: float, ranks: int, *, calls: int) -> float:
        """All-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(num_bytes, ranks, calls=calls)


def make_cluster(
    gpu: Gpu,
    num_gpus: int,
    *,
    gpus_per_node: int = 8,
    node_gbs: float | None = None,
    network_gbits: float | None = None,
) -> Cluster:
    """A cluster with the links of its GPUs' data sheets, unless others are given."""
    check_figure("--gpus", 1, MOST_GPUS, num_gpus)
    check_figure("--gpus-per-node", 1, MOST_GPUS_PER_NODE, gpus_per_node)
    for what, value in {"--nvlink": node_gbs, "--network": network_gbits}.items():
        if value is not None:
            check_figure(what, 0.01, 1_000_000.0, value)
    if gpu.tflops is None or gpu.bandwidth_tbs is None:
        raise MooredError(
            f"the rates of {gpu.name} are not known; name a GPU of the table with --gpu, or give "
            f"--memory-gib, --tflops and --bandwidth"
        )
    return Cluster(
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        node_gbs=node_gbs or NODE_GBS.get(gpu.name, PCIE_4_GBS),
        network_gbits=network_gbits or NETWORK_GBITS_PER_GPU * gpus_per_node,
    )
