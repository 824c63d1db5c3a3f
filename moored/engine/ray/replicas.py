"""The sampler replicas as the driver sees them: which of them are up, and with which weights.

A replica that dies is restarted by Ray, takes over the newest weights, and is used again. Meanwhile
the others write on. All methods are called from one thread at a time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from moored.config import Config
from moored.engine.base import Event, Request, SamplingParams
from moored.engine.ray.cluster import Cluster, num_placed
from moored.engine.ray.replica import About, MakeSampler, Replica, make_sampler
from moored.engine.ray.stream import ReplicaStream
from moored.engine.ray.weights import SENDER, Meeting
from moored.engine.workers.team import WorkerLost
from moored.errors import MooredError

RETRY_S = 1.0
"""Pause before a replica that did not come back is asked again."""
ASK_S = 0.5
"""How long to wait for replicas at a time while none is up."""
NOTICE_S = 10.0
"""How long replicas may take to notice that no more weights come."""
HANG_TIMES = 4
"""A replica hangs when a call takes so many times the patience: to read the weights of a large
model from the object store, or to write in lockstep, may take minutes."""
MAX_SENDS = 5
"""Times in a row that weights are sent to replicas of which none takes them over."""
MAX_LOSSES = 10
"""Times that replicas die over requests before one of them has written a reply."""


@dataclass(slots=True, eq=False)
class Seat:
    """One replica."""

    number: int
    actor: Any
    about: About | None = None
    is_up: bool = False
    is_waiting: bool = False
    """It has other weights than those asked for, until the learner sends some."""
    loading: Any = None
    """The call after which it is up, while it is under way."""
    retry_at_s: float = 0.0
    down_since_s: float = 0.0
    has_served: bool = False
    outbox: list[Request] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Sessions to be forgotten, with the next call."""
    under_way: dict[int, Request] = field(default_factory=dict)
    """Requests that were handed over, by session."""
    call: Any = None
    """The call that writes them."""
    called_at_s: float = 0.0

    @property
    def load(self) -> int:
        return len(self.outbox) + len(self.under_way)

    def drop_calls(self) -> None:
        self.call, self.under_way, self.outbox, self.ended = None, {}, [], []


class Source(Protocol):
    """A learner that sends its weights itself."""

    def meeting_place(self) -> tuple[str, int]: ...

    def send_weights(self, meeting: Meeting, receiving: Sequence[Any]) -> bool:
        """False when not all of the calls `receiving` got everything."""
        ...


class ReplicaSampler:
    """Writes replies with all replicas of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        on_event: Callable[[Event], None],
        make: MakeSampler = make_sampler,
    ) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self._options = config.engine.ray
        # A replica without a GPU must not take one that it sees.
        device = "cpu" if not cluster.replica.gpus else config.engine.device
        engine = config.engine.model_copy(update={"device": device})
        self._config = config.model_copy(update={"engine": engine})
        self._on_event, self._make = on_event, make
        self._numbers = itertools.count()
        self._streams = itertools.count()
        self._weights: Any = None
        self._source: Source | None = None
        self._learner_is_free = config.rollout.max_lag == 0
        self._rounds = itertools.count()
        self._meeting: Meeting | None = None
        self._last_members: Any = None
        self._num_losses = 0
        self.version = 0
        self.seats: list[Seat] = []
        fixed = self._options.replicas
        self._add(1 if fixed == "auto" else fixed)
        self.grow()
        self._wait_for_all()

    @property
    def up(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.is_up]

    @property
    def _hang_s(self) -> float:
        return HANG_TIMES * self._options.patience_s

    @property
    def is_lockstep(self) -> bool:
        """One replica that writes in lockstep; several finish at different times."""
        about = self.seats[0].about
        return self._options.replicas == 1 and about is not None and about.is_lockstep

    def stream(self, params: SamplingParams) -> ReplicaStream:
        self.look_after()
        return ReplicaStream(self, self._ray, params, next(self._streams))

    def publish(self, weights: Any, version: int) -> None:
        """Have every replica take over weights of the object store; lost ones follow later."""
        self._weights, self.version = weights, version
        asked = []
        for seat in self.seats:
            # Also one that is about to take over older weights.
            if seat.is_up or seat.loading is not None:
                seat.is_up = False
                self._load(seat)
                asked += [seat] if seat.down_since_s == 0.0 else []
        self.grow()
        self._wait_until_done(asked, self._hang_s)
        self.wait_for_one()

    def publish_direct(self, source: Source, version: int) -> None:
        """Have the learner send weights to the replicas that are there; others wait for the next
        time."""
        self._source, self._weights, self.version = source, None, version
        self._ask_for_all()
        for seat in self.seats:
            seat.is_waiting, seat.is_up = seat.is_waiting or seat.is_up, False
        self.grow()
        self.look_after()
        self._wait_for_one(may_send=True)

    def _ask_for_all(self) -> None:
        """Find out which replicas died unseen; Ray may have started them again."""
        asked = [seat for seat in self.seats if seat.is_up or seat.is_waiting]
        for seat in asked:
            seat.is_up, seat.is_waiting = False, False
            self._load(seat)
        self._wait_until_done(asked, self._options.patience_s)

    def _wait_until_done(self, seats: Sequence[Seat], limit_s: float) -> None:
        """Return when all calls of these are done; replicas that hang in theirs are ended."""
        calls = [seat.loading for seat in seats]
        deadline_s = time.monotonic() + limit_s
        while stuck := [s for s, call in zip(seats, calls, strict=True) if s.loading is call]:
            if time.monotonic() > deadline_s:
                self._start_anew(stuck)
                deadline_s += limit_s
            self.look_after(wait_s=ASK_S)

    def _start_anew(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            self._ray.kill(seat.actor, no_restart=False)

    def _send(self, source: Source) -> None:
        """Weights to all that wait for some."""
        members = [seat for seat in self.seats if seat.is_waiting]
        meeting = self._meet(source.meeting_place(), members)
        for number, seat in enumerate(members, SENDER + 1):
            seat.is_waiting = False
            seat.loading = seat.actor.receive.remote(replace(meeting, member=number), self.version)
        calls, is_sent = [seat.loading for seat in members], False
        try:
            is_sent = source.send_weights(meeting, calls)
        finally:
            if not is_sent:
                self._end_stuck(members)
        self._wait_until_done(members, self._options.patience_s)

    def _meet(self, address: tuple[str, int], members: Sequence[Seat]) -> Meeting:
        """One more round of the last circle, where learner and replicas are the same."""
        who = [(seat.about.pid, seat.about.node) for seat in members if seat.about is not None]
        last, number = self._meeting, next(self._rounds)
        if last is None or self._last_members != (address, who):
            self._last_members = address, who
            last = Meeting(
                address=address,
                circle=f"circle {number}",
                size=1 + len(members),
                on_gpus=self._cluster.has_whole_gpus,
                round=number,
            )
        self._meeting = replace(last, round=number)
        return self._meeting

    def _end_stuck(self, members: Sequence[Seat]) -> None:
        """Start those anew that wait for weights which will not come, maybe for ever."""
        self._meeting = None
        calls = [seat.loading for seat in members]
        _, stuck = self._ray.wait(
            calls, num_returns=len(calls), timeout=NOTICE_S, fetch_local=False
        )
        self._start_anew([seat for seat in members if seat.loading in stuck])

    def grow(self) -> None:
        """Under `auto`, start a replica wherever there is room for one."""
        if self._options.replicas != "auto":
            return
        free = self._cluster.free_for_replicas()
        most = sum(int(node.get("CPU", 0.0) / self._cluster.replica.cpus) for node in free)
        waiting = sum(seat.about is None for seat in self.seats)
        self._add(num_placed(free, [self._cluster.replica] * most) - waiting)

    def shrink(self) -> None:
        """Under `auto`, end a replica so that a learner rank has room; the last one stays."""
        if self._options.replicas != "auto" or len(self.seats) < 2:
            return
        # One that waits for room itself first, then the newest.
        seat = max(self.seats, key=lambda seat: (not seat.is_up, seat.number))
        self.seats.remove(seat)
        self._ray.kill(seat.actor)
        self._tell("replica_ended", seat, "made room for a learner rank", {})

    def _add(self, count: int) -> None:
        for _ in range(count):
            seat = Seat(next(self._numbers), self._make_actor(), down_since_s=time.monotonic())
            self.seats.append(seat)
            self._load(seat)

    def _make_actor(self) -> Any:
        maker = self._ray.remote(Replica)
        return maker.options(
            max_restarts=-1, scheduling_strategy="SPREAD", **self._cluster.replica.options()
        ).remote(self._make, self._config)

    def _load(self, seat: Seat) -> None:
        seat.loading = seat.actor.load.remote(self._weights, self.version)

    def _wait_for_all(self) -> None:
        """At the start every replica has to come up."""
        calls = [seat.loading for seat in self.seats]
        done, _ = self._ray.wait(
            calls, num_returns=len(calls), timeout=self._options.patience_s, fetch_local=False
        )
        if len(done) < len(calls):
            raise MooredError(
                f"only {len(done)} of {len(calls)} sampler replicas started within "
                f"{self._options.patience_s:g} s; see `ray status`, or raise engine.ray.patience_s"
            )
        for seat in self.seats:
            try:
                seat.about, seat.loading = self.result(seat.loading), None
            except self._ray.exceptions.RayActorError as error:
                why = str(error).strip().splitlines()[0]
                raise MooredError(f"a sampler replica died while it started: {why}") from error
            seat.is_up, seat.has_served, seat.down_since_s = True, True, 0.0

    def result(self, call: Any) -> Any:
        """What a call returned; an error that a replica raised is raised as it was."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, MooredError) else error) from None

    def look_after(self, wait_s: float = 0.0) -> None:
        """Take back replicas that came up, and ask again for those that did not."""
        now_s = time.monotonic()
        for seat in self.seats:
            is_here = seat.is_up or seat.is_waiting
            if not is_here and seat.loading is None and now_s >= seat.retry_at_s:
                self._load(seat)
        loading = {seat.loading: seat for seat in self.seats if seat.loading is not None}
        if not loading:
            return
        done, _ = self._ray.wait(list(loading), timeout=wait_s, fetch_local=False)
        for call in done:
            self._finish_loading(loading[call], call)

    def _finish_loading(self, seat: Seat, call: Any) -> None:
        exceptions = self._ray.exceptions
        seat.loading = None
        try:
            seat.about = self.result(call)
        except exceptions.ActorDiedError:
            # For good: Ray restarts no actor that fails while it is made.
            self._mark_down(seat)
            seat.actor = self._make_actor()
        except exceptions.RayActorError:
            self._mark_down(seat)
        except exceptions.ObjectLostError as error:
            raise WorkerLost(f"the weights of version {self.version} were lost") from error
        else:
            seat.is_waiting = seat.about is not None and seat.about.version != self.version
            if not seat.is_waiting:
                self._mark_up(seat)

    def _mark_up(self, seat: Seat) -> None:
        seat.is_up = True
        if seat.down_since_s == 0.0:
            return
        assert seat.about is not None
        seconds = time.monotonic() - seat.down_since_s
        kind, what = "replica_joined", "joined"
        if seat.has_served:
            kind, what = "replica_back", "is back"
        seat.has_served, seat.down_since_s = True, 0.0
        self._tell(kind, seat, f"{what} after {seconds:.1f} s", {"seconds": seconds})

    def lose(self, seat: Seat) -> list[Request]:
        """Note that a replica died; returns the requests that it leaves behind."""
        left = [*seat.under_way.values(), *seat.outbox]
        seat.drop_calls()
        self._mark_down(seat, len(left))
        self._num_losses += 1
        if self._num_losses >= MAX_LOSSES:
            raise MooredError(
                f"sampler replicas died {self._num_losses} times in a row without a reply (out of "
                f"memory?); see what they printed, also in Ray's logs, then go on with --resume"
            )
        return left

    def end_hung(self) -> None:
        """Start replicas anew that have been writing for too long; then their calls fail."""
        since_s = time.monotonic() - self._hang_s
        hung = [s for s in self.seats if s.call is not None and s.called_at_s < since_s]
        self._start_anew(hung)
        for seat in hung:
            seat.called_at_s = math.inf

    def note_replies(self) -> None:
        """Replies were written: what died before is past."""
        self._num_losses = 0

    def _mark_down(self, seat: Seat, num_requests: int = 0) -> None:
        was_up = seat.down_since_s == 0.0
        seat.is_up, seat.is_waiting, seat.loading = False, False, None
        seat.retry_at_s = time.monotonic() + (0.0 if was_up else RETRY_S)
        if not was_up:
            return
        seat.down_since_s = time.monotonic()
        again = f"; {num_requests} replies are written again" if num_requests else ""
        self._tell("replica_lost", seat, f"is lost{again}", {"replies_again": num_requests})

    def _tell(self, kind: str, seat: Seat, what: str, figures: dict[str, Any]) -> None:
        about = {} if seat.about is None else {"pid": seat.about.pid, "node": seat.about.node}
        text = f"sampler replica {seat.number} {what}"
        record = {"replica": seat.number, **about, "episodes_lost": 0, **figures}
        self._on_event(Event(kind=kind, text=text, figures=record))

    def wait_for_one(self) -> None:
        """Return once a replica is up; raise after `engine.ray.patience_s`."""
        self._wait_for_one(may_send=self._learner_is_free)

    def _wait_for_one(self, *, may_send: bool) -> None:
        deadline_s, num_sends = time.monotonic() + self._options.patience_s, 0
        while not self.up:
            if self._source is not None and any(seat.is_waiting for seat in self.seats):
                if not may_send:
                    raise WorkerLost("all sampler replicas were lost during an update")
                if num_sends == MAX_SENDS:
                    raise MooredError(
                        f"no sampler replica got the weights in {MAX_SENDS} times; see what they "
                        f"printed, also in Ray's logs, then go on with --resume"
                    )
                self._send(self._source)
                # Those that came while one hung have just begun to wait.
                deadline_s, num_sends = time.monotonic() + self._options.patience_s, num_sends + 1
            elif time.monotonic() > deadline_s:
                raise MooredError(
                    f"no sampler replica answered for {self._options.patience_s:g} s; see `ray "
                    f"status`, add nodes, then go on with --resume"
                )
            else:
                self.look_after(wait_s=ASK_S)

    def end_stream(self, number: int, seats: Sequence[Seat]) -> None:
        """Let replicas forget the sessions of a stream."""
        for seat in seats:
            seat.drop_calls()
            if seat.is_up:
                seat.actor.end_stream.remote(number)

    def close(self) -> None:
        for seat in self.seats:
            self._ray.kill(seat.actor)
        self.seats = []
