"""Weights straight from the learner's rank 0 to the replicas, without Ray's object store.

Both sides form a circle, a process group of their own: NCCL between GPUs, gloo through main memory
otherwise. Weights go in pieces, each behind a list of what is in it. Replicas that come or die need
another circle.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # pyright: ignore
from torch.nn.functional import pad

from moored.engine.ray.weights import SENDER, Meeting
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError

PIECE_BYTES = 2**28
ALIGNMENT_BYTES = 16
"""Tensors of any type may begin at a multiple of it."""
PATIENCE = timedelta(minutes=5)
"""How long a replica waits for the others, or for the next piece."""
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

    def gather(self, number: int, check: Check) -> None:
        """Return when all members are here for this round, so that nobody waits for a lost one."""
        self._check = check
        with _broken_circles():
            if self._member == SENDER:
                self._call_in(number)
            else:
                self._store.set(f"{number}/{self._member}", "")
                self._store.wait([f"{number}/call"], PATIENCE)
                if self._store.get(f"{number}/call").decode() != GO:
                    raise CalledOff("a replica is lost")
            if self._group is None:
                kind = "ProcessGroupNCCL" if self._on_gpus else "ProcessGroupGloo"
                make, keys = getattr(distributed_c10d, kind), PrefixStore("group", self._store)
                self._group = make(keys, self._member, self._size, timeout=PATIENCE)

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

    def _wait(self, is_done: Callable[[], bool]) -> None:
        asked_s = time.monotonic()
        while not is_done():
            time.sleep(LOOK_S)
            if time.monotonic() - asked_s > CHECK_S:
                self._check()
                asked_s = time.monotonic()

    def _pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the sender gives, to all; the others give a place for it."""
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        with _broken_circles():
            work = self._group.broadcast([tensor], options)
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


class Sender:
    """The learner's rank 0, which all circles meet at."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        self.address = host, self._store.port
        self._circle: Circle | None = None

    def send(self, meeting: Meeting, weights: Weights, check: Check) -> bool:
        """False when a member was lost before all was sent."""
        if self._circle is None or self._circle.name != meeting.circle:
            self._circle = Circle(meeting, self._store)
        try:
            self._circle.gather(meeting.round, check)
            self._circle.send(weights)
        except MemberLost:
            self._circle.leave()
            self._circle = None
            return False
        return True


class Receiver:
    """A replica."""

    def __init__(self) -> None:
        self._circle: Circle | None = None

    def weights(self, meeting: Meeting) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is sent; `MemberLost` where that is not all there is."""
        if self._circle is None or self._circle.name != meeting.circle:
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
