"""Episodes, turn by turn, with any Sampler: tasks in, groups of recorded trajectories out.

All live episodes advance together: one `generate` a turn, then one `step` each. What an environment
raises ends its episode and is recorded, as is a reply that a sampler gives up on; what a sampler
raises ends the rollout.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol, TypeVar

import numpy as np

from moored.engine.base import Request, Sampler, SamplingParams
from moored.envs.base import Environment, StepResult
from moored.errors import EnvError
from moored.rollout.render import Spans
from moored.types import (
    Completion,
    Content,
    FinishReason,
    Group,
    Message,
    Prompt,
    StopReason,
    Trajectory,
    Turn,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One group to roll out: a task, and one seed for each of its episodes."""

    group_id: int
    env: str
    make_env: Callable[[], Environment]
    task_seed: int
    episode_seeds: tuple[int, ...]


class DialogueRenderer(Protocol):
    """What episodes need of a `Renderer`."""

    def start(self, messages: Sequence[Message]) -> Prompt: ...

    def expect(self, observations: Iterable[Content]) -> None: ...

    def extend(
        self,
        prompt: Prompt,
        completion_ids: np.ndarray,
        reply: str,
        observation: Content,
        history: Sequence[Message],
    ) -> Prompt: ...

    def decode(self, completion_ids: np.ndarray) -> str: ...

    def spans(self, completion_ids: np.ndarray, text: str) -> Spans: ...


class EnvPool:
    """Environments kept for reuse, by the function that makes them; close it when done."""

    def __init__(self) -> None:
        self._idle: dict[Callable[[], Environment], list[Environment]] = {}

    def take(self, make_env: Callable[[], Environment]) -> Environment:
        """An idle environment, or a new one."""
        idle = self._idle.get(make_env)
        return idle.pop() if idle else make_env()

    def give_back(self, make_env: Callable[[], Environment], env: Environment) -> None:
        self._idle.setdefault(make_env, []).append(env)

    def close(self) -> None:
        for env in itertools.chain.from_iterable(self._idle.values()):
            _close(env)
        self._idle.clear()

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def roll_out(
    tasks: Sequence[Task],
    *,
    sampler: Sampler,
    renderer: DialogueRenderer,
    params: SamplingParams,
    max_context: int,
    seed: tuple[int, ...],
    pool: EnvPool | None = None,
    workers: int = 0,
    on_turn: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """Play every episode of `tasks` to its end; one group a task, in order.

    A reply's randomness comes from `seed` (e.g. run seed and step), the episode's two seeds and the
    turn, so it does not matter what else is in the batch. `max_context` bounds prompt plus reply.
    `workers` > 0 steps environments in that many threads. `on_turn` hears the turn, counted from 0,
    and the number of live episodes.
    """
    max_prompt = max_context - params.max_tokens
    with ExitStack() as stack:
        envs = pool or stack.enter_context(EnvPool())
        episodes = [
            _Episode(task, episode_seed, envs.take(task.make_env), renderer, max_prompt)
            for task in tasks
            for episode_seed in task.episode_seeds
        ]
        stack.callback(_release, episodes, envs)
        stack.callback(sampler.end_sessions, range(len(episodes)))
        each = stack.enter_context(_mapper(workers))
        for episode, messages in zip(episodes, each(_reset, episodes), strict=True):
            episode.begin(messages)
        for turn in itertools.count():
            live = {i: episode for i, episode in enumerate(episodes) if episode.stop is None}
            if not live:
                break
            if on_turn is not None:
                on_turn(turn, len(live))
            requests = [episode.request(session, seed) for session, episode in live.items()]
            _advance(live.values(), sampler.generate(requests, params), renderer, each)
    members = iter(episodes)
    return [_group(task, itertools.islice(members, len(task.episode_seeds))) for task in tasks]


def _advance(
    live: Iterable[_Episode],
    completions: Sequence[Completion],
    renderer: DialogueRenderer,
    each: Callable[..., Iterator],
) -> None:
    """Step every episode that got a reply; end the others."""
    answered: list[tuple[_Episode, Completion]] = []
    for episode, completion in zip(live, completions, strict=True):
        if completion.finish_reason is FinishReason.ERROR:
            episode.lose_reply(completion.text)
        else:
            answered.append((episode, completion))
    replies = [renderer.decode(completion.token_ids) for _, completion in answered]
    results = list(each(_step, [episode for episode, _ in answered], replies))
    going_on = (r.observation for r in results if isinstance(r, StepResult) and not r.is_over)
    renderer.expect(going_on)
    for (episode, completion), reply, result in zip(answered, replies, results, strict=True):
        episode.record(completion, reply, result)


@dataclass(slots=True, eq=False)
class _Episode:
    """One episode on its way."""

    task: Task
    seed: int
    env: Environment
    renderer: DialogueRenderer
    max_prompt: int
    """Longest prompt that leaves room for a reply."""
    history: list[Message] = field(default_factory=list)
    prompt: Prompt = field(default_factory=lambda: Prompt(np.zeros(0, dtype=np.int64)))
    turns: list[Turn] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)
    num_cut_replies: int = 0
    stop: StopReason | None = None
    success: bool = False

    def begin(self, messages: list[Message] | Exception) -> None:
        """Take what `reset` gave."""
        if isinstance(messages, Exception):
            self._fail(messages)
            return
        self.history = list(messages)
        self._see(self.renderer.start(messages))

    def request(self, session: int, seed: tuple[int, ...]) -> Request:
        """Ask for the next reply."""
        key = repr((seed, self.task.task_seed, self.seed, len(self.turns)))
        digest = blake2b(key.encode(), digest_size=8).digest()
        # 63 bits, because not every generator takes a 64th.
        reply_seed = int.from_bytes(digest) >> 1
        return Request(
            session=session, prompt=self.prompt, seed=reply_seed, messages=tuple(self.history)
        )

    def lose_reply(self, why: str) -> None:
        """End without the reply that was asked for."""
        self.stop = StopReason.SAMPLER_ERROR
        self._warn(f"the sampler gave no reply: {why}")

    def record(self, completion: Completion, reply: str, result: StepResult | Exception) -> None:
        """Take what the sampler wrote and what `step` made of it."""
        spans = self.renderer.spans(completion.token_ids, reply)
        if isinstance(result, Exception):
            self._fail(result)
            is_valid = spans.answer is not None
            result = StepResult(observation="", reward=0.0, terminated=True, is_valid=is_valid)
        turn = Turn(
            prompt=self.prompt,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            think_span=spans.think,
            answer_span=spans.answer,
            reply=reply,
            seen=self.history[-1].content,
            reward=float(result.reward),
            is_valid=result.is_valid,
            policy_version=completion.policy_version,
        )
        self.turns.append(turn)
        self.metrics.update(result.metrics)
        self.num_cut_replies += completion.finish_reason is FinishReason.LENGTH
        self.success = self.success or result.success
        if self.stop is None:
            self._go_on(turn, result)

    def _go_on(self, turn: Turn, result: StepResult) -> None:
        if result.terminated:
            self.stop = StopReason.DONE
        elif result.truncated or len(self.turns) >= self.env.max_turns:
            self.stop = StopReason.TURN_LIMIT
        else:
            prompt = self.renderer.extend(
                turn.prompt, turn.completion_ids, turn.reply, result.observation, self.history
            )
            self.history += [Message("assistant", turn.reply), Message("user", result.observation)]
            self._see(prompt)

    def _see(self, prompt: Prompt) -> None:
        self.prompt = prompt
        if len(prompt.ids) <= self.max_prompt:
            return
        self.stop = StopReason.CONTEXT_LIMIT
        if not self.turns:
            self._warn(
                f"the first prompt has {len(prompt.ids)} tokens, but only {self.max_prompt} leave "
                f"room for a reply; raise max_context or lower max_tokens"
            )

    def _fail(self, error: Exception) -> None:
        self.stop = StopReason.ENV_ERROR
        self._warn(f"the environment raised {type(error).__name__}: {error}")
        logger.debug("where it was raised:", exc_info=error)

    def _warn(self, what: str) -> None:
        where = self.task.env, self.task.task_seed, self.seed, len(self.turns)
        logger.warning("%s task %d, episode %d, turn %d: %s", *where, what)

    def trajectory(self) -> Trajectory:
        """The finished record."""
        assert self.stop is not None
        own = {
            "num_turns": len(self.turns),
            "num_invalid_turns": sum(not turn.is_valid for turn in self.turns),
            "num_sampled_tokens": sum(len(turn.completion_ids) for turn in self.turns),
            "num_cut_replies": self.num_cut_replies,
            "num_env_errors": self.stop is StopReason.ENV_ERROR,
        }
        return Trajectory(
            env=self.task.env,
            task_seed=self.task.task_seed,
            episode_seed=self.seed,
            turns=tuple(self.turns),
            stop=self.stop,
            success=self.success,
            metrics={name: float(value) for name, value in {**self.metrics, **own}.items()},
        )


def _attempt(call: Callable[..., T], *args: object) -> T | Exception:
    """The one place that catches: what an environment raises is data."""
    try:
        return call(*args)
    except Exception as error:
        return error


def _reset(episode: _Episode) -> list[Message] | Exception:
    return _attempt(episode.env.reset, episode.task.task_seed, episode.seed)


def _step(episode: _Episode, reply: str) -> StepResult | Exception:
    return _attempt(_checked_step, episode.env, reply)


def _checked_step(env: Environment, reply: str) -> StepResult:
    result = env.step(reply)
    if not math.isfinite(result.reward):
        raise EnvError(f"a reward must be a finite number, got {result.reward}")
    return result


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterator]]:
    """`map`, in this thread or in `workers` threads."""
    if not workers:
        yield map
        return
    with ThreadPoolExecutor(workers) as threads:
        yield threads.map


def _release(episodes: Sequence[_Episode], pool: EnvPool) -> None:
    """Give environments back; one that raised may be broken, and is closed."""
    for episode in episodes:
        if episode.stop is StopReason.ENV_ERROR:
            _close(episode.env)
        else:
            pool.give_back(episode.task.make_env, episode.env)


def _close(env: Environment) -> None:
    error = _attempt(env.close)
    if error is not None:
        logger.warning("%s could not be closed: %s: %s", env.name, type(error).__name__, error)


def _group(task: Task, episodes: Iterable[_Episode]) -> Group:
    return Group(
        group_id=task.group_id,
        env=task.env,
        task_seed=task.task_seed,
        trajectories=tuple(episode.trajectory() for episode in episodes),
    )
