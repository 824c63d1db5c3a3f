"""Learner ranks as Ray actors, in one placement group: the `Team` of `engine.workers` over Ray.

A rank that dies takes the others with it: they hold the other shards of the same weights. `restart`
starts all of them again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moored.config import Config
from moored.engine.ray.cluster import Cluster, counted, find_modules_as_driver
from moored.engine.ray.weights import Meeting, Packed, pack_weights
from moored.engine.workers.ranks import Rank
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError

if TYPE_CHECKING:
    import torch

    from moored.engine.ray.circle import Sender

ROOM_S = 2.0
"""How long ranks wait for room before another actor has to make some."""
NOTICE_S = 10.0
"""How long Ray may take to tell that a rank died, after another has lost its connection to it."""
LOOK_S = 1.0
STUCK_S = 300.0
"""How long ranks may go on sending weights after a replica was lost."""


class Worker(Protocol):
    """What a host needs of a worker besides the methods that the learner calls."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor | np.ndarray]]: ...


class MakeWorker(Protocol):
    """Joins the ranks that meet at an address, and makes the worker of one of them."""

    def __call__(
        self, config: Config, rank: Rank, address: tuple[str, int], *, trains: bool
    ) -> Worker: ...


class RankHost:
    """The actor of one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._worker: Any = None
        self._sender: Sender | None = None

    def address(self) -> tuple[str, int]:
        """This node, and a port that is free on it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(
        self, make: MakeWorker, config: Config, address: tuple[str, int], *, trains: bool
    ) -> int:
        """Meet the other ranks and build the worker; returns the process id."""
        find_modules_as_driver()
        self._worker = make(config, self._rank, address, trains=trains)
        return os.getpid()

    def call(self, method: str, args: Sequence[Any]) -> Any:
        return getattr(self._worker, method)(*args)

    def packed_weights(self) -> tuple[None, Packed | None]:
        """Whole weights for the object store, from rank 0; all ranks take part."""
        weights = self._worker.weights()
        if self._rank.rank == 0:
            return None, pack_weights(weights)
        for _ in weights:
            pass
        return None, None

    def meeting_place(self) -> tuple[str, int]:
        """Where replicas can meet this rank; the same from now on."""
        if self._sender is None:
            import ray

            from moored.engine.ray.circle import Sender

            self._sender = Sender(ray.util.get_node_ip_address())
        return self._sender.address

    def send_weights(self, meeting: Meeting, receiving: Sequence[Any]) -> bool:
        """Whole weights from rank 0 to a meeting; all ranks take part. False: a member is lost."""
        weights = iter(self._worker.weights())
        is_sent = self._sender is not None and self._sender.send(
            meeting, weights, partial(_check_receiving, receiving)
        )
        for _ in weights:  # the other ranks take part to the end
            pass
        return is_sent


class RayTeam:
    """Workers of ranks 0 to `size` - 1; close it."""

    def __init__(self, cluster: Cluster, config: Config, make: MakeWorker, *, trains: bool) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        # A rank without a GPU must not take one that it sees.
        device = "cpu" if not cluster.learner.gpus else config.engine.device
        engine = config.engine.model_copy(update={"device": device})
        self._config = config.model_copy(update={"engine": engine})
        self._make, self._trains = make, trains
        self.size = config.engine.ray.learners
        self.pids: list[int] = []
        self._hosts: list[Any] = []
        self._group: Any = None
        self.make_room: Callable[[], None] = _do_nothing
        """Called while there is no room for all ranks."""
        self._failure: Exception | None = None
        self._start()

    def _start(self) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._cluster.learner
        self._group = placement_group([needs.bundle()] * self.size, strategy="PACK")
        self._wait_for_room()
        host = self._ray.remote(RankHost)
        for rank in range(self.size):
            place = PlacementGroupSchedulingStrategy(self._group, rank)
            options = {**needs.options(), "scheduling_strategy": place}
            # Ray shows an actor its own GPUs alone: each rank is the only one it sees.
            own = Rank(rank=rank, size=self.size)
            self._hosts.append(host.options(**options).remote(own))
        address = self._results([self._hosts[0].address.remote()])[0]
        self.pids = self._results(
            [
                host.start.remote(self._make, self._config, address, trains=self._trains)
                for host in self._hosts
            ]
        )

    def _wait_for_room(self) -> None:
        patience_s = self._config.engine.ray.patience_s
        deadline_s = time.monotonic() + patience_s
        while not self._has_room(min(ROOM_S, patience_s)):
            if time.monotonic() > deadline_s:
                raise MooredError(
                    f"the cluster had no room for {counted(self.size, 'learner rank')} within "
                    f"{patience_s:g} s; see `ray status`, add nodes, then go on with --resume"
                )
            self.make_room()

    def _has_room(self, wait_s: float) -> bool:
        try:
            return self._group.wait(timeout_seconds=wait_s)
        except Exception as error:  # Ray raises no kind of its own here
            why = str(error).strip().splitlines()[0]
            raise MooredError(
                f"the Ray cluster is gone ({why}); start it again, then go on with --resume"
            ) from error

    def restart(self) -> None:
        """All ranks anew, at the weights that the model was loaded with."""
        self.close()
        self._failure = None
        self._start()

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, /, *args: Any
    ) -> list[Any]:
        self._check_sound()
        own = per_rank or [()] * self.size
        return self._results(
            [
                host.call.remote(method, (*mine, *args))
                for host, mine in zip(self._hosts, own, strict=True)
            ]
        )

    def put_weights(self) -> Any:
        """Weights in the object store; returns the reference, and never sees them."""
        self._check_sound()
        both = [h.packed_weights.options(num_returns=2).remote() for h in self._hosts]
        self._results([done for done, _ in both])
        return both[0][1]

    def meeting_place(self) -> tuple[str, int]:
        """Where replicas meet rank 0."""
        self._check_sound()
        return self._results([self._hosts[0].meeting_place.remote()])[0]

    def send_weights(self, meeting: Meeting, receiving: Sequence[Any]) -> bool:
        """Weights straight to the replicas of a meeting, which make the calls `receiving`; False
        when one of them is lost."""
        self._check_sound()
        # In a list, or each rank would wait for what the calls return.
        calls = [host.send_weights.remote(meeting, list(receiving)) for host in self._hosts]
        return self._results(calls, _Impatience(receiving).check)[0]

    def _check_sound(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _results(self, calls: Sequence[Any], check: Callable[[], None] | None = None) -> list[Any]:
        """What all calls return; `WorkerLost` when a rank died, which others may hang on, or when
        `check` raises it meanwhile."""
        waiting = list(calls)
        while waiting:
            done, waiting = self._ray.wait(waiting, timeout=None if check is None else LOOK_S)
            try:
                if done:
                    self._check(done[0], waiting)
                elif check is not None:
                    check()
            except Exception as error:
                # The others may wait inside the call for ever, so nothing else can be asked.
                self._failure = error if self.size > 1 else None
                raise
        return self._ray.get(list(calls))

    def _check(self, call: Any, others: Sequence[Any]) -> None:
        exceptions = self._ray.exceptions
        try:
            self._ray.get(call)
        except exceptions.RayTaskError as error:
            if self._has_lost_one(others):
                raise WorkerLost("a learner rank died") from None
            cause = error.cause
            raise (cause if isinstance(cause, MooredError) else error) from None
        except exceptions.RayError:
            raise WorkerLost("a learner rank died") from None

    def _has_lost_one(self, calls: Sequence[Any]) -> bool:
        """Did another rank die? Then an error of this one may come of it."""
        deadline_s = time.monotonic() + NOTICE_S
        waiting = list(calls)
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            done, waiting = self._ray.wait(waiting, timeout=left_s)
            for call in done:
                if _is_lost(self._ray, call):
                    return True
        return False

    def close(self) -> None:
        for host in self._hosts:
            self._ray.kill(host)
        self._hosts = []
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None


def _do_nothing() -> None:
    """Nobody else is there yet."""


def _check_receiving(calls: Sequence[Any]) -> None:
    """Asked by rank 0: a replica that has failed is waited for no longer."""
    from moored.engine.ray.circle import MemberLost

    if _has_failed(calls):
        raise MemberLost("a replica is lost")


class _Impatience:
    """Bounds how long ranks may not notice that a replica is lost: they hang, maybe for ever."""

    def __init__(self, receiving: Sequence[Any]) -> None:
        self._receiving = receiving
        self._lost_s: float | None = None

    def check(self) -> None:
        now_s = time.monotonic()
        if self._lost_s is None and _has_failed(self._receiving):
            self._lost_s = now_s
        if self._lost_s is not None and now_s - self._lost_s >= STUCK_S:
            raise WorkerLost("the learner hangs while it sends weights")


def _has_failed(calls: Sequence[Any]) -> bool:
    """Has one of them failed so far?"""
    import ray
    from ray.exceptions import RayError

    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False)
    try:
        ray.get(done)
    except RayError:
        return True
    return False


def _is_lost(ray: Any, call: Any) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError:
        return False
    except ray.exceptions.RayError:
        return True
    return False
