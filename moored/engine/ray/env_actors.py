"""The actors of environments as the driver sees them: which are up, and what each has to answer.

One that dies is started again, on a node with room. Meanwhile the others have its episodes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moored.config import Config
from moored.engine.base import Event
from moored.engine.ray.cluster import Cluster, counted, pick_env_nodes
from moored.engine.ray.env_host import EnvAbout, EnvHost, EnvOrder
from moored.envs.base import Environment
from moored.envs.mix import EnvMix
from moored.errors import EnvError, MooredError
from moored.rollout.pool import Answer, Question

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before an actor that did not start is started again."""
CLOSE_S = 10.0
"""How long actors may take to close what environments share."""


@dataclass(slots=True, eq=False)
class ActorEnv:
    """An environment of some actor. It keeps its episode, to play it again in another one."""

    maker: int
    max_turns: int = 0
    seat: EnvSeat | None = None
    """Where it lives; None: nowhere yet, or no longer."""
    instance: int = -1
    past: list[tuple[Question, Answer]] = field(default_factory=list)
    num_told: int = 0
    """Questions of `past` that the instance was asked."""
    asked: tuple[int, Question] | None = None
    """Key and question that have no answer yet."""
    num_losses: int = 0
    """Actors that were lost while they had this question."""

    @property
    def is_replaying(self) -> bool:
        return self.num_told < len(self.past)

    @property
    def question(self) -> Question:
        """The next one for the instance."""
        if self.is_replaying:
            return self.past[self.num_told][0]
        assert self.asked is not None
        return self.asked[1]


@dataclass(slots=True, eq=False)
class EnvSeat:
    """One actor."""

    number: int
    actor: Any = None
    opening: Any = None
    """The call after which it is up, while it is under way."""
    about: EnvAbout | None = None
    is_up: bool = False
    down_since_s: float = 0.0
    retry_at_s: float = 0.0
    num_makers: int = 0
    """How many of the makers it knows."""
    num_hung: int = 0
    live: dict[int, ActorEnv] = field(default_factory=dict)
    """Environments of episodes, by instance."""
    idle: dict[int, list[int]] = field(default_factory=dict)
    """Instances that wait for an episode, by maker."""
    unwanted: list[int] = field(default_factory=list)
    """Instances to close."""
    outbox: list[ActorEnv] = field(default_factory=list)
    under_way: dict[int, ActorEnv] = field(default_factory=dict)
    """Environments whose question was handed over, by instance."""
    call: Any = None
    called_at_s: float = 0.0

    def drop_calls(self) -> None:
        self.outbox, self.under_way, self.call = [], {}, None

    def empty(self) -> list[ActorEnv]:
        """Forget what the actor had; returns the environments of episodes."""
        left = list(self.live.values())
        for env in left:
            env.seat, env.instance, env.num_told = None, -1, 0
        self.live, self.idle, self.unwanted = {}, {}, []
        self.num_makers = self.num_hung = 0
        self.drop_calls()
        return left


class EnvActors:
    """Starts actors, tells when one is lost and when it is back; close it."""

    def __init__(self, cluster: Cluster, config: Config, on_event: Callable[[Event], None]) -> None:
        self._cluster, self.ray = cluster, cluster.ray
        self._config, self._on_event = config, on_event
        self._numbers: dict[Callable[[], Environment], int] = {}
        self._makers: list[bytes] = []
        for make in EnvMix(config.env).makers:
            self.maker(make)
        self.seats = [EnvSeat(number) for number in range(config.engine.ray.env_actors)]
        nodes = pick_env_nodes(cluster.nodes(), cluster.env, len(self.seats))
        nodes += [""] * (len(self.seats) - len(nodes))
        for seat, node in zip(self.seats, nodes, strict=True):
            self._start(seat, node)
        try:
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    @property
    def up(self) -> list[EnvSeat]:
        return [seat for seat in self.seats if seat.is_up]

    def maker(self, make_env: Callable[[], Environment]) -> int:
        """The number of what makes environments; equal pickles are the same."""
        found = self._numbers.get(make_env)
        if found is not None:
            return found
        try:
            data = self.ray.cloudpickle.dumps(make_env)
        except Exception as error:
            raise EnvError(
                f"{make_env!r:.120} cannot be sent to environment actors ({type(error).__name__}: "
                f"{error}); name the environment as module:Class with plain options, or set "
                f"engine.ray.env_actors=0"
            ) from error
        if data not in self._makers:
            self._makers.append(data)
        self._numbers[make_env] = self._makers.index(data)
        return self._numbers[make_env]

    def order(self, seat: EnvSeat, envs: Sequence[ActorEnv]) -> EnvOrder:
        """What a call tells an actor: questions, instances to close, makers that are new to it."""
        makers = tuple(enumerate(self._makers))[seat.num_makers :]
        order = EnvOrder(
            packets=tuple((env.instance, env.maker, env.question) for env in envs),
            closed=tuple(seat.unwanted),
            makers=makers,
        )
        seat.unwanted, seat.num_makers = [], len(self._makers)
        return order

    def _start(self, seat: EnvSeat, node: str) -> None:
        """Start the actor of a seat on a node, or wherever there is room."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place: Any = "SPREAD"
        if node:
            place = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
        maker = self.ray.remote(EnvHost).options(
            scheduling_strategy=place, max_restarts=0, **self._cluster.env.options()
        )
        seat.actor = maker.remote(self._config.rollout, os.getcwd())
        seat.opening = seat.actor.open.remote(tuple(enumerate(self._makers)))
        seat.num_makers, seat.is_up = len(self._makers), False
        if seat.down_since_s == 0.0:
            seat.down_since_s = time.monotonic()

    def _wait_for_all(self) -> None:
        """At the start every actor has to come up."""
        patience_s = self._config.engine.ray.patience_s
        calls = [seat.opening for seat in self.seats]
        done, _ = self.ray.wait(calls, num_returns=len(calls), timeout=patience_s)
        if len(done) < len(calls):
            raise MooredError(
                f"only {len(done)} of {counted(len(calls), 'environment actor')} started within "
                f"{patience_s:g} s; see `ray status`, or raise engine.ray.patience_s"
            )
        for seat in self.seats:
            try:
                about = self.result(seat.opening)
            except self.ray.exceptions.RayActorError as error:
                why = str(error).strip().splitlines()[0]
                raise MooredError(f"an environment actor died while it started: {why}") from error
            self._mark_up(seat, about)

    def result(self, call: Any) -> Any:
        """What a call returned; an error that an actor raised is raised as it was."""
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, MooredError) else error) from None

    def look_after(self, wait_s: float = 0.0) -> None:
        """Take back actors that came up, and start those again that did not."""
        now_s = time.monotonic()
        for seat in self.seats:
            if not seat.is_up and seat.opening is None and now_s >= seat.retry_at_s:
                places = [other.about.node for other in self.up if other.about is not None]
                node = pick_env_nodes(self._cluster.nodes(), self._cluster.env, 1, places)
                self._start(seat, node[0] if node else "")
        opening = {seat.opening: seat for seat in self.seats if seat.opening is not None}
        if not opening:
            return
        done, _ = self.ray.wait(list(opening), timeout=wait_s)
        for call in done:
            self._finish_opening(opening[call], call)

    def _finish_opening(self, seat: EnvSeat, call: Any) -> None:
        seat.opening = None
        try:
            about = self.result(call)
        except (self.ray.exceptions.RayError, MooredError) as error:
            # A port may still be taken, or a node be gone: others may do.
            self.ray.kill(seat.actor)
            why = str(error).strip().splitlines()[0]
            if seat.retry_at_s == 0.0:
                logger.warning("environment actor %d did not start again: %s", seat.number, why)
            seat.retry_at_s = time.monotonic() + RETRY_S
            self._check_patience(f" ({why})")
        else:
            self._mark_up(seat, about)

    def _mark_up(self, seat: EnvSeat, about: EnvAbout) -> None:
        is_back = seat.about is not None
        seconds, seat.down_since_s = time.monotonic() - seat.down_since_s, 0.0
        seat.about, seat.opening, seat.is_up = about, None, True
        self._count_down()
        if is_back:
            what = f"is back after {seconds:.1f} s"
            self._tell("env_actor_back", seat, what, {"seconds": seconds})

    def lose(self, seat: EnvSeat, why: str = "is lost") -> list[ActorEnv]:
        """Note that an actor is gone; returns the environments of episodes that it had."""
        left = seat.empty()
        again = f"; {counted(len(left), 'episode')} played again elsewhere" if left else ""
        self._tell("env_actor_lost", seat, f"{why}{again}", {"episodes_again": len(left)})
        # A silent one still lives.
        self.ray.kill(seat.actor)
        seat.is_up, seat.opening = False, None
        seat.down_since_s, seat.retry_at_s = time.monotonic(), 0.0
        self._count_down()
        return left

    def _count_down(self) -> None:
        self._cluster.num_env_actors_down = len(self.seats) - len(self.up)

    def _tell(self, kind: str, seat: EnvSeat, what: str, figures: dict[str, Any]) -> None:
        about = {} if seat.about is None else {"pid": seat.about.pid, "node": seat.about.node}
        text = f"environment actor {seat.number} {what}"
        record = {"env_actor": seat.number, **about, "episodes_lost": 0, **figures}
        self._on_event(Event(kind=kind, text=text, figures=record))

    def wait_for_one(self, wait_s: float) -> None:
        """Give actors time to come up; raise when none did for `engine.ray.patience_s`."""
        self.look_after(wait_s)
        if not self.up:
            self._check_patience()

    def _check_patience(self, why: str = "") -> None:
        patience_s = self._config.engine.ray.patience_s
        down_s = time.monotonic() - max(seat.down_since_s for seat in self.seats)
        if not self.up and down_s > patience_s:
            raise MooredError(
                f"no environment actor answered for {patience_s:g} s{why}; see `ray status`, add "
                f"nodes, then go on with --resume"
            )

    def close(self) -> None:
        """Close environments and what they share, then end the actors."""
        calls = [seat.actor.close.remote() for seat in self.up]
        if calls:
            limit_s = self._config.rollout.env_timeout_s + CLOSE_S
            self.ray.wait(calls, num_returns=len(calls), timeout=limit_s)
        for seat in self.seats:
            if seat.actor is not None:
                self.ray.kill(seat.actor)
        self.seats = []
