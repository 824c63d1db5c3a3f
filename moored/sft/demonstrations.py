"""Demonstrations: episodes that an environment's oracle plays, turn by turn.

Three kinds of replies, one kind per episode: *grounded* states facts of the observation and gives
the oracle's answer; *noised* states the same facts, but its answers are spoilt; *plain* is stock
phrases and a guess. An environment says how it is done by the methods of `moored.envs.teaching`;
without them, facts become stock phrases, and spoilt answers and guesses the oracle's answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from moored.envs.base import Environment
from moored.envs.teaching import Guesses, Reasons, Spoils
from moored.errors import EnvError
from moored.reply import format_reply
from moored.sft.boilerplate import write_boilerplate
from moored.types import Message

Kind = Literal["grounded", "noised", "plain"]


@dataclass(frozen=True, slots=True)
class TraceMix:
    """Which kinds of replies are demonstrated."""

    grounded: float = 1.0
    """Share of episodes that state facts; the others are plain."""
    noised: float = 0.0
    """Share of these whose answers are spoilt."""
    noise: float = 0.3
    """Chance that a part of such an answer, e.g. an action, is wrong."""

    @property
    def shares(self) -> dict[Kind, float]:
        """Share of each kind of episode."""
        noised = self.grounded * self.noised
        return {"grounded": self.grounded - noised, "noised": noised, "plain": 1 - self.grounded}

    def draw(self, rng: random.Random) -> Kind:
        return rng.choices(list(self.shares), weights=list(self.shares.values()))[0]


@dataclass(frozen=True, slots=True)
class Episode:
    """A demonstrated episode."""

    messages: tuple[Message, ...]
    """The dialogue; the last message is a reply."""
    is_valid: bool
    """The environment could read every reply."""
    success: bool
    reward: float = 0.0
    """Sum over its turns."""


def play(
    env: Environment,
    task_seed: int,
    rng: random.Random,
    *,
    kind: Kind = "grounded",
    noise: float = 0.3,
) -> Episode:
    """Play one episode to its end, or for `max_turns`, as a rollout does.

    Where neither the oracle nor a guess has an answer, it ends with the last reply there was.
    """
    messages = env.reset(task_seed, episode_seed=rng.getrandbits(31))
    is_valid, success, num_turns, reward = True, False, 0, 0.0
    while (reply := write_reply(env, kind, noise, rng)) is not None:
        messages.append(Message("assistant", reply))
        result = env.step(reply)
        is_valid, success = is_valid and result.is_valid, result.success
        num_turns, reward = num_turns + 1, reward + result.reward
        if result.is_over or num_turns >= env.max_turns:
            break
        messages.append(Message("user", result.observation))
    else:
        messages = messages[:-1]
    return Episode(tuple(messages), is_valid, success, reward)


def write_reply(env: Environment, kind: Kind, noise: float, rng: random.Random) -> str | None:
    """One reply to the state that the environment is in; None where no answer is known."""
    if kind == "plain":
        reasoning = write_boilerplate(rng)
        answer = _guess(env, rng) if isinstance(env, Guesses) else answer_of(env)
        return format_reply(reasoning, answer) if answer else None
    answer = answer_of(env)
    if not answer:
        if not isinstance(env, Guesses):
            return None
        answer = _guess(env, rng)
    elif kind == "noised":
        answer = spoil(env, answer, noise, rng)
    if not isinstance(env, Reasons):
        return format_reply(write_boilerplate(rng), answer)
    return format_reply(_text("reasoning", env.reasoning(answer, rng)), answer)


def answer_of(env: Environment) -> str:
    """What the oracle answers; empty where it knows no answer."""
    answer = env.oracle()
    return "" if answer is None else _text("oracle", answer)


def _guess(env: Guesses, rng: random.Random) -> str:
    return _text("guess", env.guess(rng))


def _text(method: str, value: object) -> str:
    """The value, which an environment's own method returned and should be a text."""
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    raise EnvError(
        f"{method}() must return a text, got {repr(value)[:80]} of type {kind}; return a str"
    )


def spoil(env: Environment, answer: str, noise: float, rng: random.Random) -> str:
    """The answer with mistakes, as far as the environment knows how to make them."""
    if isinstance(env, Spoils):
        return _text("spoil", env.spoil(answer, noise, rng))
    if isinstance(env, Guesses) and rng.random() < noise:
        return _guess(env, rng)
    return answer
