"""The RayJob manifest: the fields that KubeRay asks for, and what is refused."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from moored.errors import MooredError
from moored.launch import Claim, PodOptions, Resources, parse_claim, ray_job
from tests.unit.launch.test_shell import job

OPTIONS: dict[str, Any] = {"image": "registry.example/moored:1", "claim": Claim("runs", "/shared")}


def manifest(changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Written and read again."""
    own = job(**{"engine": "ray", "resources": Resources(nodes=4), **(changes or {})})
    return yaml.safe_load(yaml.safe_dump(ray_job(own, PodOptions(**{**OPTIONS, **options}))))


def test_a_ray_job_has_the_fields_that_kuberay_asks_for():
    found = manifest(namespace="research")
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    assert found["metadata"] == {"name": "sokoban-grpo", "namespace": "research"}
    spec = found["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["groupName"] == "workers"
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 4]
    for group in (cluster["headGroupSpec"], workers):
        # KubeRay wants strings here.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "registry.example/moored:1"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert volumes == set(mounts)


def test_its_command_is_that_of_the_driver():
    words = shlex.split(manifest()["spec"]["entrypoint"])
    assert words == ["python", "-m", "moored", *job(engine="ray").command()]


def test_workers_have_the_gpus_and_the_head_has_none():
    cluster = manifest()["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    head, worker = (
        group["template"]["spec"]["containers"][0]["resources"]
        for group in (cluster["headGroupSpec"], workers)
    )
    assert worker["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 8}
    assert worker["requests"] == worker["limits"]
    assert "nvidia.com/gpu" not in head["limits"]
    # Actors must not land beside the driver.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_nodes_without_gpus_ask_for_none():
    cpu = manifest({"resources": Resources(nodes=1, gpus_per_node=0, cpus_per_node=4)})
    (workers,) = cpu["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "4", "memory": "64Gi"}


def test_a_file_of_the_volume_may_be_named():
    words = manifest({"words": ("/shared/mine.yaml",)})["spec"]["entrypoint"].split()
    assert "/shared/mine.yaml" in words


def test_a_claim_is_a_name_and_a_mount():
    assert parse_claim("runs:/shared/runs") == Claim("runs", "/shared/runs")
    for text in ("runs", "runs:shared", ":/shared", "Runs:/shared"):
        with pytest.raises(MooredError, match="--claim"):
            parse_claim(text)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"run": "/tmp/x"}, {}, "--run /tmp/x is not on the volume that is mounted at /shared"),
        ({"run": "runs/x"}, {}, "--run 'runs/x' is relative"),
        ({"words": ("x=$(id)",)}, {}, "would read as its own"),
        (
            {"words": ("mine.yaml",)},
            {},
            "mine.yaml is a file of this folder, which pods",
        ),
        ({}, {"image": "a b"}, "--image cannot be 'a b'; give something like registry.example"),
        ({}, {"memory": "much"}, "--memory cannot be 'much'; give something like 64Gi"),
        ({}, {"namespace": "My Space"}, "--namespace must be lower-case letters, digits and '-'"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(changes, options, message):
    with pytest.raises(MooredError, match=message):
        manifest(changes, **options)
