"""How the rules of `check_env` play an environment: scripts, replays, comparisons.

`Probe` is the environment under test, each call announced and each result checked; `Subject` makes
probes and says how hard to test.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from moored.envs.base import SPLIT_SEEDS, Environment, StepResult
from moored.envs.check.types import Broken, expect_result
from moored.envs.resources import SharedResources, detached
from moored.envs.teaching import Guesses
from moored.reply import format_reply
from moored.types import Message, messages_digest

MALFORMED = "This reply has no tags."


class NotApplicable(Exception):
    """A rule cannot be checked on this environment; the message says why."""


def announce_nothing(call: str) -> None:
    """For probes that are not watched."""


@dataclass(slots=True)
class Probe:
    """An environment under test: says what it is about to call, and checks what comes back."""

    env: Environment
    announce: Callable[[str], None] = announce_nothing
    _task: str = ""

    @property
    def is_stochastic(self) -> bool:
        return self.env.is_stochastic

    @property
    def max_turns(self) -> int:
        return self.env.max_turns

    def reset(self, seed: int, episode: int = 0) -> list[Message]:
        self._task = f"of task {seed}, episode {episode}"
        self.announce(f"reset({seed}, {episode})")
        return self.env.reset(seed, episode)

    def step(self, reply: str) -> StepResult:
        self.announce(f"step({shorten(reply)}) {self._task}")
        return expect_result(self.env.step(reply))

    def oracle(self) -> str:
        self.announce(f"oracle() {self._task}")
        return self.env.oracle()

    def guess(self, rng: random.Random) -> str:
        """A guess of an environment that `Guesses`."""
        self.announce(f"guess() {self._task}")
        return cast(Guesses, self.env).guess(rng)

    def close(self) -> None:
        self.announce("close()")
        self.env.close()

    def copy(self) -> Probe:
        """A copy of the environment made by pickling, or Broken with the reason."""
        self.announce(f"pickle.dumps {self._task}")
        try:
            with detached(self.env) as resources:
                copy = pickle.loads(pickle.dumps(self.env))
            for name, resource in resources.items():
                setattr(copy, name, resource)
            return Probe(copy, self.announce, self._task)
        except Exception as error:
            raise Broken(
                f"pickling raised {type(error).__name__}: {error}; keep plain data in attributes "
                f"(no lambdas, generators, open files) and define the class at the top of a module"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The environment under test and how hard to test it."""

    maker: Callable[[], object]
    num_tasks: int
    num_episodes: int
    num_split_seeds: int
    max_observation_chars: int
    reply_limit_s: float
    announce: Callable[[str], None] = announce_nothing
    is_watched: bool = False
    """True in a child process that the keyboard does not interrupt."""
    _made: list[object] = field(default_factory=list)
    _resources: SharedResources = field(default_factory=SharedResources)
    _scripts: dict[int, tuple[list[str], ...]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """Train tasks, then the first validation and the first test task."""
        others = SPLIT_SEEDS["validation"].start, SPLIT_SEEDS["test"].start
        return [*range(self.num_tasks), *others]

    def make(self) -> Probe:
        self.announce("the constructor")
        env: Any = self.maker()
        self._made.append(env)
        self._resources.attach(env)
        return Probe(env, self.announce)

    def close_resources(self) -> None:
        """Close what the environments shared."""
        self._resources.close()

    def close_all(self) -> None:
        """Close the environments that `make` returned; the rule "protocol" checks that it works."""
        while self._made:
            close = getattr(self._made.pop(), "close", None)
            self.announce("close()")
            with contextlib.suppress(Exception, SystemExit):
                if callable(close):
                    close()

    def scripts(self, seed: int) -> tuple[list[str], ...]:
        """Replies for one task: the oracle's, malformed ones, and another task's oracle's."""
        if seed not in self._scripts:
            env = self.make()
            own, _ = play_oracle(env, seed)
            other, _ = play_oracle(env, seed + 1)
            malformed = [MALFORMED] * env.max_turns
            self._scripts[seed] = (own, malformed, (other + malformed)[: env.max_turns])
        return self._scripts[seed]

    def portable_maker(self) -> Callable[[], object]:
        """A maker another process can be handed, or NotApplicable with the reason."""
        maker = self.maker
        try:
            data = pickle.dumps(maker)
        except Exception:
            data = self._pickle_instance()  # of a lambda or local function
            maker = functools.partial(pickle.loads, data)
        if b"__main__" in data:
            raise NotApplicable(
                "the class lives in a script or notebook, where a fresh process cannot find it; "
                "move it into a module and give 'module:Class'"
            )
        return maker

    def _pickle_instance(self) -> bytes:
        try:
            return pickle.dumps(self.maker())
        except Exception as error:
            raise NotApplicable(f"a fresh process cannot be handed this class: {error}") from error


def play_oracle(env: Probe, seed: int, episode: int = 0) -> tuple[list[str], list[StepResult]]:
    """Let the oracle play one episode; what it replied, and what that led to."""
    env.reset(seed, episode)
    replies: list[str] = []
    results: list[StepResult] = []
    while len(replies) < env.max_turns and not (results and results[-1].is_over):
        replies.append(format_reply("", env.oracle()))
        results.append(env.step(replies[-1]))
    return replies, results


def play_guesses(env: Probe, seed: int, rng: random.Random) -> list[StepResult]:
    """Play one episode of guesses; none where the environment offers no guess."""
    results: list[StepResult] = []
    env.reset(seed)
    while isinstance(env.env, Guesses) and not (results and results[-1].is_over):
        results.append(env.step(format_reply("", env.guess(rng))))
    return results


def replay(env: Probe, seed: int, replies: Sequence[str], episode: int = 0) -> list[StepResult]:
    """Reset and give the replies in order, until the episode is over."""
    env.reset(seed, episode)
    return feed(env, replies)


def feed(env: Probe, replies: Sequence[str]) -> list[StepResult]:
    """Give the replies in order, until the episode is over."""
    results: list[StepResult] = []
    for reply in replies:
        results.append(env.step(reply))
        if results[-1].is_over:
            break
    return results


def find_opening(env: Probe, seed: int) -> list[str]:
    """A reply that leads into the middle of an episode; none where the first turn is the last."""
    env.reset(seed)
    openings = format_reply("", env.oracle()), MALFORMED
    lasting = (reply for reply in openings if not replay(env, seed, [reply])[-1].is_over)
    return [reply for reply in (next(lasting, None),) if reply is not None]


def time_reply(
    env: Probe, seed: int, reply: str, limit_s: float, opening: Sequence[str] = ()
) -> float:
    """Seconds one step takes. A slow one is repeated: the machine may have been busy."""
    best_s = float("inf")
    for _ in range(3):
        replay(env, seed, opening)
        start = time.perf_counter()
        env.step(reply)
        best_s = min(best_s, time.perf_counter() - start)
        if best_s <= limit_s:
            break
    return best_s


def total_reward(results: Sequence[StepResult]) -> float:
    return sum(result.reward for result in results)


def difference(a: Sequence[StepResult], b: Sequence[StepResult]) -> str:
    """Say where two episodes differ; empty when they are equal."""
    for turn, (x, y) in enumerate(zip(a, b, strict=False), start=1):
        for name, value in _facts(x).items():
            other = _facts(y)[name]
            if value != other:
                return f"turn {turn}: {name} {value} against {other}"
    return "" if len(a) == len(b) else f"{len(a)} turns against {len(b)}"


def expect_same(a: Sequence[StepResult], b: Sequence[StepResult], seed: int, where: str) -> None:
    """Raise when two episodes differ; `where` says what the second one was played in."""
    parting = difference(a, b)
    if parting:
        raise Broken(
            f"task seed {seed}: the same replies led elsewhere in {where} ({parting}); results "
            f"may depend on the seeds and the replies only"
        )


def _facts(result: StepResult) -> dict[str, object]:
    return {
        "reward": result.reward,
        "penalty": result.penalty,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "is_valid": result.is_valid,
        "success": result.success,
        "metrics": dict(result.metrics),
        "observation": messages_digest([Message("user", result.observation)])[:8],
    }


def shorten(reply: str) -> str:
    """A reply as messages show it."""
    return f"{reply[:60]!a}… {len(reply)} characters" if len(reply) > 60 else f"{reply!a}"
