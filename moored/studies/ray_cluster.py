"""Runs of a study on a Ray cluster: each in an actor, on whichever node has a core or a GPU free.

All nodes must see the folder of the study under the same path. When the driver dies, Ray ends the
actors, and their runs save and stop as those of a killed study on one machine do.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moored.errors import ConfigError, require_packages
from moored.studies.execute import Launch, launch_here
from moored.studies.jobs import Jobs

LOST_NODE_CODE = 255
"""Exit code of a run whose node or actor died; its log ends where it did."""
CONNECT_TIMEOUT_S = 5.0


class _Host:
    """Holds one run on a node of the cluster."""

    def __init__(self, words: Sequence[str], folder: str, log: str) -> None:
        os.chdir(folder)
        self.process = launch_here(words, Path(log))

    def wait(self) -> int:
        return self.process.wait()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)


class _RayProcess:
    """A run on the cluster; it may still wait for a place on a node."""

    def __init__(self, ray: Any, host: Any) -> None:
        self._ray, self._host = ray, host
        self._end = host.wait.remote()

    def poll(self) -> int | None:
        ready, _ = self._ray.wait([self._end], timeout=0)
        return self._code() if ready else None

    def wait(self, timeout: float | None = None) -> int:
        ready, _ = self._ray.wait([self._end], timeout=timeout)
        if not ready:
            raise subprocess.TimeoutExpired("moored train", timeout or 0.0)
        return self._code()

    def send_signal(self, sig: int) -> None:
        self._host.send_signal.remote(sig)

    def kill(self) -> None:
        self._ray.kill(self._host)

    def _code(self) -> int:
        try:
            return self._ray.get(self._end)
        except self._ray.exceptions.RayActorError:
            return LOST_NODE_CODE


@contextmanager
def on_cluster(address: str, *, uses_gpu: bool) -> Iterator[tuple[Jobs, Launch]]:
    """As many runs as a Ray cluster has GPUs, or cores where runs use none; and what starts one."""
    require_packages("a study on a Ray cluster", ("ray",))
    import ray

    _check_reachable(address)
    paths = os.environ.get("PYTHONPATH", "")
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )
    except ConnectionError as error:
        raise _no_cluster(address, error) from None
    resources = ray.cluster_resources()
    kind = "GPU" if uses_gpu and resources.get("GPU") else "CPU"
    needs = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1}

    def launch(words: Sequence[str], log: Path) -> _RayProcess:
        # Two threads: one waits for the run, the other passes signals on.
        host = ray.remote(_Host).options(max_concurrency=2, **needs)
        return _RayProcess(ray, host.remote(list(words), os.getcwd(), str(log)))

    try:
        yield (
            Jobs(max(int(resources.get(kind, 1)), 1), f"one per {kind} of the Ray cluster"),
            launch,
        )
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0]}); start one with "
        f"`ray start --head`, or leave out --ray"
    )
