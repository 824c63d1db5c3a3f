"""What connects a driver and its followers, besides the computation: groups of gloo of their own.

One carries calls and results. An alarm line joins the driver and each follower; nothing comes over
it until one of the two ends or dies, which the other hears at once, whatever it waits for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from moored.engine.workers.ranks import Rank
from moored.errors import MooredError

PATIENCE = timedelta(days=30)
"""Followers wait for calls while the driver is busy elsewhere; a death is heard at once."""
COLLECTIVE = timedelta(minutes=30)
"""How long a rank waits for the others inside a call."""
DRIVER = "moored/driver"
"""Key of the ranks' store, under which the driver says whether there will be work."""
WORK, LEAVE = "work", "leave"
GONE = "moored/gone/"
"""Key, with its rank, under which a follower says that it leaves."""
FAREWELL = timedelta(seconds=30)
"""How long the driver waits for that."""
OnLoss = Callable[[int, str], None]
"""Called with the rank that was lost, and why."""


def meet(rank: Rank, says: str = WORK) -> bool:
    """Join the default group of all ranks; False when the driver says to leave."""
    store = _open_store(rank)
    _met.add(rank.rank)
    if rank.rank == 0:
        store.set(DRIVER, says)
    if store.get(DRIVER).decode() == LEAVE:
        _leave_together(store, rank)
        return False
    # NCCL connects when it is first used.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=store, timeout=COLLECTIVE, rank=rank.rank, world_size=rank.size
    )
    return True


def has_met() -> bool:
    """True when this process has met the others, be it that they have parted again."""
    return bool(_met)


_met: set[int] = set()


def _leave_together(store: Any, rank: Rank) -> None:
    """Keep the driver, which may hold the store, until all have read what it says."""
    if rank.rank != 0:
        store.set(f"{GONE}{rank.rank}", "")
        return
    # A follower that died in between has nothing to wait for.
    with contextlib.suppress(RuntimeError):
        store.wait([f"{GONE}{other}" for other in range(1, rank.size)], FAREWELL)


def _open_store(rank: Rank) -> Any:
    try:
        store, _, _ = next(rendezvous("env://", rank.rank, rank.size, timeout=COLLECTIVE))
    except dist.DistNetworkError as error:
        in_use = "EADDRINUSE" in str(error) or "already in use" in str(error)
        raise MooredError(
            f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']}, where ranks should "
            f"meet, {'is in use' if in_use else 'cannot be reached'}; choose another with torchrun "
            f"--master-port"
        ) from error
    store.set_timeout(PATIENCE)
    # Ranks that torchrun starts again find the addresses of those that died in the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"moored/{attempt}", store)


class Lines:
    """The groups of one rank; all ranks have to make theirs."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._calls: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        groups = [
            dist.new_group([0, other], backend="gloo", timeout=PATIENCE)
            for other in range(1, rank.size)
        ]
        peers = range(1, rank.size) if rank.rank == 0 else [0]
        self._alarms: dict[int, Any] = {peer: groups[max(peer, rank.rank) - 1] for peer in peers}

    def hand_out(self, calls: Sequence[tuple[Any, ...]] | None = None) -> tuple[Any, ...]:
        """Give every rank its call; a follower waits for its own."""
        own: list[Any] = [None]
        given = None if calls is None else list(calls)
        dist.scatter_object_list(own, given, group=self._calls)
        return own[0]

    def collect(self, result: object = None) -> list[Any]:
        """What every rank gives, on the driver."""
        found: list[Any] | None = [None] * self.rank.size if self.rank.rank == 0 else None
        dist.gather_object(result, found, group=self._calls)
        return found or []

    def tell(self, why: str | None) -> None:
        """Say over the alarm lines that this rank ends, and why; None for a good end."""
        for peer, group in self._alarms.items():
            dist.send_object_list([why], peer, group=group)

    def watch(self, on_loss: OnLoss) -> list[threading.Thread]:
        """Listen to every alarm line."""
        threads = [
            threading.Thread(target=_listen, args=(peer, group, on_loss), daemon=True)
            for peer, group in self._alarms.items()
        ]
        for thread in threads:
            thread.start()
        return threads


def part(lines: Lines, watchers: Sequence[threading.Thread]) -> None:
    """Leave the other ranks in good order: nobody may miss a farewell by which to end."""
    lines.tell(None)
    for thread in watchers:
        thread.join()
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process at once: its threads may wait for lines that are gone, and torch aborts when
    it is taken down beside them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(peer: int, group: Any, on_loss: OnLoss) -> None:
    heard: list[Any] = [None]
    try:
        dist.recv_object_list(heard, peer, group=group)
    except RuntimeError:
        heard = ["it was killed, or its connection broke"]
    if heard[0] is not None:
        on_loss(peer, heard[0])
