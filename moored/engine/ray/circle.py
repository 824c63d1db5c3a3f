"""Weights straight from the learner's rank 0 to the replicas, without Ray's object store.

Both sides form a circle, a process group of their own: NCCL between GPUs, gloo through main memory
otherwise. Weights go in pieces, each behind a list of what is in it. Replicas that come or die need
another circle.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # pyright: ignore
from torch.nn.functional import pad

from moored.engine.ray.cluster import LOOPBACK
from moored.engine.ray.weights import SENDER, Meeting
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError

PIECE_BYTES = 2**28
ALIGNMENT_BYTES = 16
"""Tensors of any type may begin at a multiple of it."""
PATIENCE = timedelta(minutes=5)
"""How long the sender waits for a replica; a replica waits for the sender twice as long, so that
one that hangs does not cost the others."""
LOOK_S = 0.0005
GO, OFF = "go", "off"
CHECK_S = 0.5
"""How long the sender waits before it asks whether a replica was lost."""

Weights = Iterable[tuple[str, torch.Tensor | np.ndarray]]
Check = Callable[[], None]
"""Raises `MemberLost` when a member is gone."""


class MemberLost(WorkerLost):
    """A circle is broken."""


class CalledOff(MooredError):
    """A member was lost before anything was sent; the others are as they were."""


class Circle:
    """A group that meets again and again; all of its members make it at the same time."""

    def __init__(self, meeting: Meeting, store: Any) -> None:
        self.name = meeting.circle
        self._member, self._size, self._on_gpus = meeting.member, meeting.size, meeting.on_gpus
        cuda = torch.device("cuda", torch.cuda.current_device()) if meeting.on_gpus else None
        self._device = cuda or torch.device("cpu")
        self._store = PrefixStore(meeting.circle, store)
        self._group: Any = None
        self._check: Check = _trust
        self._patience = PATIENCE if meeting.member == SENDER else 2 * PATIENCE
        self._last: int | None = None

    def gather(self, number: int, check: Check) -> None:
        """Return when all members are here for this round, so that nobody waits for a lost one."""
        self._check = check
        with _broken_circles():
            if self._member == SENDER:
                self._call_in(number)
            else:
                self._store.set(f"{number}/{self._member}", "")
                self._store.wait([f"{number}/call"], self._patience)
                if self._store.get(f"{number}/call").decode() != GO:
                    raise CalledOff("a replica is lost")
            if self._group is None:
                self._group = self._make_group()

    def _make_group(self) -> Any:
        """In a thread: where a member is lost by now, it may come back late (gloo) or never (NCCL,
        which connects with the first broadcast)."""
        made: Future[Any] = Future()

        def make() -> None:
            try:
                kind = "ProcessGroupNCCL" if self._on_gpus else "ProcessGroupGloo"
                keys = PrefixStore("group", self._store)
                with _own_errors() if self._on_gpus else nullcontext():
                    group = getattr(distributed_c10d, kind)(
                        keys, self._member, self._size, timeout=self._patience
                    )
                first = torch.zeros(1, device=self._device)
                group.broadcast([first], _from_sender()).wait()
                made.set_result(group)
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=make, daemon=True).start()
        self._wait(made.done)
        return made.result()

    def _call_in(self, number: int) -> None:
        keys = [f"{number}/{member}" for member in range(SENDER + 1, self._size)]
        call = OFF
        try:
            self._wait(lambda: self._store.check(keys))
            call = GO
        finally:
            self._store.set(f"{number}/call", call)
            for key in keys:
                self._store.delete_key(key)
        if self._last is not None:  # all have read it, since they are here again
            self._store.delete_key(f"{self._last}/call")
        self._last = number

    def _wait(self, is_done: Callable[[], bool]) -> None:
        start_s = asked_s = time.monotonic()
        while not is_done():
            time.sleep(LOOK_S)
            now_s = time.monotonic()
            if now_s - start_s > self._patience.total_seconds():
                raise MemberLost(f"no answer within {self._patience.total_seconds():g} s")
            if now_s - asked_s > CHECK_S:
                self._check()
                asked_s = time.monotonic()

    def _pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the sender gives, to all; the others give a place for it."""
        with _broken_circles():
            work = self._group.broadcast([tensor], _from_sender())
            self._wait(work.is_completed)
            work.wait()
        return tensor

    def send(self, weights: Weights) -> None:
        for some in _pieces(weights):
            given = [_as_bytes(tensor, self._device) for _, tensor in some]
            listed = [
                (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), len(raw))
                for (name, tensor), raw in zip(some, given, strict=True)
            ]
            self._send_list(pickle.dumps(listed))
            self._pass_on(torch.cat(given))
        self._send_list(b"")

    def _send_list(self, packed: bytes) -> None:
        self._pass_on(torch.tensor([len(packed)], device=self._device))
        if packed:
            self._pass_on(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self._device))

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is sent; a tensor is a view of its piece, which is not used again."""
        while size := int(self._pass_on(torch.zeros(1, dtype=torch.int64, device=self._device))):
            packed = self._pass_on(self._room(size)).cpu().numpy().tobytes()
            listed = pickle.loads(packed)  # from our own learner
            piece, at = self._pass_on(self._room(sum(length for *_, length in listed))), 0
            for name, shape, kind, length in listed:
                dtype = getattr(torch, kind)
                num_bytes = int(np.prod(shape)) * dtype.itemsize
                yield name, piece[at : at + num_bytes].view(dtype).reshape(shape)
                at += length

    def _room(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def leave(self) -> None:
        """End what is under way; others may hear of it, or have to be ended."""
        if self._group is not None:
            with suppress(RuntimeError, NotImplementedError):
                self._group.abort()


def listening_fd(host: str, port: int) -> int | None:
    """A socket for a store that only this machine should reach: by itself it listens everywhere."""
    return socket.create_server((host, port)).detach() if host == LOOPBACK else None


class Sender:
    """The learner's rank 0, which all circles meet at."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=PATIENCE,
            master_listen_fd=listening_fd(host, 0),
        )
        self.address = host, self._store.port
        self._circle: Circle | None = None

    def send(self, meeting: Meeting, weights: Weights, check: Check) -> bool:
        """False when a member was lost before all was sent."""
        if self._circle is None or self._circle.name != meeting.circle:
            self._leave()
            self._circle = Circle(meeting, self._store)
        is_sent = False
        try:
            self._circle.gather(meeting.round, check)
            self._circle.send(weights)
            is_sent = True
        except MemberLost:
            return False
        finally:
            if not is_sent:
                self._leave()
        return True

    def _leave(self) -> None:
        if self._circle is not None:
            self._circle.leave()
            self._circle = None


class Receiver:
    """A replica."""

    def __init__(self) -> None:
        self._circle: Circle | None = None

    def weights(self, meeting: Meeting) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is sent; `MemberLost` where that is not all there is."""
        if self._circle is None or self._circle.name != meeting.circle:
            if self._circle is not None:
                self._circle.leave()
            with _broken_circles():
                store = TCPStore(*meeting.address, is_master=False, timeout=PATIENCE)
            self._circle = Circle(meeting, store)
        self._circle.gather(meeting.round, _trust)
        return self._circle.receive()


@contextmanager
def _broken_circles() -> Iterator[None]:
    """What torch raises when a connection breaks, or nobody answers."""
    try:
        yield
    except RuntimeError as error:
        raise MemberLost(f"weights did not come through: {error}") from error


@contextmanager
def _own_errors() -> Iterator[None]:
    """Groups that are made meanwhile raise NCCL's errors where they are waited for; those of others
    have a thread that ends the process, and a lost replica would cost the learner."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _from_sender() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = SENDER
    return options


def _trust() -> None:
    """A replica asks nobody: when weights stop coming, the driver ends it."""


def _pieces(weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
    some, size = [], 0
    for name, weight in weights:
        tensor = torch.as_tensor(weight).detach()
        some.append((name, tensor))
        size += tensor.nbytes
        if size >= PIECE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _as_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """(bytes,) filled up to a multiple of the alignment."""
    raw = tensor.to(device).contiguous().reshape(-1).view(torch.uint8)
    return pad(raw, (0, -len(raw) % ALIGNMENT_BYTES))
