"""Collectives over the links of a cluster, worked out by hand."""

from __future__ import annotations

import pytest

from moored.errors import MooredError
from moored.plan.gpus import GPUS, Gpu
from moored.plan.links import LINK_SHARE, NETWORK_LATENCY_S, NODE_LATENCY_S, make_cluster

H200 = GPUS["h200"]


def test_links_of_a_node_are_nvlink_by_the_data_sheet_and_one_card_for_each_gpu():
    cluster = make_cluster(H200, 20)
    assert (cluster.node_gbs, cluster.network_gbits) == (450.0, 8 * 400.0)
    assert cluster.num_nodes == 3
    assert make_cluster(GPUS["l4"], 4).node_gbs == 32.0


def test_a_gather_moves_what_a_rank_does_not_have():
    cluster = make_cluster(H200, 16)
    # 80 GB in all: 70 of them come over NVLink, in 3 pieces.
    seconds = 70e9 / (LINK_SHARE * 450e9) + 3 * NODE_LATENCY_S
    assert cluster.gather_s(80e9, 8, calls=3) == pytest.approx(seconds)
    # 16 ranks: 3,200 Gbit/s = 400 GB/s of a node are less than NVLink.
    between = 75e9 / (LINK_SHARE * 400e9) + 3 * NETWORK_LATENCY_S
    assert cluster.gather_s(80e9, 16, calls=3) == pytest.approx(between)
    assert cluster.reduce_s(80e9, 16, calls=3) == pytest.approx(2 * between)


def test_one_rank_has_nothing_to_gather():
    assert make_cluster(H200, 2).gather_s(80e9, 1, calls=100) == 0.0


def test_a_slow_network_bounds_what_leaves_a_node():
    cluster = make_cluster(H200, 16, network_gbits=100.0)
    assert cluster.bytes_per_s(8) == pytest.approx(LINK_SHARE * 450e9)
    assert cluster.bytes_per_s(16) == pytest.approx(LINK_SHARE * 12.5e9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_gpus": 0}, "--gpus must be from 1 to 16,384, got 0"),
        ({"num_gpus": 10**10}, "--gpus must be from 1 to 16,384, got 10,000,000,000"),
        ({"gpus_per_node": 0}, "--gpus-per-node must be from 1 to 128, got 0"),
        ({"node_gbs": 0.0}, "--nvlink must be from 0.01 to 1,000,000, got 0"),
        ({"network_gbits": float("nan")}, "--network must be from 0.01 to 1,000,000, got nan"),
        ({"gpu": Gpu("odd", 20.0)}, "the rates of odd are not known; name a GPU of the table"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(given, message):
    with pytest.raises(MooredError, match=message):
        make_cluster(**{"gpu": H200, "num_gpus": 8, **given})
