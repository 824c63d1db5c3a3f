"""Environments of the verifiers package (its v1 interface), played turn by turn.

In: the id of an installed taskset. Out: a moored environment with its tasks, turns and rewards.
`verifiers_episode` runs the episodes. What needs a runtime, tools or a judge model is refused.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar

from moored.envs.adapters.turns import TextGame
from moored.envs.adapters.verifiers_episode import NO_MORE_TURNS, Answer, Asked, Ended, Episode
from moored.envs.base import FORMAT_REMINDER, StepResult, draw_task
from moored.errors import EnvError, require_packages
from moored.reply import parse_reply
from moored.types import Message

MAX_ANSWER_CHARS = 65_536


class Verifiers(TextGame):
    """A taskset or environment of verifiers' v1 interface (needs `moored[verifiers]`).

    Reward: the sum of the rewards that verifiers records, at the end of the episode; −0.1 for a
    malformed reply. Success is a reward of at least `success_reward`. The end of the environment's
    own run terminates the episode; `max_turns` truncates it, and what was reached is scored.

    Options:
        id: an installed taskset, as `--env.taskset.id` of verifiers takes it.
        config: fields of that taskset's config.
        env: fields of the environment's config, without the taskset.
        max_tasks (1000): tasks that are loaded; an infinite taskset has no more.
        max_turns (10): replies in an episode.
        success_reward (1.0): reward from which an episode counts as a success.
        is_stochastic (False): True for an environment with chance of its own.
        time_limit_s (60.0): waiting longer than this for the environment is an error.
        format_penalty (−0.1): reward of a malformed reply, which changes nothing.

    The model's answer becomes the content of the assistant's message, its reasoning the reasoning
    content. Refused, with the reason: tasks with tools, a container or set-up in a runtime, rewards
    that read a runtime, judge models, and environments of several agents. `oracle` is unknown.
    """

    name: ClassVar[str] = "verifiers"
    main_option: ClassVar[str] = "id"

    def __init__(
        self,
        *,
        id: str,
        config: Mapping[str, object] | None = None,
        env: Mapping[str, object] | None = None,
        max_tasks: int = 1000,
        max_turns: int = 10,
        success_reward: float = 1.0,
        is_stochastic: bool = False,
        time_limit_s: float = 60.0,
        format_penalty: float = -0.1,
    ) -> None:
        self.check_options(max_turns=max_turns, max_tasks=max_tasks, time_limit_s=time_limit_s)
        require_packages("environment verifiers", ("verifiers",))
        self.max_turns = max_turns
        self.is_stochastic = is_stochastic
        self.malformed_reward = format_penalty
        self._id, self._success_reward, self._time_limit_s = id, success_reward, time_limit_s
        taskset = {**(config or {}), "id": id}
        self._source = json.dumps({**(env or {}), "taskset": taskset}, sort_keys=True), max_tasks
        self._episode: Episode | None = None

    def check_available(self) -> None:
        env, tasks = load(*self._source)
        check_task(self._id, env, tasks[0])

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        self._end_episode()
        env, tasks = load(*self._source)

        def draw(rng: random.Random) -> int:
            return rng.randrange(len(tasks))

        self._task, _ = draw_task(task_seed, draw, lambda number: task_text(tasks[number]))
        check_task(self._id, env, tasks[self._task])
        self._answers: list[Answer] = []
        asked = self._begin()
        self._turn = 0
        self._over = False
        roles = [role for role, _ in asked.messages]
        system = "\n\n".join(text for role, text in asked.messages if role == "system")
        head = roles.count("system")
        if any(role not in ("user", "assistant") for role in roles[head:]):
            raise EnvError(f"verifiers: {self._id} begins with messages of the roles {roles}")
        rest = [Message(role, text) for role, text in asked.messages[head:]]  # pyright: ignore[reportArgumentType]
        rules = (
            f"You have at most {self.max_turns} turns. {self.malformed_rule()}\n{FORMAT_REMINDER}."
        )
        return [Message("system", f"{system}\n\n{rules}".strip()), *rest]

    def step(self, reply: str) -> StepResult:
        self.check_running("step")
        parts = parse_reply(reply)
        self._turn += 1
        try:
            if parts.answer is None or len(parts.answer) > MAX_ANSWER_CHARS:
                return self._after_malformed()
            answer = Answer(parts.think or "", parts.answer)
            self._catch_up()
            self._answers.append(answer)
            return self._after(self._give(answer))
        except EnvError:
            self._over, self._episode = True, None
            raise

    def oracle(self) -> str:
        raise EnvError(f"verifiers: {self._id} gives no good answers")

    def close(self) -> None:
        self._over = True
        self._end_episode()

    def __getstate__(self) -> dict[str, object]:
        # A copy runs an episode of its own, where `_catch_up` repeats the answers so far.
        return {**self.__dict__, "_episode": None}

    def _begin(self) -> Asked:
        env, tasks = load(*self._source)
        self._episode = Episode(env, tasks[self._task], self._time_limit_s)
        event = self._episode.next()
        if isinstance(event, Ended):
            raise EnvError(f"verifiers: {self._id} was over before the first reply")
        return event

    def _give(self, answer: Answer | None) -> Asked | Ended:
        assert self._episode is not None
        self._episode.reply(answer)
        return self._episode.next()

    def _catch_up(self) -> None:
        if self._episode is None:
            self._begin()
            for answer in self._answers:
                self._give(answer)

    def _end_episode(self) -> None:
        """Let the thread of an unfinished episode end."""
        episode, self._episode = self._episode, None
        if episode is not None:
            with suppress(RuntimeError):  # its loop has ended already
                episode.reply(NO_MORE_TURNS)

    def _after(self, event: Asked | Ended) -> StepResult:
        is_cut = isinstance(event, Asked) and self._turn >= self.max_turns
        if is_cut:
            event = self._finish_run()
        if isinstance(event, Asked):
            text = "\n\n".join(text for _, text in event.messages)
            return StepResult(
                observation=f"{text}\n{FORMAT_REMINDER}.", reward=0.0, terminated=False
            )
        self._over, self._episode = True, None
        success = event.reward >= self._success_reward
        return StepResult(
            observation=f"Reward: {event.reward:g}.",
            reward=event.reward,
            terminated=not is_cut,
            truncated=is_cut,
            success=success and not is_cut,
            metrics=event.metrics,
        )

    def _finish_run(self) -> Ended:
        """End the run where it stands; it is scored as far as it came."""
        event = self._give(NO_MORE_TURNS)
        if isinstance(event, Asked):
            raise EnvError(f"verifiers: {self._id} goes on asking after its agent has ended")
        return event

    def _after_malformed(self) -> StepResult:
        truncated = self._turn >= self.max_turns
        reached = Ended(0.0)
        if truncated and self._answers:
            self._catch_up()
            reached, self._episode = self._finish_run(), None
        if truncated:
            self._end_episode()
            self._over = True
        reward = reached.reward + self.malformed_reward
        text = f"Malformed reply. Reward: {reward:g}."
        return StepResult(
            observation=text if truncated else f"{text}\n{FORMAT_REMINDER}.",
            reward=reward,
            penalty=self.malformed_reward,
            terminated=False,
            truncated=truncated,
            is_valid=False,
            metrics=reached.metrics,
        )


@lru_cache(maxsize=16)
def load(source: str, max_tasks: int) -> tuple[Any, list[Any]]:
    """The environment and its tasks, loaded once per process."""
    from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
        load_environment,
        resolve_env_config,
    )

    data = json.loads(source)
    name = data["taskset"]["id"]
    try:
        env = load_environment(resolve_env_config(data))
        tasks = list(itertools.islice(env.taskset, max_tasks))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        text = " ".join(line.strip() for line in lines)
        raise EnvError(
            f"verifiers: {name} cannot be loaded: {type(error).__name__}: {text[:300]}"
        ) from error
    if not tasks:
        raise EnvError(f"verifiers: {name} has no tasks")
    return env, tasks


def task_text(task: Any) -> str:
    """What tells tasks apart: the data without its number."""
    data = task.data.model_dump(mode="json", exclude={"idx", "name", "id"})
    return json.dumps(data, sort_keys=True)


def check_task(name: str, env: Any, task: Any) -> None:
    """Raise when a task needs what is not there without verifiers' runtimes."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    kind = type(task)
    agents = [key for key, value in env.config if isinstance(value, vf.AgentConfig)]
    needs = {
        "a container": kind.NEEDS_CONTAINER or task.data.image is not None,
        "tools": bool(kind.toolsets(task.config))
        or bool(type(env.taskset).toolsets(env.taskset.config)),
        "a runtime to set up": kind.setup is not vf.Task.setup
        or kind.finalize is not vf.Task.finalize,
        "a runtime to score": any(map(_reads_runtime, task.hooks("reward") + task.hooks("metric"))),
        "a judge model": bool(task.config.judges),
        "stop conditions on requests": not all(map(_reads_trace, task.hooks("stop"))),
        f"{len(agents)} agents ({', '.join(agents)})": len(agents) > 1,
    }
    found = [what for what, is_needed in needs.items() if is_needed]
    if found:
        raise EnvError(
            f"verifiers: {name} needs {', '.join(found)}, which only verifiers' own rollouts "
            f"provide; tasks of text alone can be trained on"
        )


def _reads_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _reads_trace(function: Any) -> bool:
    return set(inspect.signature(function).parameters) <= {"task", "trace"}
