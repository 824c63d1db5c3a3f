"""Environments in actors of a cluster: the `EnvCalls` of episodes whose questions cross processes.

Questions go in batches: one call of each actor is under way, and what comes in meanwhile goes with
the next. An environment is a function of its seeds and of the replies it was given. So the episodes
of an actor that died are played again in others up to where they were, and go on from there.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from moored.config import Config
from moored.engine.base import Event
from moored.engine.ray.cluster import Cluster, counted
from moored.engine.ray.env_actors import ActorEnv, EnvActors, EnvSeat
from moored.engine.ray.env_host import EnvReport
from moored.envs.base import Environment
from moored.errors import EnvError
from moored.rollout.pool import Answer, Answers, Question

LOOK_UP_S = 1.0
"""Longest wait before actors that were lost are looked after again."""
SILENCE_S = 10.0
"""How much longer than the limit of a call an actor may be silent: then a call of an environment
holds the interpreter lock, and only the end of the process ends it."""
MAX_LOSSES = 3
"""Actors that may be lost over one question before its episode is given up."""


class ActorPool:
    """Environments in `engine.ray.env_actors` processes; close it."""

    def __init__(self, cluster: Cluster, config: Config, on_event: Callable[[Event], None]) -> None:
        self._rollout = config.rollout
        self.actors = EnvActors(cluster, config, on_event)
        self._ray = cluster.ray
        self._instances = itertools.count()
        self._homeless: list[ActorEnv] = []
        """Environments with a question that no actor has yet."""
        self._given_up: Answers = []
        self._num_asked = 0

    def take(self, make_env: Callable[[], Environment]) -> ActorEnv:
        return ActorEnv(self.actors.maker(make_env))

    def give_back(self, make_env: Callable[[], Environment], env: ActorEnv) -> None:
        seat = env.seat
        if seat is None:
            return
        if env.asked is not None:
            # The question was dropped, and nobody knows how far it came.
            self.discard(env)
            return
        del seat.live[env.instance]
        seat.idle.setdefault(env.maker, []).append(env.instance)
        env.seat = None

    def discard(self, env: ActorEnv) -> None:
        if env.seat is None:
            return
        del env.seat.live[env.instance]
        env.seat.unwanted.append(env.instance)
        env.seat = None

    def ask(self, questions: Sequence[tuple[int, ActorEnv, Question]]) -> None:
        self._num_asked += len(questions)
        for key, env, question in questions:
            assert env.asked is None, "an environment is asked one thing at a time"
            if not isinstance(question, str):
                env.past, env.num_told = [], 0
            env.asked = key, question
            waiting = self._homeless if env.seat is None else env.seat.outbox
            waiting.append(env)

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
        self.actors.look_after()
        self._house()
        self._send()
        if self._given_up:
            found, self._given_up = self._given_up, []
            return found
        calls = {seat.call: seat for seat in self.actors.seats if seat.call is not None}
        if not calls:
            self.actors.wait_for_one(wait_s)
            return []
        done, _ = self._ray.wait(list(calls), timeout=wait_s)
        if done and len(calls) > 1:
            # Whatever else is there by now comes along.
            done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        found = [answer for call in done for answer in self._take(calls[call], call)]
        self._end_silent_ones()
        return found

    def _house(self) -> None:
        """Give environments without a home to the actor with the fewest."""
        seats = self.actors.up
        if not seats or not self._homeless:
            return
        waiting, self._homeless = self._homeless, []
        for env in waiting:
            seat = min(seats, key=lambda seat: len(seat.live))
            idle = seat.idle.get(env.maker)
            env.seat, env.instance = seat, idle.pop() if idle else next(self._instances)
            seat.live[env.instance] = env
            seat.outbox.append(env)

    def _send(self) -> None:
        for seat in self.actors.up:
            if seat.call is not None or not (seat.outbox or seat.under_way):
                continue
            envs = _next_batch(seat)
            seat.under_way |= {env.instance: env for env in envs}
            seat.call = seat.actor.work.remote(self.actors.order(seat, envs))
            seat.called_at_s = time.monotonic()

    def _take(self, seat: EnvSeat, call: Any) -> Answers:
        exceptions = self._ray.exceptions
        seat.call = None
        try:
            report: EnvReport = self.actors.result(call)
        except (exceptions.RayActorError, exceptions.ObjectLostError):
            self._lose(seat)
            return []
        seat.num_hung = report.num_hung
        found = []
        for instance, answer, max_turns in pickle.loads(report.answers):
            env = seat.under_way.pop(instance)
            env.max_turns = max_turns
            if (result := self._hear(env, answer)) is not None:
                found.append(result)
        return found

    def _hear(self, env: ActorEnv, answer: Answer) -> tuple[int, Answer] | None:
        """The answer to what was asked; None for one that was known, if it is the same."""
        assert env.asked is not None and env.seat is not None
        key, question = env.asked
        if env.is_replaying and not isinstance(answer, Exception):
            if answer == env.past[env.num_told][1]:
                env.num_told += 1
                env.seat.outbox.append(env)
                return None
            answer = EnvError(
                "its process was lost, and when the episode was played again the same replies led "
                "elsewhere: what it does must depend on its seeds and the replies alone"
            )
        env.asked, env.num_losses = None, 0
        env.past.append((question, answer))
        env.num_told = len(env.past)
        return key, answer

    def _lose(self, seat: EnvSeat, why: str = "is lost") -> None:
        """Play the episodes of an actor again elsewhere; give up what costs one after another."""
        doubtful = {env for env in seat.under_way.values() if not env.is_replaying}
        for env in self.actors.lose(seat, why):
            if env.asked is None:
                continue
            env.num_losses += env in doubtful
            if env.num_losses < MAX_LOSSES:
                self._homeless.append(env)
                continue
            error = EnvError(f"its process died over this call, {MAX_LOSSES} times")
            self._given_up.append((env.asked[0], error))
            env.asked = None

    def _replace_hung_ones(self) -> None:
        """Between rollouts, replace actors with as many hanging threads as they have workers."""
        for seat in self.actors.up:
            if not seat.live and seat.num_hung >= self._rollout.env_workers:
                why = f"is replaced: {counted(seat.num_hung, 'call')} given up in it still run"
                self.actors.lose(seat, why)

    def _end_silent_ones(self) -> None:
        """Replace actors whose interpreter stands still."""
        limit_s = self._rollout.env_timeout_s + SILENCE_S
        for seat in self.actors.up:
            if seat.call is not None and time.monotonic() - seat.called_at_s > limit_s:
                self._lose(seat, f"gave no sign for {limit_s:g} s and is replaced")

    def drop_calls(self) -> None:
        self._homeless, self._given_up, self._num_asked = [], [], 0
        for seat in self.actors.up:
            if seat.under_way:
                seat.actor.drop_calls.remote()
            seat.drop_calls()

    def close(self) -> None:
        self.drop_calls()
        self.actors.close()


def _next_batch(seat: EnvSeat) -> list[ActorEnv]:
    """What waits in a seat. Of the questions that an actor was lost over, one at a time: so the one
    that is to blame takes no others with it.
    """
    waiting, seat.outbox = seat.outbox, []
    if not any(env.num_losses for env in waiting):
        return waiting
    has_doubtful = any(_is_doubtful(env) for env in seat.under_way.values())
    batch = []
    for env in waiting:
        if _is_doubtful(env) and has_doubtful:
            seat.outbox.append(env)
            continue
        has_doubtful |= _is_doubtful(env)
        batch.append(env)
    return batch


def _is_doubtful(env: ActorEnv) -> bool:
    return env.num_losses > 0 and not env.is_replaying
