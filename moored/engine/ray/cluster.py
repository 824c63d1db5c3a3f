"""A Ray cluster: started on this machine or joined, with enough CPUs and GPUs, and left clean."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moored.config import Config
from moored.config_engine import RayConfig
from moored.errors import ConfigError, require_packages

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


class Cluster:
    """The connection of this process to Ray; close it."""

    def __init__(self, config: Config, *, num_learners: int) -> None:
        require_packages("engine.kind=ray", ("ray", "torch", "transformers", "safetensors"))
        options = config.engine.ray
        if options.address is None:
            self._check_this_machine(options, num_learners)
        import ray

        self.ray: Any = ray
        self._init(options)
        try:
            has_gpus = self.totals().get("GPU", 0.0) > 0.0 and config.engine.device != "cpu"
            self.replica = _needs(options.replica_cpus, options.replica_gpus, has_gpus)
            self.learner = _needs(options.learner_cpus, options.learner_gpus, has_gpus)
            num_replicas = 1 if options.replicas == "auto" else options.replicas
            self._check_room(num_learners, num_replicas)
        except BaseException:
            self.close()
            raise

    def _check_this_machine(self, options: RayConfig, num_learners: int) -> None:
        """Refuse more CPUs than there are, before Ray is started here."""
        num_replicas = 1 if options.replicas == "auto" else options.replicas
        cpus = num_learners * options.learner_cpus + num_replicas * options.replica_cpus
        if cpus > num_cpus_here():
            parts = _parts_text(num_learners, num_replicas)
            raise ConfigError(
                f"engine.ray asks for {cpus:g} CPUs ({parts}), but this machine has "
                f"{num_cpus_here()}; lower engine.ray.replicas, engine.ray.replica_cpus or "
                f"engine.ray.learner_cpus"
            )

    def _init(self, options: RayConfig) -> None:
        if options.address is not None:
            check_reachable(options.address)
        how: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": num_cpus_here(),
            "object_store_memory": _store_bytes(),
        }
        if options.address is not None:
            how = {"address": options.address}
        variables = {"PYTHONPATH": os.pathsep.join(_own_paths())}
        try:
            with _own_signals():
                self.ray.init(
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    runtime_env={"env_vars": variables},
                    **how,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(options.address or "local", error) from None

    def totals(self) -> dict[str, float]:
        """CPUs and GPUs of all nodes that live."""
        return self.ray.cluster_resources()

    def free(self) -> list[dict[str, float]]:
        """What is free on each node that lives."""
        from ray._private.state import available_resources_per_node

        alive = {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}
        found: Mapping[str, dict[str, float]] = available_resources_per_node()
        return [dict(free) for node, free in found.items() if node in alive]

    def _check_room(self, num_learners: int, num_replicas: int) -> None:
        """Refuse what the cluster cannot hold; what others still use may become free."""
        asked = [self.learner] * num_learners + [self.replica] * num_replicas
        self._check_totals(asked, num_learners, num_replicas)
        deadline_s = time.monotonic() + FREE_TIMEOUT_S
        while num_placed(self.free(), asked) < len(asked):
            if time.monotonic() > deadline_s:
                free = _sums(self.free())
                raise ConfigError(
                    f"{_asked_text(asked, num_learners, num_replicas)}, but the cluster has only "
                    f"{_amount_text(free)} free, or not together on one node; {REMEDY}"
                )
            time.sleep(0.2)

    def _check_totals(self, asked: Sequence[Needs], num_learners: int, num_replicas: int) -> None:
        have = self.totals()
        short = sum(need.cpus for need in asked) > have.get("CPU", 0.0)
        short |= sum(need.gpus for need in asked) > have.get("GPU", 0.0)
        if short:
            raise ConfigError(
                f"{_asked_text(asked, num_learners, num_replicas)}, but the cluster has "
                f"{_amount_text(have)}; {REMEDY}"
            )

    def close(self) -> None:
        """Leave the cluster, which ends the actors of this run; a Ray started here ends too."""
        if self.ray.is_initialized():
            with _own_signals():
                self.ray.shutdown()


REMEDY = "lower engine.ray.replicas or engine.ray.learners, or add nodes"


def _needs(cpus: float, gpus: float | None, has_gpus: bool) -> Needs:
    return Needs(cpus=cpus, gpus=float(has_gpus) if gpus is None else gpus)


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


def _sums(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}


def _asked_text(asked: Sequence[Needs], num_learners: int, num_replicas: int) -> str:
    total = {"CPU": sum(n.cpus for n in asked), "GPU": sum(n.gpus for n in asked)}
    parts = _parts_text(num_learners, num_replicas)
    return f"engine.ray asks for {_amount_text(total)} ({parts})"


def _parts_text(num_learners: int, num_replicas: int) -> str:
    return f"{counted(num_learners, 'learner rank')} and {counted(num_replicas, 'replica')}"


def counted(count: int, what: str) -> str:
    """1 node, 2 nodes."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _amount_text(amount: Mapping[str, float]) -> str:
    return f"{amount.get('CPU', 0.0):g} CPUs and {amount.get('GPU', 0.0):g} GPUs"


def num_cpus_here() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def _own_paths() -> list[str]:
    """Where this process finds modules besides Python's own; other nodes may have them too."""
    found = dict.fromkeys(os.path.abspath(path or ".") for path in ["", *sys.path])
    inside = tuple(os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))
    return [path for path in found if os.path.isdir(path) and not path.startswith(inside)]


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
