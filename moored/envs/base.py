"""What an environment is, and which task a seed stands for.

`Environment` is the protocol every task implements. `begin` and `respond` call one and check what
it returns: environments are code of others. `draw_task` keeps train, validation and test
apart by seed range *and* by content hash.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from moored.errors import EnvError
from moored.reply import format_reply
from moored.types import Content, ImagePart, Message, TextPart

logger = logging.getLogger(__name__)

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

SPLIT_SEEDS: Mapping[Split, range] = {
    "train": range(0, 1 << 40),
    "validation": range(1 << 40, 2 << 40),
    "test": range(2 << 40, 3 << 40),
}
"""Task seeds of each split."""

MAX_DRAWS = 2000
LEAST_PENALTY = 0.1
FORMAT_REMINDER = f"Reply as {format_reply('your reasoning', 'your answer')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one reply led to. At most one of `terminated` and `truncated` is True."""

    observation: Content
    """Content of the next user message; after the last turn, a closing line."""
    reward: float
    """All that the reply earned, penalties included."""
    penalty: float = 0.0
    """The part of `reward` that is for the form of the reply and not for the task, 0 or less: the
    filter leaves it out when it asks whether the trajectories of a group differ."""
    terminated: bool
    """The task itself is over: solved, lost, or its one answer judged. Nothing more can be earned
    from the state that was reached."""
    truncated: bool = False
    """A limit of turns or actions cut the episode off in a state that could have gone on."""
    is_valid: bool = True
    """False when the reply was malformed."""
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """True after the last turn, however the episode ended."""
        return self.terminated or self.truncated


class Resource:
    """Base of what is expensive and shared by the instances of an environment: an index, a server.

    Subclass it as a `@dataclass` of its options; an environment names it in `resources(self)`:

        @dataclass
        class Index(Resource):
            path: str

            def open(self) -> None:
                self.pages = load(self.path)

            def close(self) -> None:
                del self.pages

        class Search:
            def resources(self) -> dict[str, Resource]:
                return {"index": Index(self.path)}

    Before its first `reset`, an instance has the open resource as `self.index`. Equal resources are
    opened once per run; each is closed at the end, after an error and after Ctrl-C.
    """

    max_concurrency: int | None = None
    """Calls of environments that use it at a time; None: as many as there are `env_workers`."""

    def open(self) -> None:
        """Make it ready: load, connect, start a server."""

    def close(self) -> None:
        """Release everything. Called once, and only after `open` succeeded."""


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; an instance is reused through `reset`. May declare a `Resource`.

    The same `task_seed` gives byte-identical first messages in every process; `episode_seed`
    drives noise only. `oracle` gives a good answer for the present state, as the text that goes
    between the answer tags.
    """

    name: ClassVar[str]
    max_turns: int

    @property
    def is_stochastic(self) -> bool:
        """True when the same replies may lead elsewhere in another episode; a plain attribute does.

        It may depend on the options: a lake without slips is not stochastic.
        """
        ...

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]: ...

    def step(self, reply: str) -> StepResult: ...

    def oracle(self) -> str: ...

    def close(self) -> None: ...


@runtime_checkable
class ChecksItself(Protocol):
    """An environment that knows beforehand whether an episode can begin."""

    def check_available(self) -> None:
        """Raise a MooredError when none can: a name that is unknown, a server that is not there.

        Asked once, before a run, where a failing `reset` would cost one episode after another.
        Resources are not open yet: one that cannot be opened says so itself.
        """
        ...


def check_available(env: Environment) -> None:
    """Have an environment say whether an episode can begin; one without the method is trusted."""
    if isinstance(env, ChecksItself):
        env.check_available()


def begin(env: Environment, task_seed: int, episode_seed: int = 0) -> list[Message]:
    """The first messages of an episode, with texts that a tokenizer can encode."""
    messages = require_messages(env.reset(task_seed, episode_seed))
    return [replace(x, content=_checked_content(x.content)) for x in messages]


def respond(env: Environment, reply: str) -> StepResult:
    """What comes of a reply; an EnvError where that has a wrong kind."""
    result = require_result(env.step(reply))
    for name, value in (("reward", result.reward), ("penalty", result.penalty)):
        if not _is_number(value) or not math.isfinite(value):
            raise EnvError(f"a {name} must be a finite number, got {value!r:.80}")
    for name, value in result.metrics.items():
        if not _is_number(value):
            raise EnvError(f"metric {name!r} must be a number, got {value!r:.80}")
    if result.is_over:
        return result
    seen = _checked_content(result.observation)
    return result if seen is result.observation else replace(result, observation=seen)


def require_messages(messages: object) -> list[Message]:
    """What `reset` returned, if it is what it must be."""
    if not isinstance(messages, list) or not messages:
        raise EnvError(f"reset must return a list of messages, got {messages!r:.80}")
    wrong = next((x for x in messages if not isinstance(x, Message)), None)
    if wrong is not None:
        raise EnvError(f"reset must return Message objects, got {wrong!r:.80}")
    return messages


def require_result(result: object) -> StepResult:
    """What `step` returned, if it is what it must be."""
    if not isinstance(result, StepResult):
        hint = "; write def step, not async def" if isinstance(result, Coroutine) else ""
        raise EnvError(f"step must return a StepResult, got {type(result).__name__}{hint}")
    return result


def _is_number(value: Any) -> bool:
    """False also for what only looks like one: an array of two numbers has a `__float__` too."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return hasattr(value, "__float__")


def _checked_content(content: object) -> Content:
    """The same object where there is nothing to replace."""
    if isinstance(content, str):
        text = content if content.isascii() else encodable(content)
        return content if text == content else text
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise EnvError(f"an observation must be text or a list of parts, got {content!r:.80}")
    return [_checked_part(part) for part in content]


def _checked_part(part: Mapping[str, Any]) -> TextPart | ImagePart:
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return TextPart(type="text", text=encodable(part["text"]))
    if kind == "image" and "image" in part:
        return ImagePart(type="image", image=part["image"])
    raise EnvError(f"a part of an observation must be a text or an image, got {part!r:.80}")


def malformed_reward(format_penalty: float | None, dearest_turn: float) -> float:
    """What a malformed reply earns: `format_penalty` where it is set, else minus the price.

    The price is that of the dearest valid turn, 0 or more, and at least `LEAST_PENALTY`: a model
    that fails would learn to write malformed replies if they saved it the price of its moves.
    """
    return -max(LEAST_PENALTY, dearest_turn) if format_penalty is None else format_penalty


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs replaced, which no tokenizer can encode.

    For observations that hold what a model wrote, or what a server says about it.
    """
    return text.encode("utf-8", "replace").decode()


def check_address(env: str, url: str) -> None:
    """Refuse what cannot be the address of a server that an environment plays on."""
    if not url.startswith(("http://", "https://")):
        raise EnvError(f"{env}: url must look like http://host:8000, got {url!r:.80}")


def read_range(option: str, value: int | Sequence[int], low: int, high: int) -> tuple[int, int]:
    """The ends of an option that is one number or a range; EnvError where they lie elsewhere."""
    ends = (value,) * 2 if isinstance(value, int) else tuple(value)
    is_range = len(ends) == 2 and all(isinstance(end, int) for end in ends)
    if not is_range or not low <= ends[0] <= ends[1] <= high:
        raise EnvError(
            f"{option} must be one number or a (low, high) range within {low} and {high}, "
            f"got {value!r}"
        )
    return ends[0], ends[1]


def split_of_seed(task_seed: int) -> Split:
    """The split whose seed range holds `task_seed`."""
    for split, seeds in SPLIT_SEEDS.items():
        if task_seed in seeds:
            return split
    raise EnvError(
        f"task_seed must lie in [0, {SPLIT_SEEDS['test'].stop}), got {task_seed}; "
        f"validation starts at 2**40, test at 2**41"
    )


def split_of_content(key: str) -> Split:
    """The split a task's content belongs to: 80 % train, 10 % validation, 10 % test by hash."""
    bucket = hashlib.sha256(key.encode()).digest()[0]
    if bucket < 205:
        return "train"
    return "validation" if bucket < 231 else "test"


def missing_splits(keys: Iterable[str]) -> list[Split]:
    """The splits none of these task contents belongs to; reads no further than it must."""
    missing = list(SPLIT_SEEDS)
    for key in keys:
        split = split_of_content(key)
        if split in missing:
            missing.remove(split)
        if not missing:
            break
    return missing


def warn_of_missing_splits(source: object, tasks: str, keys: Iterable[str]) -> None:
    """Log a warning when a file has no tasks for some split; `tasks` names them, e.g. `9 rows`."""
    missing = missing_splits(keys)
    if missing:
        _warn_once(
            f"{source}: none of its {tasks} belongs to the {' or '.join(missing)} split, so no "
            f"such task can be drawn; about one in ten goes to validation and one in ten to test, "
            f"by content: use a larger file"
        )


@functools.cache
def _warn_once(text: str) -> None:
    """A run makes an environment for each of its episodes, all with the same to say."""
    logger.warning("%s", text)


def draw_task(
    task_seed: int, make: Callable[[random.Random], T], key: Callable[[T], str]
) -> tuple[T, random.Random]:
    """Draw tasks from `task_seed` until one's content hash falls into the seed's split.

    Different seeds may give equal tasks in a small task space; the hash keeps such twins in one
    split. Also returns the generator, for what else of the first prompt is random.
    """
    split = split_of_seed(task_seed)
    rng = random.Random(task_seed)
    for _ in range(MAX_DRAWS):
        task = make(rng)
        if split_of_content(key(task)) == split:
            return task, rng
    raise EnvError(
        f"no {split} task found in {MAX_DRAWS} draws from seed {task_seed}; the task space may "
        f"be too small to split, use more options or tasks"
    )
