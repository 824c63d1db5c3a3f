"""Training steps of many rollout workers, simulated: where does the time go?

A *rollout worker* plays one episode at a time in its environment. One driver hands every reply to
an environment and every answer to a sampler; each passing takes its measured time. Replicas write
replies together, in the driver's process or behind calls as `engine.kind=ray` makes them. The
learner takes the episodes of a step when the last one has ended; with lag the next rollout goes on
meanwhile, and new weights are published when it has ended. Nothing is computed but time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from simulation.calls import Calls, Line
from simulation.events import Clock, Queue, Replica, Spread

from moored.errors import MooredError

Mode = Literal["stream", "lockstep"]
Dispatch = Literal["least busy", "in turn", "random"]
OTHERS = "other episodes"
TAIL_PERCENT = 95
"""The tail of a rollout begins when so many of its episodes have ended."""
COUNTS = ("workers", "replicas", "episodes", "turns", "num_steps", "drivers", "max_rows")
SECONDS = ("driver_turn_s", "network_s", "step_s", "row_s", "update_s", "publish_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who takes part, and how long each takes."""

    workers: int
    replicas: int
    episodes: int
    """Of a step."""
    turns: int = 5
    num_steps: int = 3
    reply_tokens: Spread
    env_s: Spread
    """Of one call of an environment."""
    env_calls: int | None = None
    """Calls of environments at a time, as `rollout.env_workers` bounds them; None: no bound."""
    driver_turn_s: float
    """What a turn costs the driver, half of it when the reply comes and half with the answer; the
    first answer of an episode, to `reset`, costs half a turn too."""
    drivers: int = 1
    """Processes that share the driver's work."""
    network_s: float = 0.0
    """One way between driver and replica, and between driver and a remote environment."""
    calls: Calls | None = None
    """How replicas in other processes are asked; None: they are in the driver's."""
    step_s: float
    """A decoding step of a replica without rows."""
    row_s: float
    """What each row adds to it."""
    max_rows: int = 1024
    slow_share: float = 0.0
    """Of the replicas, that are slow."""
    slow_factor: float = 1.0
    update_s: float = 0.0
    publish_s: float = 0.0
    mode: Mode = "stream"
    dispatch: Dispatch = "least busy"
    max_lag: int = 0
    """Steps that the weights of a rollout may be old, 0 or 1 as `rollout.max_lag`."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in COUNTS:
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        for name in SECONDS:
            seconds = getattr(self, name)
            _require(0.0 <= seconds < math.inf, f"{name} must be 0 or more seconds", seconds)
        calls = self.env_calls
        _require(calls is None or calls >= 1, "env_calls must be None or at least 1", calls)
        _require(0.0 <= self.slow_share <= 1.0, "slow_share must be in [0, 1]", self.slow_share)
        _require(self.slow_factor > 0.0, "slow_factor must be above 0", self.slow_factor)
        _require(self.max_lag in (0, 1), "max_lag must be 0 or 1", self.max_lag)


def _require(is_met: bool, rule: str, given: object) -> None:
    if not is_met:
        raise MooredError(f"a simulation cannot run: {rule}, got {given}")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    seconds: float
    """Of all steps."""
    rollout_s: list[float]
    """Of each step, from its first episode to its last."""
    tail_s: list[float]
    """Of it, after 95 % of the episodes had ended."""
    learn_s: list[float]
    """Of each step, the update and publishing its weights."""
    num_turns: int
    """Of all steps."""
    turns_per_s: float
    """Infinite where nothing takes any time."""
    tokens_per_s: float
    driver_share: float
    """Of the time that the driver was busy."""
    replica_share: float
    """Of the time that a replica wrote at least one reply, on average."""
    turn_s: dict[str, float]
    """Where a turn spends its time, on average: driver, network, calls, sampler, environment, and
    waiting for others in lockstep."""
    mean_lag: float
    """Steps by which the weights of an episode were old when it was trained on."""

    @property
    def bound(self) -> str:
        """What a step waits for: the learner, or what bounds its rollout."""
        rollout_s = sum(self.rollout_s)
        if sum(self.learn_s) > rollout_s:
            return "learner"
        # The driver has nothing to do beside rollouts.
        if self.driver_share * self.seconds > 0.9 * rollout_s:
            return "driver"
        if sum(self.tail_s) > 0.4 * rollout_s:
            return "stragglers"
        part = max(self.turn_s, key=lambda part: self.turn_s[part])
        return "stragglers" if part == OTHERS else part


@dataclass(slots=True, eq=False)
class _Step:
    """The episodes of one step."""

    number: int
    begin_s: float = 0.0
    ends: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that each episode began with."""
    begun: int = 0


@dataclass(slots=True, eq=False)
class _Episode:
    step: _Step
    replica: Replica
    turns_left: int


def simulate(scenario: Scenario) -> Outcome:
    """Run all steps of a scenario."""
    return _World(scenario).run()


class _World:
    """Driver, replicas, environments and learner between events."""

    def __init__(self, given: Scenario) -> None:
        self.given = given
        self.clock = Clock()
        self.rng = np.random.default_rng(given.seed)
        self.driver = Queue(self.clock, given.drivers)
        num_slow = round(given.slow_share * given.replicas)
        self.replicas = [
            Replica(
                self.clock,
                given.step_s * (given.slow_factor if number < num_slow else 1.0),
                given.row_s * (given.slow_factor if number < num_slow else 1.0),
                given.max_rows,
            )
            for number in range(given.replicas)
        ]
        self.env_pool = None if given.env_calls is None else Queue(self.clock, given.env_calls)
        calls = given.calls
        self.lines = {
            id(replica): Line(self.clock, self.driver, calls, given.network_s)
            for replica in self.replicas
            if calls is not None
        }
        self.idle_workers = given.workers
        self.steps: list[_Step] = []
        self.version = 0
        self.published_s = 0.0
        self.num_learnt = 0
        self.is_learning = False
        self.is_updated = False
        """New weights wait for the rollout under way to end."""
        self.live: set[_Episode] = set()
        self.at_barrier: list[tuple[float, Callable[[], None]]] = []
        names = ("driver", "network", "calls", "sampler", "environment", OTHERS)
        self.parts = dict.fromkeys(names, 0.0)
        self.num_turns = 0
        self._tokens = self._numbers(given.reply_tokens)
        self._env_s = self._numbers(given.env_s)
        self._next_replica = 0

    def run(self) -> Outcome:
        self._begin_episodes()
        self.clock.run()
        given, seconds = self.given, self.published_s
        most = -(-TAIL_PERCENT * given.episodes // 100)
        written = sum(replica.written_tokens for replica in self.replicas)
        busy_s = float(np.mean([replica.busy_s for replica in self.replicas]))
        lags = [step.number - v for step in self.steps for v in step.versions]
        return Outcome(
            seconds=seconds,
            rollout_s=[step.ends[-1] - step.begin_s for step in self.steps],
            tail_s=[step.ends[-1] - step.ends[most - 1] for step in self.steps],
            learn_s=[given.update_s + given.publish_s] * len(self.steps),
            num_turns=self.num_turns,
            turns_per_s=self.num_turns / seconds if seconds else math.inf,
            tokens_per_s=written / seconds if seconds else math.inf,
            driver_share=self.driver.busy_s / seconds / given.drivers if seconds else 0.0,
            replica_share=busy_s / seconds if seconds else 0.0,
            turn_s={name: total / self.num_turns for name, total in self.parts.items()},
            mean_lag=float(np.mean(lags)),
        )

    def _numbers(self, spread: Spread) -> Callable[[], float]:
        """Numbers of a distribution, drawn many at a time."""
        drawn = iter(())

        def draw() -> float:
            nonlocal drawn
            value = next(drawn, None)
            if value is None:
                drawn = iter(spread.draw(self.rng, 4096).tolist())
                value = next(drawn)
            return value

        return draw

    # Steps: which episodes may begin.

    def _begin_episodes(self) -> None:
        """Give free workers the next episodes, as far as weights are new enough."""
        while self.idle_workers:
            step = self._open_step()
            if step is None:
                return
            self.idle_workers -= 1
            step.begun += 1
            step.versions.append(self.version)
            episode = _Episode(step, self._choose_replica(), self.given.turns)
            episode.replica.sessions += 1
            self.live.add(episode)
            self._call_env(episode)

    def _open_step(self) -> _Step | None:
        """The step that the next episode belongs to; None where one has to wait.

        A step is rolled out after the one before it, and with weights at most `max_lag` old.
        """
        given = self.given
        if self.steps and self.steps[-1].begun < given.episodes:
            return self.steps[-1]
        number = len(self.steps)
        is_over = not self.steps or len(self.steps[-1].ends) == given.episodes
        if number == given.num_steps or not is_over or number > self.version + given.max_lag:
            return None
        self.steps.append(_Step(number, begin_s=self.clock.now))
        return self.steps[-1]

    def _choose_replica(self) -> Replica:
        """An episode stays with the replica that has its cache."""
        if self.given.dispatch == "random":
            return self.replicas[int(self.rng.integers(len(self.replicas)))]
        if self.given.dispatch == "in turn":
            self._next_replica += 1
            return self.replicas[self._next_replica % len(self.replicas)]
        return min(self.replicas, key=lambda replica: replica.sessions)

    def _end_episode(self, episode: _Episode) -> None:
        episode.replica.sessions -= 1
        self.live.discard(episode)
        self.idle_workers += 1
        episode.step.ends.append(self.clock.now)
        self._learn()
        self._publish_between_rollouts()
        self._begin_episodes()
        self._release_barrier()

    def _learn(self) -> None:
        """Update on the oldest whole step, one at a time."""
        if self.is_learning or self.num_learnt == len(self.steps):
            return
        if len(self.steps[self.num_learnt].ends) < self.given.episodes:
            return
        self.is_learning = True
        self.num_learnt += 1
        self.clock.after(self.given.update_s, self._end_update)

    def _end_update(self) -> None:
        self.is_updated = True
        self._publish_between_rollouts()

    def _publish_between_rollouts(self) -> None:
        """Samplers take new weights while nothing is sampled, as `train_step` has it."""
        if self.is_updated and len(self.steps[-1].ends) == self.given.episodes:
            self.is_updated = False
            self.clock.after(self.given.publish_s, self._publish)

    def _publish(self) -> None:
        self.version += 1
        self.published_s = self.clock.now
        self.is_learning = False
        self._learn()
        self._begin_episodes()

    # One turn: environment -> driver -> replica -> driver -> environment.

    def _call_env(self, episode: _Episode) -> None:
        seconds = self._env_s()
        begin = self.clock.now + self.given.network_s

        def answer() -> None:
            self.parts["environment"] += self.clock.now - begin
            self._travel(lambda: self._meet(lambda: self._take_answer(episode)))

        pool = self.env_pool
        if pool is None:
            self._travel(lambda: self.clock.after(seconds, answer))
        else:
            self._travel(lambda: pool.serve(seconds, answer))

    def _take_answer(self, episode: _Episode) -> None:
        def handed_on() -> None:
            if episode.turns_left:
                episode.turns_left -= 1
                self._ask(episode)
            else:
                self._end_episode(episode)

        self._drive(handed_on)

    def _ask(self, episode: _Episode) -> None:
        """Have a reply written, and come back with it."""
        begin, tokens = self.clock.now, self._tokens()
        written_s = 0.0

        def write(done: Callable[[], None]) -> None:
            start = self.clock.now

            def written() -> None:
                nonlocal written_s
                written_s = self.clock.now - start
                done()

            episode.replica.write(tokens, written)

        def take() -> None:
            self.parts["sampler"] += written_s
            elsewhere = "network" if self.given.calls is None else "calls"
            self.parts[elsewhere] += self.clock.now - begin - written_s
            self._meet(lambda: self._take_reply(episode))

        line = self.lines.get(id(episode.replica))
        if line is not None:
            line.submit(write, take)
            return
        network_s = self.given.network_s
        self.clock.after(network_s, lambda: write(lambda: self.clock.after(network_s, take)))

    def _take_reply(self, episode: _Episode) -> None:
        self.num_turns += 1
        self._drive(lambda: self._call_env(episode))

    def _drive(self, done: Callable[[], None]) -> None:
        begin = self.clock.now

        def driven() -> None:
            self.parts["driver"] += self.clock.now - begin
            done()

        self.driver.serve(self.given.driver_turn_s / 2, driven)

    def _travel(self, arrive: Callable[[], None]) -> None:
        self.parts["network"] += self.given.network_s
        self.clock.after(self.given.network_s, arrive)

    # Lockstep: every live episode waits for the others, before and after each reply.

    def _meet(self, go_on: Callable[[], None]) -> None:
        if self.given.mode == "stream":
            go_on()
            return
        self.at_barrier.append((self.clock.now, go_on))
        self._release_barrier()

    def _release_barrier(self) -> None:
        if self.at_barrier and len(self.at_barrier) == len(self.live):
            waiting, self.at_barrier = self.at_barrier, []
            for since, go_on in waiting:
                self.parts[OTHERS] += self.clock.now - since
                go_on()
