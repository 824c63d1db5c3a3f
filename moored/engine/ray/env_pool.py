"""Environments in actors of a cluster: the `EnvCalls` of episodes whose questions cross processes.

Questions go in batches: one call of each actor is under way, and what comes in meanwhile goes with
the next. Ray starts an actor that died again; its episodes end as errors of the environment.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moored.config import Config
from moored.engine.base import Event
from moored.engine.ray.cluster import Cluster, counted, pick_env_nodes
from moored.engine.ray.env_host import EnvAbout, EnvHost, Packet
from moored.envs.base import Environment, StepResult
from moored.envs.mix import EnvMix
from moored.errors import EnvError, MooredError
from moored.rollout.pool import Answer, Answers, Question

LOOK_UP_S = 1.0
"""Longest wait before actors that were lost are looked after again."""
SILENCE_S = 10.0
"""How much longer than the limit of a call an actor may be silent: then a call of an environment
holds the interpreter lock, and only the end of the process ends it."""
RETRY_S = 10.0
"""Pause before an actor tries again to make its environments."""
CLOSE_S = 10.0
"""How long actors may take to close what environments share."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ActorEnv:
    """The environment of one episode, in some actor."""

    maker: bytes
    max_turns: int = 0
    actor: EnvActor | None = None
    """Where it lives; None: nowhere yet, or it was lost."""
    episode: int = -1
    asked: tuple[int, Question] | None = None
    """Key and question that have no answer yet."""
    turns_left: int = 1
    is_second_try: bool = False
    """Its actor was lost while it began."""

    def note(self, answer: Answer) -> None:
        """Keep count of the turns: an episode that is over is not lost with its actor."""
        if isinstance(answer, list):
            self.turns_left = self.max_turns
        elif isinstance(answer, StepResult) and not answer.is_over:
            self.turns_left -= 1
        else:
            self.turns_left = 0


@dataclass(slots=True, eq=False)
class EnvActor:
    """An actor of environments as the driver sees it."""

    number: int
    handle: Any
    about: EnvAbout | None = None
    opening: Any = None
    """The call after which it is up, while it is under way."""
    down_since_s: float = 0.0
    num_hung: int = 0
    live: dict[int, ActorEnv] = field(default_factory=dict)
    """By episode."""
    ended: list[tuple[int, bool]] = field(default_factory=list)
    """Episodes that are over, and whether their environments may be used again."""
    outbox: list[Packet] = field(default_factory=list)
    num_asked: int = 0
    call: Any = None
    called_at_s: float = 0.0

    @property
    def is_up(self) -> bool:
        return self.opening is None

    def drop_calls(self) -> None:
        self.outbox, self.num_asked, self.call = [], 0, None

    def empty(self) -> list[ActorEnv]:
        """Forget what the actor had; returns the environments of episodes."""
        left = list(self.live.values())
        self.live, self.ended, self.num_hung = {}, [], 0
        self.drop_calls()
        return left


class ActorPool:
    """Environments in `engine.ray.env_actors` processes; close it."""

    def __init__(self, cluster: Cluster, config: Config, on_event: Callable[[Event], None]) -> None:
        self._cluster, self._ray, self._config = cluster, cluster.ray, config
        self._rollout, self._on_event = config.rollout, on_event
        self._patience_s = config.engine.ray.patience_s
        self._makers: dict[Callable[[], Environment], bytes] = {}
        for make in EnvMix(config.env).makers:
            self._maker(make)
        self._episodes = itertools.count()
        self._homeless: list[ActorEnv] = []
        """Environments of episodes that begin and that no actor has yet."""
        self._given_up: Answers = []
        self._num_asked = 0
        count = config.engine.ray.env_actors
        nodes = pick_env_nodes(cluster.nodes(), cluster.env, count)
        nodes += [""] * (count - len(nodes))
        self.actors = [EnvActor(i, self._start(node)) for i, node in enumerate(nodes)]
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def _start(self, node: str) -> Any:
        """An actor on a node, or wherever there is room."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place: Any = "SPREAD"
        if node:
            place = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
        maker = self._ray.remote(EnvHost).options(
            scheduling_strategy=place, max_restarts=-1, **self._cluster.env.options()
        )
        return maker.remote(self._rollout, os.getcwd())

    def _open_all(self) -> None:
        """At the start every actor has to come up."""
        for actor in self.actors:
            # One that dies before it was ever up does so for a reason.
            self._open(actor, max_retries=0)
        calls = [actor.opening for actor in self.actors]
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=self._patience_s)
        if len(done) < len(calls):
            raise MooredError(
                f"only {len(done)} of {counted(len(calls), 'environment actor')} started within "
                f"{self._patience_s:g} s; see `ray status`, or raise engine.ray.patience_s"
            )
        for actor in self.actors:
            self._finish_opening(actor)

    def _open(self, actor: EnvActor, *, max_retries: int = -1, pause_s: float = 0.0) -> None:
        """Make an actor ready; Ray repeats the call when it dies meanwhile."""
        call = actor.handle.open.options(max_task_retries=max_retries)
        actor.opening = call.remote(tuple(self._makers.values()), pause_s)
        self._count_down()

    def _finish_opening(self, actor: EnvActor) -> None:
        is_back = actor.about is not None
        try:
            about = self._result(actor.opening)
        except self._ray.exceptions.RayActorError as error:
            why = str(error).strip().splitlines()[0]
            raise MooredError(f"an environment actor died while it started: {why}") from error
        except MooredError as error:
            if not is_back:
                raise
            # A port may still be taken.
            logger.warning("environment actor %d did not start again: %s", actor.number, error)
            self._open(actor, pause_s=RETRY_S)
            return
        actor.about, actor.opening = about, None
        self._count_down()
        if is_back:
            seconds = time.monotonic() - actor.down_since_s
            what = f"is back after {seconds:.1f} s"
            self._tell("env_actor_back", actor, what, {"episodes_lost": 0, "seconds": seconds})

    def _count_down(self) -> None:
        self._cluster.num_env_actors_down = len(self.actors) - len(self.up)

    def _result(self, call: Any) -> Any:
        """What a call returned; an error that an actor raised is raised as it was."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, MooredError) else error) from None

    def _tell(self, kind: str, actor: EnvActor, what: str, figures: dict[str, Any]) -> None:
        about = {} if actor.about is None else {"pid": actor.about.pid, "node": actor.about.node}
        text = f"environment actor {actor.number} {what}"
        record = {"env_actor": actor.number, **about, **figures}
        self._on_event(Event(kind=kind, text=text, figures=record))

    @property
    def up(self) -> list[EnvActor]:
        return [actor for actor in self.actors if actor.is_up]

    def _maker(self, make_env: Callable[[], Environment]) -> bytes:
        """The pickle of what makes environments; equal ones are the same."""
        if make_env not in self._makers:
            try:
                self._makers[make_env] = self._ray.cloudpickle.dumps(make_env)
            except Exception as error:
                raise EnvError(
                    f"{make_env!r:.120} cannot be sent to environment actors "
                    f"({type(error).__name__}: {error}); name the environment as module:Class with "
                    f"plain options, or set engine.ray.env_actors=0"
                ) from error
        return self._makers[make_env]

    def take(self, make_env: Callable[[], Environment]) -> ActorEnv:
        return ActorEnv(self._maker(make_env))

    def give_back(self, make_env: Callable[[], Environment], env: ActorEnv) -> None:
        # Of a question that was dropped, nobody knows how far it came.
        self._end(env, is_whole=env.asked is None)

    def discard(self, env: ActorEnv) -> None:
        self._end(env, is_whole=False)

    def _end(self, env: ActorEnv, *, is_whole: bool) -> None:
        if env.actor is None:
            return
        del env.actor.live[env.episode]
        env.actor.ended.append((env.episode, is_whole))
        env.actor = None

    def ask(self, questions: Sequence[tuple[int, ActorEnv, Question]]) -> None:
        self._num_asked += len(questions)
        for key, env, question in questions:
            assert env.asked is None, "an environment is asked one thing at a time"
            env.asked = key, question
            if env.actor is not None:
                self._hand_over(env.actor, env)
            elif isinstance(question, str):
                self._give_up(env)
            else:
                self._homeless.append(env)

    def _hand_over(self, actor: EnvActor, env: ActorEnv) -> None:
        assert env.asked is not None
        actor.outbox.append((env.episode, env.maker, env.asked[1]))
        actor.num_asked += 1

    def _give_up(self, env: ActorEnv) -> None:
        assert env.asked is not None
        self._given_up.append((env.asked[0], EnvError("its actor was lost")))
        env.asked = None

    def poll(self, *, wait_s: float | None = None, linger_s: float | None = 0.0) -> Answers:
        end_s = math.inf if wait_s is None else time.monotonic() + wait_s
        found: Answers = []
        while self._num_asked:
            news = self._collect(min(LOOK_UP_S, max(0.0, end_s - time.monotonic())))
            if news:
                self._num_asked -= len(news)
                found += news
                end_s = math.inf if linger_s is None else time.monotonic() + linger_s
            if time.monotonic() >= end_s:
                break
        return found

    def _collect(self, wait_s: float) -> Answers:
        """Hand out questions, and wait for calls until one brings answers."""
        self._replace_hung_ones()
        self._take_back(0.0)
        self._house()
        self._send()
        if self._given_up:
            found, self._given_up = self._given_up, []
            return found
        calls = {actor.call: actor for actor in self.actors if actor.call is not None}
        if not calls:
            self._take_back(wait_s)
            self._check_patience()
            return []
        done, _ = self._ray.wait(list(calls), timeout=wait_s)
        if done and len(calls) > 1:
            # Whatever else is there by now comes along.
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        found = [answer for call in done for answer in self._take(calls[call])]
        self._end_silent_ones()
        return found

    def _take_back(self, wait_s: float) -> None:
        """Use actors again that came up."""
        opening = {actor.opening: actor for actor in self.actors if not actor.is_up}
        if opening:
            done, _ = self._ray.wait(list(opening), timeout=wait_s)
            for call in done:
                self._finish_opening(opening[call])

    def _check_patience(self) -> None:
        down_s = time.monotonic() - max(actor.down_since_s for actor in self.actors)
        if not self.up and down_s > self._patience_s:
            raise MooredError(
                f"no environment actor answered for {self._patience_s:g} s; see `ray status`, add "
                f"nodes, then go on with --resume"
            )

    def _house(self) -> None:
        """Give episodes that begin to the actor with the fewest."""
        up = self.up
        if not up or not self._homeless:
            return
        waiting, self._homeless = self._homeless, []
        for env in waiting:
            env.actor = min(up, key=lambda actor: len(actor.live))
            env.episode = next(self._episodes)
            env.actor.live[env.episode] = env
            self._hand_over(env.actor, env)

    def _send(self) -> None:
        for actor in self.up:
            if actor.call is None and actor.num_asked:
                actor.call = actor.handle.work.remote(actor.outbox, actor.ended)
                actor.outbox, actor.ended, actor.called_at_s = [], [], time.monotonic()

    def _take(self, actor: EnvActor) -> Answers:
        exceptions = self._ray.exceptions
        call, actor.call = actor.call, None
        try:
            report = self._result(call)
        except (exceptions.RayActorError, exceptions.ObjectLostError):
            report = None
        if report is None:
            self._lose(actor)
            return []
        answers, actor.num_hung = report
        found = []
        for episode, answer, max_turns in pickle.loads(answers):
            env = actor.live[episode]
            assert env.asked is not None
            found.append((env.asked[0], answer))
            env.asked, env.max_turns = None, max_turns
            env.note(answer)
        actor.num_asked -= len(found)
        return found

    def _lose(self, actor: EnvActor, why: str = "is lost") -> None:
        """Give up the episodes of an actor; those that only began begin once more elsewhere."""
        num_lost = 0
        for env in actor.empty():
            env.actor = None
            has_begun = env.asked is None or isinstance(env.asked[1], str)
            if not has_begun and not env.is_second_try:
                env.is_second_try = True
                self._homeless.append(env)
                continue
            num_lost += env.turns_left > 0
            if env.asked is not None:
                self._give_up(env)
        also = f"; {counted(num_lost, 'episode')} lost with it" if num_lost else ""
        self._tell("env_actor_lost", actor, f"{why}{also}", {"episodes_lost": num_lost})
        actor.down_since_s = time.monotonic()
        self._open(actor)

    def _replace_hung_ones(self) -> None:
        """Between rollouts, replace actors with as many hanging threads as they have workers."""
        for actor in self.up:
            if not actor.live and actor.num_hung >= self._rollout.env_workers:
                hung = counted(actor.num_hung, "call")
                self._lose(actor, f"is replaced: {hung} given up in it still run")

    def _end_silent_ones(self) -> None:
        """Replace actors whose interpreter stands still."""
        limit_s = self._rollout.env_timeout_s + SILENCE_S
        for actor in self.up:
            if actor.call is not None and time.monotonic() - actor.called_at_s > limit_s:
                self._ray.kill(actor.handle, no_restart=False)
                self._lose(actor, f"gave no sign for {limit_s:g} s and is replaced")

    def drop_calls(self) -> None:
        self._homeless, self._given_up, self._num_asked = [], [], 0
        for actor in self.up:
            if actor.num_asked:
                actor.handle.drop_calls.remote()
            actor.drop_calls()

    def close(self) -> None:
        """Close environments and what they share, then end the actors."""
        self.drop_calls()
        calls = [actor.handle.close.remote() for actor in self.up]
        if calls:
            limit_s = self._rollout.env_timeout_s + CLOSE_S
            self._ray.wait(calls, num_returns=len(calls), timeout=limit_s)
        for actor in self.actors:
            self._ray.kill(actor.handle)
        self.actors = []
