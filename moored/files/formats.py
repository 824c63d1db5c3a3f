"""The formats of rollout files, and the only place that distinguishes them.

`moored` is the Parquet of a run directory, `trl` the completions of `log_completions`, `verl` the
JSON lines of `rollout_data_dir`, `plain` anything else with columns of known names. All but the
first hold one reply per row, as Parquet, JSON lines or CSV. A new format is one object with
`fits` and `open`, and one line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from moored.errors import MooredError, close_match_hint
from moored.files.records import (
    BadRow,
    Convert,
    ReadOptions,
    Record,
    Row,
    Unusable,
    read_count,
    read_number,
    read_prompt,
    read_reply,
    read_think,
    weighted_rewards,
)
from moored.files.tables import Rows, Table, open_table
from moored.reply import find_answer
from moored.runlog.rollouts import SCHEMA

OWN_SHARED = (
    "schema",
    "step",
    "group_id",
    "episode",
    "turn",
    "trajectory_reward",
    "success",
    "reply",
)
OWN_IDS = ("prompt_ids", "completion_ids")
OWN_FOR_REPLIES = (*OWN_SHARED, "images", *OWN_IDS, "think_start", "think_end")
OWN_FOR_REWARDS = (*OWN_SHARED, "observation")
OWN_REWARDS = {"trajectory_reward": 1.0}


class Format(Protocol):
    """One kind of file."""

    def fits(self, table: Table) -> bool:
        """Whether a file has this format, by its columns."""
        ...

    def open(self, table: Table, options: ReadOptions) -> tuple[Rows, Convert]:
        """The rows of a file, and what makes a record of each."""
        ...


def read_records(file: Path, options: ReadOptions) -> Iterator[Record | BadRow]:
    """The rows of one file, one after the other, so that its size does not matter."""
    table = open_table(file)
    rows, convert = get_format(options.reader or find_format(table)).open(table, options)
    for where, row in rows:
        try:
            yield row if isinstance(row, BadRow) else convert(row)
        except Unusable as error:
            yield BadRow(where, str(error))


def find_format(table: Table) -> str:
    """The name of a file's format, by its columns."""
    return next(name for name, each in FORMATS.items() if each.fits(table))


def get_format(name: str) -> Format:
    """A format by name, or by `module:attribute`."""
    if ":" in name:
        from moored.names import import_object

        return cast(Format, import_object(name, kind="reader"))
    if name not in FORMATS:
        raise MooredError(f"unknown reader {name!r}; {close_match_hint(name, FORMATS)}")
    return FORMATS[name]


class OwnRollouts:
    """What `log.rollouts_every` writes: Parquet with one row per turn of an episode.

    When replies are scored, a record is one turn of an episode. When only rewards are compared, it
    is a whole episode, with the answers of all its turns.
    """

    def fits(self, table: Table) -> bool:
        return table.kind == "Parquet" and table.columns.keys() >= {
            *OWN_FOR_REPLIES,
            *OWN_FOR_REWARDS,
        }

    def open(self, table: Table, options: ReadOptions) -> tuple[Rows, Convert]:
        fixed = OWN_FOR_REWARDS if options.only_rewards else OWN_FOR_REPLIES
        wanted = (*fixed, *options.rewards, *([options.group] if options.group else ()))
        table.require(wanted)
        rows = _checked(table.rows(wanted, arrays=OWN_IDS))
        if options.only_rewards:
            return _episodes(rows), partial(_own_record, options=options, read=_trajectory_fields)
        rows = ((where, row) for where, row in rows if row["turn"] == options.turn - 1)
        return rows, partial(_own_record, options=options, read=_turn_fields)


def _checked(rows: Rows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, row in rows:
        assert isinstance(row, Mapping), "Parquet has no bad rows"
        if row["schema"] != SCHEMA:
            raise MooredError(
                f"{where} has schema {row['schema']}, this version reads {SCHEMA}; read it with "
                f"the version that wrote it"
            )
        yield where, row


def _episodes(rows: Iterator[tuple[str, Row]]) -> Rows:
    """The first row of each episode, with the answers of all its turns."""
    for _, turns in groupby(rows, lambda r: (r[1]["step"], r[1]["group_id"], r[1]["episode"])):
        (where, first), *later = turns
        replies = (first["reply"], *(turn["reply"] for _, turn in later))
        answers = "\n".join(find_answer(reply or "") for reply in replies)
        yield where, {**first, "answers": answers}


def _own_record(row: Row, *, options: ReadOptions, read: Callable[[Row], dict[str, Any]]) -> Record:
    return Record(
        step=row["step"],
        rewards=weighted_rewards(row, options.rewards or OWN_REWARDS),
        group=str(row[options.group or "group_id"]),
        success=read_number(row, "success"),
        **read(row),
    )


def _trajectory_fields(row: Row) -> dict[str, Any]:
    return {"prompt": row["observation"], "response": row["answers"]}


def _turn_fields(row: Row) -> dict[str, Any]:
    if row["images"]:
        raise Unusable("holds images; only text can be scored")
    start, end = row["think_start"], row["think_end"]
    # Copies, because the arrays of a row are views of a whole batch.
    ids = {name: np.array(row[name], dtype=np.int64) for name in OWN_IDS}
    return {
        "prompt": ids["prompt_ids"],
        "response": ids["completion_ids"],
        "think": None if start is None else (start, end),
        "text": row["reply"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column of a file holds what; None where there is none."""

    prompt: str | None
    response: str | None
    group: str | None
    rewards: Mapping[str, float]
    """With their weights."""
    has_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFormat:
    """One reply per row; of several possible names for a column, the first that exists."""

    marks: frozenset[str] = frozenset()
    """Columns by which the format is recognised."""
    prompt: Sequence[str]
    response: Sequence[str]
    group: Sequence[str]
    reward: Sequence[str] | None
    """None: every column of numbers that has no other meaning."""

    def fits(self, table: Table) -> bool:
        return table.columns.keys() >= self.marks

    def open(self, table: Table, options: ReadOptions) -> tuple[Rows, Convert]:
        table.require((*options.rewards, *([options.group] if options.group else ())))
        columns = self._choose(table, options)
        named = (columns.prompt, columns.response, columns.group, "step", "success")
        wanted = [name for name in (*columns.rewards, *named) if name is not None]
        if options.only_rewards:
            self._check_rewards(table, columns, options)
            return table.rows(wanted), partial(_rewards_record, columns=columns)
        self._check_reply(table, columns)
        rows = table.rows([*wanted, "think_start", "think_end"])
        return rows, partial(_reply_record, columns=columns, options=options)

    def _choose(self, table: Table, options: ReadOptions) -> Columns:
        found = table.columns
        group = options.group or _first(self.group, found)
        return Columns(
            prompt=_first(self.prompt, found),
            response=_first(self.response, found),
            group=group,
            rewards=options.rewards or dict.fromkeys(self._rewards(found, group), 1.0),
            has_step="step" in found,
        )

    def _rewards(self, found: Mapping[str, bool], group: str | None) -> list[str]:
        if self.reward is not None:
            name = _first(self.reward, found)
            return [] if name is None else [name]
        others = {"step", "advantage", "think_start", "think_end", group}
        return [name for name, is_number in found.items() if is_number and name not in others]

    def _check_reply(self, table: Table, columns: Columns) -> None:
        if columns.prompt is None or columns.response is None:
            raise MooredError(
                f"{str(table.file)!r} holds {', '.join(table.columns)[:300]}, but needs "
                f"{_listed(self.prompt)}, and {_listed(self.response)}; rename its columns"
            )

    def _check_rewards(self, table: Table, columns: Columns, options: ReadOptions) -> None:
        file, held = repr(str(table.file)), ", ".join(table.columns)[:300]
        if not columns.rewards:
            wanted = f" {_listed(self.reward)}" if self.reward else " of numbers"
            raise MooredError(
                f"{file} has no column{wanted}; it has {held}: name the rewards with --reward"
            )
        if len(columns.rewards) > 1 and not options.rewards:
            flags = " ".join(f"--reward {name}" for name in columns.rewards)
            raise MooredError(
                f"{file} has several columns that may be rewards; name those that are (they are "
                f"added up; NAME=2 counts twice): {flags}"
            )
        if columns.group is None and columns.prompt is None:
            raise MooredError(
                f"{file} has neither {_listed(self.group)} nor {_listed(self.prompt)} to tell "
                f"groups by; it has {held}: name one with --group"
            )


def _reply_record(row: Row, *, columns: Columns, options: ReadOptions) -> Record:
    assert columns.prompt is not None and columns.response is not None
    response = read_reply(row, columns.response, options.tags)
    group = None if columns.group is None else row.get(columns.group)
    return Record(
        step=read_count(row, "step"),
        prompt=read_prompt(row, columns.prompt),
        response=response,
        think=read_think(row, response, options),
        rewards=weighted_rewards(row, columns.rewards),
        group=None if group is None else str(group),
        success=read_number(row, "success"),
    )


def _rewards_record(row: Row, *, columns: Columns) -> Record:
    step = read_count(row, "step")
    missing = next((name for name in columns.rewards if name not in row), None)
    if missing is not None:
        raise Unusable(f"has no {missing!r}; every row needs it (null when unknown)")
    if step is None and columns.has_step:
        raise Unusable("has no 'step'; every row needs it")
    name = columns.group or columns.prompt
    group = None if name is None else row.get(name)
    if group is None or group == "":
        raise Unusable(f"has no {name!r}, so its group is unknown")
    return Record(
        step=step,
        prompt=None if columns.prompt is None else row.get(columns.prompt),
        response=None if columns.response is None else row.get(columns.response) or "",
        rewards=weighted_rewards(row, columns.rewards),
        group=None if columns.group is None else str(group),
        success=read_number(row, "success"),
    )


def _first(wanted: Sequence[str], names: Collection[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _listed(names: Collection[str]) -> str:
    return " or ".join(names)


TRL = ColumnFormat(
    marks=frozenset({"prompt", "advantage"}),
    prompt=("prompt",),
    response=("completion",),
    group=(),
    reward=None,  # TRL names these columns after the reward functions.
)
VERL = ColumnFormat(
    marks=frozenset({"input", "output"}),
    prompt=("input",),
    response=("output",),
    group=("uid",),
    reward=("score",),
)
PLAIN = ColumnFormat(
    prompt=("prompt", "input"),
    response=("response", "completion", "output", "action"),
    group=("group", "group_id"),
    reward=("reward", "score"),
)
FORMATS: dict[str, Format] = {"moored": OwnRollouts(), "trl": TRL, "verl": VERL, "plain": PLAIN}
"""In the order in which a file is tried; the last one always fits."""
