"""What an environment is, and how a model's reply is read.

`Environment` is the protocol every task implements. `parse_reply` and `parse_actions` never
raise on model text, run in linear time and execute nothing. `draw_task` keeps train, validation
and test apart by seed range *and* by content hash.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from moored.errors import EnvError
from moored.types import Content, Message

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
FORMAT_REMINDER = "Reply as <think>your reasoning</think><answer>your answer</answer>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one reply led to."""

    observation: Content
    """Content of the next user message; after the last turn, a closing line."""
    reward: float
    done: bool
    is_valid: bool = True
    """False when the reply was malformed."""
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; an instance is reused through `reset`.

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


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply taken apart; both parts are None when the tags are not as asked."""

    think: str | None
    answer: str | None

    @property
    def is_valid(self) -> bool:
        return self.answer is not None


def parse_reply(text: str) -> Reply:
    """Read `<think>…</think><answer>…</answer>`: each tag once, in this order, else invalid.

    Text before the first and after the last tag is ignored; between the two blocks only white
    space may stand.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags):
        return Reply(None, None)
    think_open, think_close, answer_open, answer_close = (text.find(tag) for tag in tags)
    if not think_open < think_close < answer_open < answer_close:
        return Reply(None, None)
    if text[think_close + len("</think>") : answer_open].strip():
        return Reply(None, None)
    think = text[think_open + len("<think>") : think_close]
    answer = text[answer_open + len("<answer>") : answer_close]
    return Reply(think.strip(), answer.strip())


def format_reply(think: str, answer: str) -> str:
    """The inverse of `parse_reply`."""
    return f"<think>{think}</think><answer>{answer}</answer>"


def parse_actions(answer: str, actions: Sequence[str]) -> list[str] | None:
    """Split `A || B` into known action names (any case); None when a part is unknown or empty."""
    if len(answer) > 4096:
        return None
    known = _by_folded_name(tuple(actions))
    parts = [known.get(part.strip().casefold()) for part in answer.split("||")]
    return None if None in parts else [part for part in parts if part is not None]


@lru_cache(maxsize=64)
def _by_folded_name(actions: tuple[str, ...]) -> dict[str, str]:
    return {action.casefold(): action for action in actions}


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
        logger.warning(
            "%s: none of its %s belongs to the %s split, so no such task can be drawn; about one "
            "in ten goes to validation and one in ten to test, by content: use a larger file",
            source,
            tasks,
            " or ".join(missing),
        )


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
