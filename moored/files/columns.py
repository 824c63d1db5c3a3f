"""Files with one reply per row: which of their columns holds what, and a record of each row.

`moored diagnose` and `moored advise` choose columns by the same rules. A user's `--columns` and
`--reward` come first, then the names of the format. Where several columns may be rewards, none is
taken: they have to be named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moored.errors import MooredError
from moored.files.records import (
    Convert,
    ReadOptions,
    Record,
    Row,
    Unusable,
    read_count,
    read_exchanges,
    read_number,
    weighted_rewards,
)
from moored.files.tables import Rows, Table

DIALOGUES = ("messages", "conversation")
"""Columns of whole dialogues, prompt and replies together."""
ENVIRONMENTS = ("env", "environment", "env_name", "data_source")
NOT_REWARDS = frozenset(
    {"advantage", "advantages", "count", "difficulty", "end", "entropy", "epoch", "id", "idx"}
    | {"index", "iteration", "kl", "len", "length", "lengths", "level", "logp", "logprob"}
    | {"logprobs", "logps", "loss", "lr", "max", "mean", "min", "ms", "num", "position", "rank"}
    | {"seconds", "seed", "size", "start", "std", "step", "steps", "temperature", "time"}
    | {"answer", "gold", "label", "solution", "target", "truth"}
    | {"timestamp", "token", "tokens", "turn", "turns", "value", "version", "weight"}
)
"""Words in the names of columns that are not rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column of a file holds what; None where there is none."""

    prompt: str | None
    response: str | None
    is_dialogue: bool
    """The response column holds whole dialogues, their prompts included."""
    group: str | None
    env: str | None
    step: str
    success: str
    has_step: bool
    """Rows have steps, so that every row needs one."""
    rewards: Mapping[str, float]
    """With their weights; none where it is not clear which columns are rewards."""
    unclear: tuple[str, ...] = ()
    """Columns that may be rewards, where there are several."""

    @property
    def names(self) -> list[str]:
        held = (self.prompt, self.response, self.group, self.step, self.env, self.success)
        return [name for name in (*self.rewards, *held) if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFormat:
    """One reply per row; of several possible names for a column, the first that exists."""

    marks: frozenset[str] = frozenset()
    """Columns by which the format is recognised."""
    prompt: Sequence[str]
    response: Sequence[str]
    group: Sequence[str]
    reward: Sequence[str] | None
    """None: the column of numbers that has no other meaning, if there is one."""

    def fits(self, table: Table) -> bool:
        return table.columns.keys() >= self.marks

    def open(self, table: Table, options: ReadOptions) -> tuple[Rows, Convert]:
        columns = self.choose(table, options)
        if options.only_rewards:
            self._check_rewards(table, columns)
            return table.rows(columns.names), partial(_rewards_record, columns=columns)
        self._check_reply(table, columns)
        rows = table.rows([*columns.names, "think_start", "think_end"])
        return rows, partial(_reply_record, columns=columns, options=options)

    def choose(self, table: Table, options: ReadOptions) -> Columns:
        """The columns that the user named, else those with a name of the format."""
        table.require((*options.rewards, *options.columns.values()))
        found = table.columns
        given = options.columns
        dialogue = given.get("messages")
        prompt = given.get("prompt") or _first(self.prompt, found)
        response = given.get("response") or _first(self.response, found)
        if dialogue is None and (prompt is None or response is None):
            dialogue = _first(DIALOGUES, found)
        if dialogue is not None:
            prompt, response = None, dialogue
        columns = Columns(
            prompt=prompt,
            response=response,
            is_dialogue=dialogue is not None,
            group=given.get("group") or _first(self.group, found),
            env=given.get("env") or _first(ENVIRONMENTS, found),
            step=(step := given.get("step", "step")),
            success=given.get("success", "success"),
            has_step=found.get(step, False),
            rewards=options.rewards,
        )
        if options.rewards:
            return columns
        rewards = self._rewards(found, columns.names)
        if len(rewards) > 1:
            return replace(columns, unclear=tuple(rewards))
        return replace(columns, rewards=dict.fromkeys(rewards, 1.0))

    def _rewards(self, found: Mapping[str, bool], taken: Collection[str]) -> list[str]:
        if self.reward is not None:
            name = _first(self.reward, found)
            return [] if name is None else [name]
        return [
            name
            for name, is_number in found.items()
            if is_number and name not in taken and may_be_reward(name)
        ]

    def _check_reply(self, table: Table, columns: Columns) -> None:
        if columns.response is None or (columns.prompt is None and not columns.is_dialogue):
            raise MooredError(
                f"{str(table.file)!r} holds {', '.join(table.columns)[:300]}, but needs "
                f"{_listed(self.prompt)}, and {_listed(self.response)}; name yours: --columns "
                f"prompt=COLUMN,response=COLUMN"
            )

    def _check_rewards(self, table: Table, columns: Columns) -> None:
        file, held = repr(str(table.file)), ", ".join(table.columns)[:300]
        if columns.unclear:
            raise MooredError(f"{file} {several_rewards(columns.unclear)}")
        if not columns.rewards:
            wanted = f" {_listed(self.reward)}" if self.reward else " of rewards"
            raise MooredError(
                f"{file} has no column{wanted}; it has {held}: name the rewards with --reward"
            )
        if columns.group is None and columns.prompt is None and not columns.is_dialogue:
            raise MooredError(
                f"{file} has neither {_listed(self.group)} nor {_listed(self.prompt)} to tell "
                f"groups by; it has {held}: name one with --group"
            )


def several_rewards(names: Sequence[str]) -> str:
    """Says that rewards have to be named."""
    flags = " ".join(f"--reward {name}" for name in names)
    return (
        f"has several columns that may be rewards; name those that are (they are added up; NAME=2 "
        f"counts twice): {flags}"
    )


def may_be_reward(name: str) -> bool:
    """False for columns of numbers that trainers log beside rewards: lengths, counts, times, ids.

    A name that says "reward" or "score" is one whatever else it says.
    """
    words = set(re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
    return bool(words & {"reward", "rewards", "score", "scores"}) or not words & NOT_REWARDS


def _reply_record(row: Row, *, columns: Columns, options: ReadOptions) -> Record | None:
    assert columns.response is not None
    turns = read_exchanges(row, columns.prompt, columns.response, options)
    if not turns:
        return None
    return Record(
        prompt=turns[0].prompt,
        response=turns[0].response,
        think=turns[0].think,
        later=tuple(turns[1:]),
        group=_name(row, columns.group),
        **_facts(row, columns),
    )


def _rewards_record(row: Row, *, columns: Columns) -> Record:
    missing = next((name for name in columns.rewards if name not in row), None)
    if missing is not None:
        raise Unusable(f"has no {missing!r}; every row needs it (null when unknown)")
    facts = _facts(row, columns)
    prompt = None if columns.prompt is None else row.get(columns.prompt)
    response = None if columns.response is None else row.get(columns.response) or ""
    if columns.is_dialogue and isinstance(response, list):
        prompt, response = _split_dialogue(response)
    name = columns.group or columns.prompt or columns.response
    group = prompt if columns.group is None else row.get(columns.group)
    if group is None or group in ("", []):
        raise Unusable(f"has no {name!r}, so its group is unknown")
    return Record(
        prompt=prompt,
        response=response,
        group=None if columns.group is None else str(group),
        **facts,
    )


def _facts(row: Row, columns: Columns) -> dict[str, Any]:
    """What replies and rewards have in common."""
    step = read_count(row, columns.step)
    if step is None and columns.has_step:
        raise Unusable(f"has no {columns.step!r}; every row needs it")
    return {
        "step": step,
        "rewards": weighted_rewards(row, columns.rewards),
        "env": _name(row, columns.env),
        "success": read_number(row, columns.success),
    }


def _split_dialogue(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """What stands before the first reply, and the rest."""
    roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages]
    place = roles.index("assistant") if "assistant" in roles else len(roles)
    return messages[:place], messages[place:]


def _name(row: Row, column: str | None) -> str | None:
    value = None if column is None else row.get(column)
    return None if value is None or value == "" else str(value)


def _first(wanted: Sequence[str], names: Collection[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _listed(names: Collection[str]) -> str:
    return " or ".join(names)
