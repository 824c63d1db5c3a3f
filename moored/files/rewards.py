"""Rewards by group from the rollout files of any trainer.

Reads moored's rollouts (Parquet), TRL's completions (Parquet), verl's rollouts (JSON lines), and
plain Parquet, JSON lines or CSV with a reward and a group or prompt. Files are read row by row and
only what a filter looks at is kept, a few dozen bytes a trajectory.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moored.errors import MooredError
from moored.files.tables import (
    BadRow,
    Row,
    Unusable,
    check_schema,
    expand,
    find_columns,
    find_kind,
    iter_rows,
    number,
    parquet_rows,
    require_columns,
    whole_number,
)
from moored.reply import find_answer

SUFFIXES = (".parquet", ".jsonl", ".csv")
REWARD_NAMES = ("reward", "score")
GROUP_NAMES = ("group", "group_id")
PROMPT_NAMES = ("prompt", "input")
RESPONSE_NAMES = ("completion", "response", "output", "action")
TRL_MARK = "advantage"
"""TRL names reward columns after the reward functions; this one tells its files."""
OWN_COLUMNS = (
    *("schema", "step", "group_id", "episode", "trajectory_reward", "success"),
    *("observation", "reply"),
)
EXCERPT_CHARS = 400
TELL_EVERY = 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardGroups:
    """One entry a trajectory (M) or a group (P), in the order of the files."""

    rewards: np.ndarray
    """(M,) NaN where there is none."""
    group_of: np.ndarray
    """(M,) index of each trajectory's group."""
    steps: np.ndarray
    """(P,) step of each group; the number of its file where no step is given."""
    prompts: tuple[str, ...]
    """(P,) beginning of each prompt; empty where there is none."""
    success: np.ndarray | None
    behaviours: np.ndarray | None
    """(M,) hash of the answer (all answers of an episode); equal behaviours are equal numbers."""
    notes: tuple[str, ...] = ()
    """What was left out."""

    def at_step(self, step: int) -> RewardGroups:
        """The groups of one step."""
        chosen = np.flatnonzero(self.steps == step)
        if len(chosen) == 0:
            raise MooredError(
                f"there is no step {step}; there are {len(np.unique(self.steps))} steps from "
                f"{self.steps.min()} to {self.steps.max()}"
            )
        member = np.isin(self.group_of, chosen)
        return replace(
            self,
            rewards=self.rewards[member],
            group_of=np.searchsorted(chosen, self.group_of[member]),
            steps=self.steps[chosen],
            prompts=tuple(self.prompts[i] for i in chosen.tolist()),
            success=None if self.success is None else self.success[member],
            behaviours=None if self.behaviours is None else self.behaviours[member],
        )


def read_rewards(
    paths: Sequence[str | Path],
    *,
    reward: Mapping[str, float] | None = None,
    group: str | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> RewardGroups:
    """Read files, and those of folders, in turn; `reward` names reward columns and their weights.

    Groups are told apart by file, step, and the `group` column or, without one, the prompt.
    `on_rows` is told now and then how many trajectories have been read.
    """
    seen = _Seen()
    for file_number, file in enumerate(expand(map(Path, paths), SUFFIXES), start=1):
        columns, rows = _open(file, reward or {}, group)
        for where, row in rows:
            if isinstance(row, BadRow):
                seen.leave_out(row)
                continue
            try:
                seen.add(file_number, columns, row)
            except Unusable as error:
                raise MooredError(f"{where} {error}") from None
            if on_rows is not None and len(seen.rewards) % TELL_EVERY == 0:
                on_rows(len(seen.rewards))
    return seen.finish()


@dataclass(frozen=True, slots=True)
class _Columns:
    reward: Mapping[str, float]
    group: str | None
    prompt: str | None
    response: str | None
    success: str | None
    step: str | None

    @property
    def names(self) -> list[str]:
        others = (self.group, self.prompt, self.response, self.success, self.step)
        return [*self.reward, *(name for name in others if name is not None)]


def _open(
    file: Path, reward: Mapping[str, float], group: str | None
) -> tuple[_Columns, Iterator[tuple[str, Row | BadRow]]]:
    """What to look at in a file, and its rows."""
    kind = find_kind(file)
    found = find_columns(file, kind)
    if kind == "Parquet" and found.keys() >= set(OWN_COLUMNS):
        found = dict.fromkeys([*OWN_COLUMNS, "prompt", "response", "reward"], False)
        return _choose_columns(file, found, reward, group), _own_episodes(file)
    columns = _choose_columns(file, found, reward, group)
    return columns, iter_rows(file, kind, columns.names)


def _choose_columns(
    file: Path, found: Mapping[str, bool], reward: Mapping[str, float], group: str | None
) -> _Columns:
    require_columns(file, (*reward, *([group] if group else [])), found)
    columns = _Columns(
        reward=reward or {_reward_column(file, found): 1.0},
        group=group or _first(GROUP_NAMES, found),
        prompt=_first(PROMPT_NAMES, found),
        response=_first(RESPONSE_NAMES, found),
        success=_first(("success",), found),
        step=_first(("step",), found),
    )
    if columns.group is None and columns.prompt is None:
        raise MooredError(
            f"{str(file)!r} has neither {_listed(GROUP_NAMES)} nor {_listed(PROMPT_NAMES)} to "
            f"tell groups by; it has {_listed(found)}: name one with --group"
        )
    return columns


def _reward_column(file: Path, found: Mapping[str, bool]) -> str:
    name = _first(REWARD_NAMES, found)
    if name is not None:
        return name
    no_rewards = ("step", TRL_MARK, *GROUP_NAMES)
    others = [n for n, is_number in found.items() if is_number and n not in no_rewards]
    if TRL_MARK in found and len(others) == 1:
        return others[0]
    if TRL_MARK in found and others:
        flags = " ".join(f"--reward {name}" for name in others)
        raise MooredError(
            f"{str(file)!r} has several columns that may be rewards; name those that are (they "
            f"are added up; NAME=2 counts twice): {flags}"
        )
    raise MooredError(
        f"{str(file)!r} has no column {_listed(REWARD_NAMES)}; it has {_listed(found)}: name the "
        f"rewards with --reward"
    )


def _first(wanted: Sequence[str], names: Collection[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _listed(names: Collection[str]) -> str:
    return " or ".join(names) if len(names) <= 2 else ", ".join(names)


@dataclass(slots=True)
class _Seen:
    """What is kept of the rows read so far."""

    rewards: array[float] = field(default_factory=lambda: array("d"))
    group_of: array[int] = field(default_factory=lambda: array("q"))
    success: array[float] = field(default_factory=lambda: array("d"))
    behaviours: array[int] = field(default_factory=lambda: array("q"))
    index: dict[bytes, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, row: BadRow) -> None:
        if not row.is_torn:
            raise MooredError(f"{row.where} {row.why}; mend it or take it out")
        self.notes.append(f"{row.where}, the last one, is cut short: left out")

    def add(self, file_number: int, columns: _Columns, row: Row) -> None:
        step = file_number if columns.step is None else whole_number(row, columns.step)
        if step is None:
            raise Unusable(f"has no {columns.step!r}; every row needs it")
        group = self.index.setdefault(_group_key(file_number, step, columns, row), len(self.steps))
        if group == len(self.steps):
            self.steps.append(step)
            prompt = None if columns.prompt is None else row.get(columns.prompt)
            self.prompts.append(_text(prompt)[:EXCERPT_CHARS])
        self.group_of.append(group)
        self.rewards.append(_total(columns.reward, row))
        if columns.success is not None:
            self.success.append(number(row, columns.success))
        if columns.response is not None:
            self.behaviours.append(hash(find_answer(_text(row.get(columns.response)))))

    def finish(self) -> RewardGroups:
        rewards = np.array(self.rewards)
        missing = int(np.count_nonzero(~np.isfinite(rewards)))
        if missing == len(rewards):
            raise MooredError(f"none of the {missing} rewards is a finite number")
        if missing:
            self.notes.append(f"{missing} of {len(rewards)} rewards are missing and take no part")
        success = np.array(self.success)
        is_told = len(success) == len(rewards) and bool(np.isfinite(success).all())
        knows_behaviour = len(self.behaviours) == len(rewards)
        # Trainers sum rewards in float32 and store them as doubles; as float32 they are compared
        # with the rounding they have.
        single = rewards.astype(np.float32)
        is_single = np.array_equal(single.astype(np.float64), rewards, equal_nan=True)
        return RewardGroups(
            rewards=single if is_single else rewards,
            group_of=np.array(self.group_of),
            steps=np.array(self.steps),
            prompts=tuple(self.prompts),
            success=success if is_told else None,
            behaviours=np.array(self.behaviours) if knows_behaviour else None,
            notes=tuple(self.notes),
        )


def _group_key(file_number: int, step: int, columns: _Columns, row: Row) -> bytes:
    """Short, and the same for equal group ids, or equal prompts where there are none."""
    name = columns.group or columns.prompt
    value = None if name is None else row.get(name)
    if value is None or value == "":
        raise Unusable(f"has no {name!r}, so its group is unknown")
    text = f"{file_number} {step} {value}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _total(weights: Mapping[str, float], row: Row) -> float:
    """Weighted sum of the rewards that are there; NaN when none is."""
    missing = [name for name in weights if name not in row]
    if missing:
        raise Unusable(f"has no {missing[0]!r}; every row needs it (null when unknown)")
    values = ((weight, number(row, name)) for name, weight in weights.items())
    there = [weight * value for weight, value in values if math.isfinite(value)]
    return math.fsum(there) if there else math.nan


def _text(value: Any) -> str:
    """The text of a string, of a message content, or of the messages that are not the system's."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping):
        return _text(value.get("content") or value.get("text"))
    if isinstance(value, Sequence):
        shown = [v for v in value if not (isinstance(v, Mapping) and v.get("role") == "system")]
        return "\n".join(_text(item) for item in shown or value)
    return str(value)


def _own_episodes(file: Path) -> Iterator[tuple[str, Row]]:
    """moored's own rollouts hold a row a turn: one row an episode, its answers joined."""
    rows = parquet_rows(file, OWN_COLUMNS)
    for _, turns in groupby(rows, lambda r: (r[1]["step"], r[1]["group_id"], r[1]["episode"])):
        (where, first), *later = turns
        check_schema(where, first)
        replies = (first["reply"], *(turn["reply"] for _, turn in later))
        response = "\n".join(find_answer(reply or "") for reply in replies)
        whole = {"prompt": first["observation"], "reward": first["trajectory_reward"]}
        yield where, {**first, **whole, "response": response}
