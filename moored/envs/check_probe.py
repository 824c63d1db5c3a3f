"""How the rules of `check_env` play an environment: scripts, replays, comparisons, type checks.

Every result that passes through here is checked for its types, so a rule sees clean values only.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moored.envs.base import SPLIT_SEEDS, Environment, StepResult, format_reply
from moored.types import Message, messages_digest

MALFORMED = "This reply has no tags."
HASH_SEEDS = ("1", "2")
_FRESH_PROCESS_LIMIT_S = 120
_FIRST_ROLES = ["system", "user"]


class Broken(Exception):
    """The environment breaks a rule; the message says what was wrong, what came, what to do."""


class NotApplicable(Exception):
    """A rule cannot be checked on this environment; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The environment under test and how hard to test it."""

    maker: Callable[[], object]
    num_tasks: int
    num_episodes: int
    num_split_seeds: int
    max_observation_chars: int
    reply_limit_s: float
    _made: list[object] = field(default_factory=list)
    _scripts: dict[int, tuple[list[str], ...]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """Train tasks, then the first validation and the first test task."""
        others = SPLIT_SEEDS["validation"].start, SPLIT_SEEDS["test"].start
        return [*range(self.num_tasks), *others]

    def make(self) -> Environment:
        env = self.maker()
        self._made.append(env)
        return env  # pyright: ignore[reportReturnType]

    def close_all(self) -> None:
        """Close what `make` gave out."""
        while self._made:
            close = getattr(self._made.pop(), "close", None)
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


def play_oracle(
    env: Environment, seed: int, episode: int = 0
) -> tuple[list[str], list[StepResult]]:
    """Let the oracle play one episode; what it replied, and what that led to."""
    env.reset(seed, episode)
    replies: list[str] = []
    results: list[StepResult] = []
    while len(replies) < env.max_turns and not (results and results[-1].done):
        replies.append(format_reply("", env.oracle()))
        results.append(expect_result(env.step(replies[-1])))
    return replies, results


def replay(
    env: Environment, seed: int, replies: Sequence[str], episode: int = 0
) -> list[StepResult]:
    """Reset and give the replies in order, until done."""
    env.reset(seed, episode)
    return feed(env, replies)


def feed(env: Environment, replies: Sequence[str]) -> list[StepResult]:
    """Give the replies in order, until done."""
    results: list[StepResult] = []
    for reply in replies:
        results.append(expect_result(env.step(reply)))
        if results[-1].done:
            break
    return results


def time_reply(env: Environment, seed: int, reply: str, limit_s: float) -> float:
    """Seconds one step takes. A slow one is repeated: the machine may have been busy."""
    best_s = float("inf")
    for _ in range(3):
        env.reset(seed)
        start = time.perf_counter()
        result = env.step(reply)
        best_s = min(best_s, time.perf_counter() - start)
        expect_result(result)
        if best_s <= limit_s:
            break
    return best_s


def difference(a: Sequence[StepResult], b: Sequence[StepResult]) -> str:
    """Say where two episodes part; empty when they are equal."""
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
        "done": result.done,
        "is_valid": result.is_valid,
        "success": result.success,
        "metrics": dict(result.metrics),
        "observation": messages_digest([Message("user", result.observation)])[:8],
    }


def copy_by_pickle(env: Environment) -> Environment:
    """A copy made by pickling, or Broken with the reason."""
    try:
        return pickle.loads(pickle.dumps(env))
    except Exception as error:
        raise Broken(
            f"pickling raised {type(error).__name__}: {error}; keep plain data in attributes (no "
            f"lambdas, generators, open files) and define the class at the top of a module"
        ) from error


def digests_in_fresh_processes(subject: Subject) -> list[list[str]]:
    """First-message digests of all seeds, as processes with other hash seeds find them."""
    job = _pickle_job(subject)
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-c", f"from {__name__} import print_digests; print_digests()"]
    children = [
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for hash_seed in HASH_SEEDS
    ]
    try:
        return [_read_digests(child, job) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def print_digests() -> None:
    """Run in a fresh process: read a job from stdin, print the digests as JSON."""
    maker, env, seeds = pickle.load(sys.stdin.buffer)
    env = maker() if env is None else env
    print(json.dumps([messages_digest(env.reset(seed)) for seed in seeds]))


def _pickle_job(subject: Subject) -> bytes:
    try:
        return pickle.dumps((subject.maker, None, subject.seeds))
    except Exception:
        # A lambda or local function: send what it makes.
        try:
            return pickle.dumps((None, subject.make(), subject.seeds))
        except Exception as error:
            raise NotApplicable(f"a fresh process cannot be handed this class: {error}") from error


def _read_digests(child: subprocess.Popen[bytes], job: bytes) -> list[str]:
    try:
        output, errors = child.communicate(job, timeout=_FRESH_PROCESS_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Broken(f"a fresh process took over {_FRESH_PROCESS_LIMIT_S} s for reset") from None
    if child.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        raise Broken(f"a fresh process could not make the first messages: {lines[-1]}")
    return json.loads(output.splitlines()[-1])


def expect_attributes(env: object) -> None:
    """Raise unless `env` has the attributes and methods of the protocol."""
    kinds: tuple[tuple[str, type], ...] = (
        ("name", str),
        ("is_stochastic", bool),
        ("max_turns", int),
    )
    for name, kind in kinds:
        value = getattr(env, name, None)
        if type(value) is not kind:
            raise Broken(
                f"{type(env).__name__}.{name} must be a {kind.__name__}, got {value!r:.80}"
            )
    if not getattr(env, "name", ""):
        raise Broken(f"{type(env).__name__}.name is empty; name the environment")
    if getattr(env, "max_turns", 0) < 1:
        raise Broken(f"max_turns must be at least 1, got {getattr(env, 'max_turns', None)}")
    for name in ("reset", "step", "oracle", "close"):
        if not callable(getattr(env, name, None)):
            raise Broken(
                f"{type(env).__name__} has no method {name}(); see moored.envs.Environment"
            )


def expect_messages(messages: object) -> None:
    """Raise unless `messages` is what `reset` must return."""
    if not isinstance(messages, list) or not all(isinstance(item, Message) for item in messages):
        raise Broken(f"reset() must return a list of moored.types.Message, got {messages!r:.80}")
    roles = [message.role for message in messages]
    if roles != _FIRST_ROLES:
        raise Broken(f"reset() must return a system and a user message, got roles {roles}")
    for message in messages:
        _expect_content(message.content, f"the first {message.role} message")
        if not message.content:
            raise Broken(f"the first {message.role} message is empty; say what the task is")


def expect_result(result: object) -> StepResult:
    """Return `result` when its fields have the right types, else raise."""
    if not isinstance(result, StepResult):
        raise Broken(f"step() must return a moored.envs.StepResult, got {result!r:.80}")
    if isinstance(result.reward, bool) or not isinstance(result.reward, float | int):
        raise Broken(f"reward must be a float, got {result.reward!r:.80}; use float(...)")
    for name in ("done", "is_valid", "success"):
        value = getattr(result, name)
        if type(value) is not bool:
            raise Broken(f"{name} must be a bool, got {value!r:.80}; use bool(...)")
    if not isinstance(result.metrics, Mapping):
        raise Broken(f"metrics must map names to numbers, got {result.metrics!r:.80}")
    for name, value in result.metrics.items():
        if not isinstance(name, str) or not isinstance(value, float | int):
            raise Broken(f"metrics must map names to numbers, got {name!r}: {value!r:.80}")
    _expect_content(result.observation, "an observation")
    return result


def _expect_content(content: object, what: str) -> None:
    if not isinstance(content, str | list):
        raise Broken(f"{what} must be text or a list of parts, got {content!r:.80}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                _expect_utf8(text, what)
            case {"type": "image", "image": image} if hasattr(image, "tobytes"):
                pass
            case _:
                raise Broken(
                    f"a part of {what} must be {{'type': 'text', 'text': …}} or {{'type': "
                    f"'image', 'image': a PIL image}}, got {part!r:.80}"
                )


def _expect_utf8(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Broken(
            f"{what} cannot be encoded: {error.reason} at character {error.start}; do not echo "
            f"what a reply holds"
        ) from error
