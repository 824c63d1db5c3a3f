"""Episodes, turn by turn, with any Sampler: tasks in, groups of recorded trajectories out.

Replies come from a stream, answers from environments; each is recorded when it arrives, and the
episode's next turn is requested at once. With a lockstep stream all live episodes advance together.
What an environment raises ends its episode and is recorded, like a reply that a sampler gives up
on; what a sampler raises ends the rollout.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from moored.config import RolloutConfig
from moored.engine.base import Request, Sampler, SamplingParams, Stream, new_session
from moored.envs.base import Environment, StepResult
from moored.errors import describe_raised
from moored.rollout.pool import Answer, EnvCalls, EnvPool, Played, Question
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

POLL_S = 0.002
"""How long to wait for replies while environments are working too."""
LOOK_S = 1.0
"""How long to wait for replies at most: the rollout may no longer be wanted."""
QUICK_S = 0.001
"""How long to wait for an environment while replies are written."""
MOST_ALIKE = 3
"""Warnings of a rollout that are logged in full where they say the same."""
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

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""
        ...

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

    def observation_start(self, prompt: Prompt, messages: Sequence[Message]) -> int | None: ...

    def decode(self, completion_ids: np.ndarray) -> str: ...

    def spans(self, completion_ids: np.ndarray, text: str) -> Spans: ...


class Writer(Protocol):
    """What episodes need of an `Engine`."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def renderer(self) -> DialogueRenderer: ...


def roll_out(
    tasks: Sequence[Task],
    *,
    engine: Writer,
    options: RolloutConfig,
    seed: tuple[int, ...],
    temperature: float | None = None,
    pool: EnvCalls[Any] | None = None,
    on_replies: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """Play every episode of `tasks` to its end; one group per task, in order.

    A reply's randomness comes from `seed` (e.g. run seed and step), the episode's two seeds and the
    turn, so it does not depend on other episodes. `temperature` replaces that of `options`.
    `on_replies` is called now and then with the number of replies so far and of episodes still
    running; what it raises ends the rollout.
    """
    renderer = engine.renderer
    params = SamplingParams(
        max_tokens=options.max_response_tokens,
        temperature=options.temperature if temperature is None else temperature,
        stop_ids=renderer.stop_ids,
    )
    max_prompt = options.max_context - params.max_tokens
    with ExitStack() as stack:
        envs = pool or stack.enter_context(closing(EnvPool()))
        warnings = _Warnings()
        stack.callback(warnings.sum_up)
        episodes: dict[int, _Episode] = {}
        # Before the first is taken: where one cannot be made, the others are given back.
        stack.callback(_release, episodes.values(), envs)
        for task in tasks:
            for episode_seed in task.episode_seeds:
                env = envs.take(task.make_env)
                episode = _Episode(task, episode_seed, env, max_prompt, warnings)
                episodes[new_session()] = episode
        stack.callback(envs.drop_calls)
        stream = stack.enter_context(closing(engine.sampler.stream(params)))
        _Rollout(episodes, stream, envs, renderer, seed, on_replies).play()
    members = iter(episodes.values())
    return [_group(task, itertools.islice(members, len(task.episode_seeds))) for task in tasks]


@dataclass(slots=True, eq=False)
class _Rollout:
    """The episodes, by session, between a stream of replies and a pool of environments."""

    episodes: dict[int, _Episode]
    stream: Stream
    pool: EnvCalls[Any]
    renderer: DialogueRenderer
    seed: tuple[int, ...]
    on_replies: Callable[[int, int], None] | None
    num_replies: int = 0
    num_stepping: int = 0
    """Calls of environments under way."""
    num_writing: int = 0
    """Replies under way."""

    def play(self) -> None:
        """Go on until no episode waits for anything."""
        self._ask(
            [
                (session, episode.env, (episode.task.task_seed, episode.seed))
                for session, episode in self.episodes.items()
            ]
        )
        while self.num_stepping or self.num_writing:
            self._take_answers(self._answers())
            self._take_replies(self.stream.poll(POLL_S if self.num_stepping else LOOK_S))

    def _ask(self, questions: Sequence[tuple[int, Played, Question]]) -> None:
        self.num_stepping += len(questions)
        self.pool.ask(questions)

    def _answers(self) -> list[tuple[int, Answer]]:
        """Answers of environments, in the order of the episodes; in lockstep, of all of them.

        Otherwise those that answer quickly are waited for, so that their next turns enter together.
        """
        if not self.num_stepping:
            return []
        found = self.pool.poll(
            wait_s=QUICK_S if self.num_writing else None,
            linger_s=None if self.stream.is_lockstep else QUICK_S,
        )
        self.num_stepping -= len(found)
        return sorted(found, key=lambda answer: answer[0])

    def _take_answers(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Record what environments returned, and ask for the next replies."""
        results = (result for _, result in answers)
        self.renderer.expect(
            result.observation
            for result in results
            if isinstance(result, StepResult) and not result.is_over
        )
        ended = []
        for session, result in answers:
            episode = self.episodes[session]
            episode.take(result, self.renderer)
            if episode.stop is None:
                self.num_writing += 1
                self.stream.submit(episode.request(session, self.seed))
            else:
                ended.append(session)
        self.stream.end(ended)

    def _take_replies(self, replies: Sequence[tuple[int, Completion]]) -> None:
        """Hand replies to environments; an episode whose reply is lost ends.

        All are decoded before an environment is asked: decoding lets other threads run, and would
        take turns with theirs.
        """
        self.num_writing -= len(replies)
        self.num_replies += len(replies)
        questions: list[tuple[int, Played, Question]] = []
        for session, completion in replies:
            episode = self.episodes[session]
            if completion.finish_reason is FinishReason.ERROR:
                episode.lose_reply(completion.error)
                self.stream.end([session])
                continue
            text = self.renderer.decode(completion.token_ids)
            episode.reply = completion, text, self.renderer.spans(completion.token_ids, text)
            questions.append((session, episode.env, text))
        self._ask(questions)
        if self.on_replies is not None:
            num_live = sum(episode.stop is None for episode in self.episodes.values())
            self.on_replies(self.num_replies, num_live)


@dataclass(slots=True, eq=False)
class _Episode:
    """One running episode."""

    task: Task
    seed: int
    env: Played
    max_prompt: int
    """Longest prompt that leaves room for a reply."""
    warnings: _Warnings
    history: list[Message] = field(default_factory=list)
    prompt: Prompt = field(default_factory=lambda: Prompt(np.zeros(0, dtype=np.int64)))
    reply: tuple[Completion, str, Spans] | None = None
    """What the environment is reading."""
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over turns."""
    num_cut_replies: int = 0
    stop: StopReason | None = None
    success: bool = False

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

    def take(self, answer: Answer, renderer: DialogueRenderer) -> None:
        """Record how the environment answered `reset` or a reply."""
        if isinstance(answer, Exception):
            self._fail(answer)
        if isinstance(answer, list):
            self.history = list(answer)
            self._see(renderer.start(answer))
        elif self.reply is not None:
            self._record(*self.reply, answer, renderer)

    def _record(
        self,
        completion: Completion,
        reply: str,
        spans: Spans,
        result: StepResult | Exception,
        renderer: DialogueRenderer,
    ) -> None:
        if isinstance(result, Exception):
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
            observation_start=renderer.observation_start(self.prompt, self.history),
            reward=float(result.reward),
            penalty=float(result.penalty),
            is_valid=result.is_valid,
            policy_version=completion.policy_version,
        )
        self.turns.append(turn)
        for name, value in result.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
        self.num_cut_replies += completion.finish_reason is FinishReason.LENGTH
        self.success = self.success or result.success
        if self.stop is None:
            self._go_on(turn, result, renderer)

    def _go_on(self, turn: Turn, result: StepResult, renderer: DialogueRenderer) -> None:
        if result.terminated:
            self.stop = StopReason.DONE
        elif result.truncated or len(self.turns) >= self.env.max_turns:
            self.stop = StopReason.TURN_LIMIT
        else:
            prompt = renderer.extend(
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
                f"room for a reply; raise max_context or lower max_response_tokens"
            )

    def _fail(self, error: Exception) -> None:
        self.stop = StopReason.ENV_ERROR
        self._warn(f"the environment {describe_raised(error)}")
        logger.debug("where it was raised:", exc_info=error)

    def _warn(self, what: str) -> None:
        place = f"task {self.task.task_seed}, episode {self.seed}, turn {len(self.turns)}"
        self.warnings.add(self.task.env, place, what)

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
            success=self.success and not self.stop.is_error,
            metrics={name: float(value) for name, value in {**self.metrics, **own}.items()},
        )


@dataclass(slots=True, eq=False)
class _Warnings:
    """Of warnings that say the same, numbers aside, the first few, and how many more there are.

    A server that is gone costs all 128 episodes of a step, which have the same to say.
    """

    alike: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, env: str, place: str, what: str) -> None:
        found = self.alike.setdefault((env, re.sub(r"\d+", "0", what)), [])
        found.append(what)
        level = logging.WARNING if len(found) <= MOST_ALIKE else logging.DEBUG
        logger.log(level, "%s %s: %s", env, place, what)

    def sum_up(self) -> None:
        for (env, _), found in self.alike.items():
            num_more = len(found) - MOST_ALIKE
            if num_more > 0:
                episodes = "episode" if num_more == 1 else "episodes"
                what = f"{num_more} more {episodes} like these"
                logger.warning("%s, %s: %s", env, what, found[-1])


def _release(episodes: Iterable[_Episode], pool: EnvCalls[Any]) -> None:
    """Give environments back; one that raised or hung may be broken, and is closed."""
    for episode in episodes:
        if episode.stop is StopReason.ENV_ERROR:
            pool.discard(episode.env)
        else:
            pool.give_back(episode.task.make_env, episode.env)


def _group(task: Task, episodes: Iterable[_Episode]) -> Group:
    return Group(
        group_id=task.group_id,
        env=task.env,
        task_seed=task.task_seed,
        trajectories=tuple(episode.trajectory() for episode in episodes),
    )
