"""A Ray cluster: started on this machine or joined, with enough CPUs and GPUs, and left clean."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moored.config import Config
from moored.config_engine import RayConfig
from moored.errors import ConfigError, require_packages

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 5.0
FREE_TIMEOUT_S = 20.0
"""How long the actors of a driver that was killed may hold on to what they used."""
LEAST_STORE_BYTES = 100_000_000
"""Object store of a Ray that is started here; more than a small model's weights need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one actor takes of the cluster."""

    cpus: float
    gpus: float

    def options(self) -> dict[str, float]:
        """As `ray.remote` takes them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}

    def bundle(self) -> dict[str, float]:
        """As a placement group takes them."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def fits(self, free: Mapping[str, float]) -> bool:
        return free.get("CPU", 0.0) >= self.cpus and free.get("GPU", 0.0) >= self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How many actors of each kind a run starts."""

    learners: int
    replicas: int
    env_actors: int

    def __str__(self) -> str:
        parts = [counted(self.learners, "learner rank"), counted(self.replicas, "replica")]
        if self.env_actors:
            parts = [", ".join(parts), counted(self.env_actors, "environment actor")]
        return " and ".join(parts)


class Cluster:
    """The connection of this process to Ray; close it."""

    def __init__(self, config: Config, *, num_learners: int, num_env_actors: int = 0) -> None:
        require_packages("engine.kind=ray", ("ray", "torch", "transformers", "safetensors"))
        options = config.engine.ray
        self.env = Needs(cpus=options.cpus, gpus=0.0)
        self.num_env_actors_down = num_env_actors
        """Environment actors that have no place yet, or have lost it."""
        replicas = 1 if options.replicas == "auto" else options.replicas
        numbers = Numbers(learners=num_learners, replicas=replicas, env_actors=num_env_actors)
        import ray

        self.ray: Any = ray
        self._init(options)
        try:
            has_gpus = self.totals().get("GPU", 0.0) > 0.0 and config.engine.device != "cpu"
            if not has_gpus and config.engine.device.startswith("cuda"):
                raise ConfigError(
                    f"engine.device = {config.engine.device}, but the cluster has no GPU; add "
                    f"nodes with GPUs, or set engine.device to cpu"
                )
            ways = config.engine.gpus_per_sampler if has_gpus else 0
            self.replica = _needs(options.cpus, options.replica_gpus, ways)
            self.learner = _needs(options.cpus, options.learner_gpus, int(has_gpus))
            self._check_room(numbers)
        except BaseException:
            self.close()
            raise

    def _init(self, options: RayConfig) -> None:
        if options.address is not None:
            check_reachable(options.address)
        how: dict[str, Any] = {
            "address": "local",
            "_node_ip_address": LOOPBACK,
            "include_dashboard": False,
            "num_cpus": num_cpus_here(),
            "object_store_memory": _store_bytes(),
        }
        if options.address is not None:
            how = {"address": options.address}
        variables = {"PYTHONPATH": os.pathsep.join(_own_paths())}
        try:
            with _own_signals(), _loopback_allowed():
                self.ray.init(
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    runtime_env={"env_vars": variables},
                    **how,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(options.address or "local", error) from None

    @property
    def has_whole_gpus(self) -> bool:
        """Ranks and replicas share no GPU, which NCCL would refuse."""
        return self.learner.gpus >= 1 and self.replica.gpus >= 1

    def totals(self) -> dict[str, float]:
        """CPUs and GPUs of all nodes that live."""
        return self.ray.cluster_resources()

    def free(self) -> list[dict[str, float]]:
        """What is free on each node that lives."""
        return [node.free for node in self.nodes()]

    def nodes(self) -> list[Node]:
        """The nodes that live, with what is free on each."""
        from ray._private.state import available_resources_per_node

        free: Mapping[str, dict[str, float]] = available_resources_per_node()
        return [
            Node(
                id=node["NodeID"],
                has_gpus=node["Resources"].get("GPU", 0.0) > 0.0,
                free=dict(free[node["NodeID"]]),
            )
            for node in self.ray.nodes()
            if node["Alive"] and node["NodeID"] in free
        ]

    def free_for_replicas(self) -> list[dict[str, float]]:
        """What is free on each node once all environment actors have a place."""
        nodes = self.nodes()
        taken = Counter(pick_env_nodes(nodes, self.env, self.num_env_actors_down))
        for node in nodes:
            node.free["CPU"] = node.free.get("CPU", 0.0) - taken[node.id] * self.env.cpus
        return [node.free for node in nodes]

    def _check_room(self, numbers: Numbers) -> None:
        """Refuse what the cluster cannot hold; what others still use may become free."""
        asked = [self.learner] * numbers.learners + [self.replica] * numbers.replicas
        asked += [self.env] * numbers.env_actors
        remedy = REMEDY.format("engine.ray.env_actors, " if numbers.env_actors else "")
        self._check_totals(asked, numbers, remedy)
        deadline_s = time.monotonic() + FREE_TIMEOUT_S
        while num_placed(self.free(), asked) < len(asked):
            if time.monotonic() > deadline_s:
                free = _sums(self.free())
                raise ConfigError(
                    f"{_asked_text(asked, numbers)}, but the cluster has only "
                    f"{_amount_text(free)} free, or not together on one node; {remedy}"
                )
            time.sleep(0.2)

    def _check_totals(self, asked: Sequence[Needs], numbers: Numbers, remedy: str) -> None:
        have = self.totals()
        short = sum(need.cpus for need in asked) > have.get("CPU", 0.0)
        short |= sum(need.gpus for need in asked) > have.get("GPU", 0.0)
        if short:
            raise ConfigError(
                f"{_asked_text(asked, numbers)}, but the cluster has {_amount_text(have)}; {remedy}"
            )

    def close(self) -> None:
        """Leave the cluster, which ends the actors of this run; a Ray started here ends too."""
        if self.ray.is_initialized():
            with _own_signals():
                self.ray.shutdown()


REMEDY = "lower {}engine.ray.replicas or engine.ray.learners, or add nodes"


def _needs(cpus: float, gpus: float | None, default: int) -> Needs:
    return Needs(cpus=cpus, gpus=float(default) if gpus is None else gpus)


def num_placed(free: Sequence[Mapping[str, float]], asked: Sequence[Needs]) -> int:
    """How many of `asked` find a node, each on the first with room for it."""
    left = [dict(node) for node in free]
    count = 0
    for need in asked:
        node = next((node for node in left if need.fits(node)), None)
        if node is None:
            continue
        node["CPU"] = node.get("CPU", 0.0) - need.cpus
        node["GPU"] = node.get("GPU", 0.0) - need.gpus
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    id: str
    has_gpus: bool
    free: dict[str, float]


def pick_env_nodes(nodes: Sequence[Node], need: Needs, count: int) -> list[str]:
    """Nodes for so many environment actors, or for as many as there is room for.

    Those without GPUs come first, then those with the fewest of them.
    """
    numbers, left = Counter[str](), {node.id: node.free.get("CPU", 0.0) for node in nodes}
    picked: list[str] = []
    for _ in range(count):
        fitting = [node for node in nodes if left[node.id] >= need.cpus]
        if not fitting:
            break
        best = min(fitting, key=lambda node: (node.has_gpus, numbers[node.id]))
        left[best.id] -= need.cpus
        numbers[best.id] += 1
        picked.append(best.id)
    return picked


def _sums(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}


def _asked_text(asked: Sequence[Needs], numbers: Numbers) -> str:
    total = {"CPU": sum(n.cpus for n in asked), "GPU": sum(n.gpus for n in asked)}
    return f"engine.ray asks for {_amount_text(total)} ({numbers})"


def counted(count: int, what: str) -> str:
    """1 node, 2 nodes."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _amount_text(amount: Mapping[str, float]) -> str:
    return f"{amount.get('CPU', 0.0):g} CPUs and {amount.get('GPU', 0.0):g} GPUs"


def num_cpus_here() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def _own_paths() -> list[str]:
    """Where this process finds modules besides Python's own, first to last, also on other nodes."""
    found = dict.fromkeys(os.path.abspath(path or ".") for path in [*sys.path, ""])
    inside = tuple(os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))
    return [path for path in found if os.path.isdir(path) and not path.startswith(inside)]


def find_modules_as_driver() -> None:
    """In an actor: Ray lets it look in the driver's current folder before all others."""
    driver = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, driver), *sys.path])


def _store_bytes() -> int:
    """A tenth of the memory of this machine: Ray's own default is three times as much."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(LEAST_STORE_BYTES, min(total // 10, 20 * 10**9))


def check_reachable(address: str) -> None:
    """Refuse an address where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ConfigError(
            f"engine.ray.address must be auto or host:port, got {address!r}; `ray status` on the "
            f"cluster's first node says which"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> ConfigError:
    why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ConfigError(
        f"no Ray cluster answers at {address!r} ({why}); start one with `ray start --head`, or "
        f"leave out engine.ray.address"
    )


@contextmanager
def _loopback_allowed() -> Iterator[None]:
    """Keep Ray from replacing a loopback address by one that other machines reach.

    It does so wherever clusters are possible, and then listens on all addresses.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of this process: Ray sets its own for SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
