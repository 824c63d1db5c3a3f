"""A RayJob for KubeRay: a head with the driver, workers with the GPUs, one shared volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from moored.errors import MooredError
from moored.launch.job import (
    PYTHON,
    Job,
    check_name,
    check_shared_path,
    check_value,
    check_words,
)

IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@-]*"
QUANTITY = r"\d+(\.\d+)?([KMGT]i?)?"
DEFAULT_CPUS, DEFAULT_MEMORY = 8, "64Gi"


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim and where it is mounted."""

    name: str
    mount: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """What pods are made of."""

    image: str
    """With moored[ray] installed."""
    claim: Claim
    namespace: str | None = None
    memory: str = DEFAULT_MEMORY
    """Of a pod."""
    shared_memory: str = "32Gi"
    """For Ray's object store, which weights go through."""


def parse_claim(text: str) -> Claim:
    """`NAME:/mount`."""
    name, sign, mount = text.partition(":")
    if not sign or not PurePosixPath(mount).is_absolute():
        raise MooredError(
            f"--claim must be the name of a PersistentVolumeClaim and where it is mounted, such as "
            f"runs:/runs; got {text!r}"
        )
    check_words([mount], for_shell=False)
    return Claim(check_name("the name of --claim", name), mount)


def ray_job(job: Job, options: PodOptions) -> dict[str, object]:
    """The manifest; its cluster ends with the job."""
    check_words([*job.words, job.run], for_shell=False)
    check_shared_path(job.run)
    _check_files(job.words)
    check_value("--image", options.image, IMAGE, "registry.example/moored:1")
    check_value("--memory", options.memory, QUANTITY, "64Gi")
    mount = PurePosixPath(options.claim.mount)
    if not PurePosixPath(job.run).is_relative_to(mount):
        raise MooredError(
            f"--run {job.run} is not on the volume that is mounted at {mount}, so it would be lost "
            f"with its pod; give a path below {mount}"
        )
    metadata = {"name": job.name}
    if options.namespace is not None:
        metadata["namespace"] = check_name("--namespace", options.namespace)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": " ".join([*PYTHON, *job.command()]),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": _head(job, options),
                "workerGroupSpecs": [_workers(job, options)],
            },
        },
    }


def _check_files(words: Sequence[str]) -> None:
    """A pod has none of the files that lie beside the user."""
    for word in words:
        is_file = "=" not in word and word.endswith((".yaml", ".yml"))
        if is_file and not PurePosixPath(word).is_absolute():
            raise MooredError(
                f"{word} is a file of this folder, which pods do not see; give the path that it "
                f"has on the volume, or its options one by one"
            )


def _head(job: Job, options: PodOptions) -> dict[str, object]:
    """The driver is here, with the environments; neither samplers nor learners."""
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", "num-gpus": "0"},
        "template": _pod("ray-head", job, options, num_gpus=0),
    }


def _workers(job: Job, options: PodOptions) -> dict[str, object]:
    nodes = job.resources.nodes
    return {
        "groupName": "workers",
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "rayStartParams": {},
        "template": _pod("ray-worker", job, options, num_gpus=job.resources.gpus_per_node),
    }


def _pod(name: str, job: Job, options: PodOptions, *, num_gpus: int) -> dict[str, object]:
    cpus = job.resources.cpus_per_node or DEFAULT_CPUS
    limits: dict[str, object] = {"cpu": str(cpus), "memory": options.memory}
    if num_gpus:
        limits["nvidia.com/gpu"] = num_gpus
    container: dict[str, object] = {
        "name": name,
        "image": options.image,
        "resources": {"requests": dict(limits), "limits": limits},
        "volumeMounts": [
            {"name": "shared", "mountPath": options.claim.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    shm = {"medium": "Memory", "sizeLimit": options.shared_memory}
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim.name}},
        {"name": "shm", "emptyDir": shm},
    ]
    return {"spec": {"containers": [container], "volumes": volumes}}
