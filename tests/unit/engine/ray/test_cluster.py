"""What is refused before anything is started, and that nothing stays behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moored.config import load_config
from moored.engine.build import build_engine
from moored.engine.ray.cluster import Cluster, Needs, Node, num_placed, pick_env_nodes
from moored.errors import MooredError

pytestmark = pytest.mark.cluster

CPU = Needs(cpus=1.0, gpus=0.0)


def refusal(**options: object) -> str:
    config = load_config({"engine": {"kind": "ray", "ray": options}})
    with pytest.raises(MooredError) as found:
        build_engine(config)
    return str(found.value)


def test_ray_that_is_missing_is_one_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else name)
    assert refusal() == (
        "engine.kind=ray needs packages that are not installed (ray); run: pip install "
        "'moored[ray]'"
    )


def test_a_cluster_that_does_not_answer_is_one_sentence():
    pytest.importorskip("ray")
    text = refusal(address="127.0.0.1:1")
    assert text.startswith("no Ray cluster answers at '127.0.0.1:1'")
    assert "ray start --head" in text


def test_an_address_that_is_none_is_one_sentence():
    pytest.importorskip("ray")
    assert refusal(address="there").startswith(
        "engine.ray.address must be auto or host:port, got 'there'"
    )


def test_more_ranks_than_groups_are_refused_before_ray_is_started():
    ray = pytest.importorskip("ray")
    assert "9 ranks share 8 groups" in refusal(learners=9)
    assert not ray.is_initialized()


def test_more_cpus_than_this_machine_has_are_refused_and_its_ray_is_ended(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("moored.engine.ray.cluster.num_cpus_here", lambda: 2)
    assert "but the cluster has 2 CPUs" in refusal(replicas=2)
    assert not ray.is_initialized()


def test_more_environment_actors_than_a_cluster_has_cpus_are_one_sentence(ray_cluster):
    assert refusal(address=ray_cluster.address, env_actors=9) == (
        "engine.ray asks for 11 CPUs and 0 GPUs (1 learner rank, 1 replica and 9 environment "
        "actors), but the cluster has 4 CPUs and 0 GPUs; lower engine.ray.env_actors, "
        "engine.ray.replicas or engine.ray.learners, or add nodes"
    )


def test_too_few_cpus_or_gpus_are_told_in_numbers_and_the_cluster_is_left(ray_cluster):
    import ray

    address = ray_cluster.address
    assert refusal(address=address, replicas=7) == (
        "engine.ray asks for 8 CPUs and 0 GPUs (1 learner rank and 7 replicas), but the "
        "cluster has 4 CPUs and 0 GPUs; lower engine.ray.replicas or engine.ray.learners, or add "
        "nodes"
    )
    assert "2 CPUs and 1 GPUs" in refusal(address=address, replica_gpus=1)
    assert not ray.is_initialized()


LISTENERS = """
import psutil
from moored.config import load_config
from moored.engine.ray.cluster import Cluster

config = load_config({"engine": {"kind": "ray", "ray": {"cpus": 0.5}}})
cluster = Cluster(config, num_learners=1)
me = psutil.Process()
for process in [me, *me.children(recursive=True)]:
    for found in process.net_connections("inet"):
        if found.status == psutil.CONN_LISTEN:
            print(found.laddr.ip)
cluster.close()
"""


def test_a_ray_that_is_started_here_is_reached_from_this_machine_only():
    pytest.importorskip("ray")
    pytest.importorskip("psutil")
    shown = subprocess.run(
        [sys.executable, "-c", LISTENERS], capture_output=True, text=True, check=True
    )
    addresses = shown.stdout.split()
    assert len(addresses) > 3 and set(addresses) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_a_gpu_that_no_node_has_is_told_instead_of_computing_on_a_cpu(ray_cluster):
    options = {"address": ray_cluster.address}
    config = load_config({"engine": {"kind": "ray", "device": "cuda", "ray": options}})
    with pytest.raises(MooredError, match=r"engine.device = cuda, but the cluster has no GPU"):
        build_engine(config)


def test_a_replica_that_fits_no_single_node_is_refused(ray_cluster, monkeypatch):
    monkeypatch.setattr("moored.engine.ray.cluster.FREE_TIMEOUT_S", 0.0)
    # Two nodes with 2 CPUs each.
    text = refusal(address=ray_cluster.address, replicas=2, cpus=1.2)
    assert "only 4 CPUs and 0 GPUs free, or not together on one node" in text


def test_actors_are_placed_on_nodes_one_by_one():
    free = [{"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert num_placed(free, [CPU] * 5) == 3
    assert num_placed(free, [Needs(cpus=1.0, gpus=1.0)] * 2) == 1
    assert num_placed([], [CPU]) == 0


def test_environment_actors_are_spread_over_nodes_without_gpus_first():
    nodes = [
        Node(id="gpu", has_gpus=True, free={"CPU": 8.0, "GPU": 1.0}),
        Node(id="a", has_gpus=False, free={"CPU": 2.0}),
        Node(id="b", has_gpus=False, free={"CPU": 2.0}),
    ]
    assert pick_env_nodes(nodes, CPU, 5) == ["a", "b", "a", "b", "gpu"]
    assert pick_env_nodes(nodes[1:], CPU, 9) == ["a", "b", "a", "b"]


def test_a_replica_takes_a_gpu_for_each_part_of_its_model(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(Cluster, "_init", lambda self, options: None)
    monkeypatch.setattr(Cluster, "totals", lambda self: {"CPU": 64.0, "GPU": 8.0})
    monkeypatch.setattr(Cluster, "_check_room", lambda self, numbers: None)
    words = ["engine.kind=ray", "engine.sampler=vllm", "engine.vllm.tensor_parallel=2"]
    cluster = Cluster(load_config({}, words), num_learners=1)
    assert cluster.replica.bundle() == {"CPU": 1.0, "GPU": 2.0}
    assert cluster.learner.bundle() == {"CPU": 1.0, "GPU": 1.0}
    chosen = Cluster(load_config({}, [*words, "engine.ray.replica_gpus=4"]), num_learners=1)
    assert chosen.replica.gpus == 4.0
