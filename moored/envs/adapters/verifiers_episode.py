"""One episode of a verifiers environment, its agent played from outside.

verifiers calls an agent and waits for it; a moored environment is called and answers. So the
episode runs in a thread of its own: `OutsideAgent` hands every message for the model to `Episode`,
and waits for the reply. No harness program, runtime or interception server of verifiers is started.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from moored.envs.base import encodable
from moored.errors import EnvError

NO_MORE_TURNS = None
"""Instead of a reply: the model has no turns left."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply in its parts."""

    think: str
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The messages the model has not seen yet, as role and text; it is to reply."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The episode is over and scored."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class Episode:
    """A running episode: `next` waits for what comes, `reply` goes on."""

    def __init__(self, env: Any, task: Any, limit_s: float) -> None:
        self._limit_s = limit_s
        self._events: queue.SimpleQueue[Asked | Ended | Exception] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._replies: asyncio.Queue[Answer | None] | None = None
        threading.Thread(
            target=self._run, args=(env, task), daemon=True, name="moored-verifiers"
        ).start()

    def next(self) -> Asked | Ended:
        """What the episode wants next; EnvError when it failed or takes too long."""
        try:
            event = self._events.get(timeout=self._limit_s)
        except queue.Empty:
            raise EnvError(f"verifiers: no answer within {self._limit_s:g} s") from None
        if isinstance(event, Exception):
            raise EnvError(f"verifiers: {type(event).__name__}: {event}") from event
        return event

    def reply(self, answer: Answer | None) -> None:
        """Give the model's reply, or `NO_MORE_TURNS`."""
        assert self._loop is not None and self._replies is not None, "the model was not asked"
        self._loop.call_soon_threadsafe(self._replies.put_nowait, answer)

    async def ask(self, messages: Sequence[tuple[str, str]]) -> Answer | None:
        """Called by the agent: show the messages, wait for the reply."""
        assert self._replies is not None
        self._events.put(Asked(tuple(messages)))
        return await self._replies.get()

    def _run(self, env: Any, task: Any) -> None:
        try:
            self._events.put(asyncio.run(self._play(env, task)))
        except Exception as error:  # what an environment raises is data
            self._events.put(error)
        except BaseException as error:
            self._events.put(EnvError(f"it raised {type(error).__name__}: {error}"))

    async def _play(self, env: Any, task: Any) -> Ended:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        self._loop, self._replies = asyncio.get_running_loop(), asyncio.Queue()
        traces: list[Any] = []
        agents = vf.Agents(env.config, lambda name, spec: OutsideAgent(self, name, spec, traces))
        await env.setup(agents)
        await env.run(task, agents)
        episode = vf.Episode(task=_trace_task(task), traces=traces)
        await env.finalize(task, episode)
        if not traces:
            raise EnvError("the environment ended without asking its agent")
        metrics = {
            name: float(value)
            for trace in traces
            for name, value in trace.metrics.items()
            if value is not None
        }
        return Ended(float(sum(trace.reward for trace in traces)), metrics)


class OutsideAgent:
    """Stands where verifiers has an agent; the caller of `Episode` is the model."""

    trainable = True

    def __init__(self, episode: Episode, name: str, spec: Any, traces: list[Any]) -> None:
        self._episode, self._name, self._spec, self._traces = episode, name, spec, traces

    async def run(self, task: Any, **_: object) -> Any:
        """One reply to the task's prompt."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: object) -> AsyncIterator[OutsideInteraction]:
        """Several replies; the caller writes what comes between them."""
        interaction = OutsideInteraction(
            self._episode, task, _new_trace(task, self._name, self._spec)
        )
        try:
            yield interaction
        finally:
            interaction.trace.stop("user_closed")
        interaction.trace.ok = True
        await task.score(interaction.trace, None)
        self._traces.append(interaction.trace)


class OutsideInteraction:
    """The turns of one agent: keeps the trace that scoring reads."""

    def __init__(self, episode: Episode, task: Any, trace: Any) -> None:
        self._episode, self._task, self.trace = episode, task, trace
        self._has_stopped = self._is_over = False

    async def turn(self, message: Any = None) -> Any:
        """Show a message (none: the task's prompt), and return the model's reply as a segment."""
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from verifiers.v1.agent import Segment  # pyright: ignore[reportMissingImports]

        if self._is_over:
            raise RuntimeError("the exchange is over")
        if self._has_stopped:
            return self._end()
        new = self._new_messages(message)
        if not new:
            raise ValueError("there is nothing to reply to: the task has no prompt, and no message")
        answer = await self._episode.ask([(x.role, _text_of(x)) for x in new])
        if answer is None:  # NO_MORE_TURNS
            return self._end()
        reply = vf.AssistantMessage(content=answer.text, reasoning_content=answer.think)
        self._add(new, sampled=False)
        self._add([reply], sampled=True)
        self._has_stopped = await self._is_stopped()
        return Segment(messages=[reply])

    def _end(self) -> Any:
        """As in verifiers, the end shows at the turn after the last reply."""
        from verifiers.v1.agent import Segment  # pyright: ignore[reportMissingImports]

        self._is_over = True
        return Segment(messages=[], terminated=True)

    def _new_messages(self, message: Any) -> list[Any]:
        """Messages that are not in the trace yet, the system prompt before all others."""
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from verifiers.v1.dialects import parse_message  # pyright: ignore[reportMissingImports]

        data, new = self._task.data, []
        if not self.trace.nodes:
            if data.system_prompt:
                new.append(vf.SystemMessage(content=data.system_prompt))
            if message is None:
                message = data.prompt
        if isinstance(message, str):
            message = [vf.UserMessage(content=message)]
        return new + [parse_message(x) if isinstance(x, dict) else x for x in message or []]

    def _add(self, messages: Sequence[Any], *, sampled: bool) -> None:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        for message in messages:
            parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
            self.trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))

    async def _is_stopped(self) -> bool:
        """Whether one of the task's stop conditions holds."""
        from verifiers.v1.utils.decorators import (  # pyright: ignore[reportMissingImports]
            invoke_all,
        )

        stops = self._task.hooks("stop")
        return any(await invoke_all(stops, {"task": self._task.data, "trace": self.trace}))


def _new_trace(task: Any, name: str, spec: Any) -> Any:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.state import State  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]

    state = concrete_type(type(task), State) or State
    agent = vf.AgentInfo(config=spec, name=name)
    return vf.Trace(task=_trace_task(task), state=state(), agent=agent)


def _trace_task(task: Any) -> Any:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _text_of(message: Any) -> str:
    from verifiers.v1.types import content_text  # pyright: ignore[reportMissingImports]

    return "" if message.content is None else encodable(content_text(message.content))
