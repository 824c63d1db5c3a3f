"""moored's own rollouts, the Parquet of a run directory: one row per turn of an episode.

When replies are scored, a record is one turn of an episode. When only rewards are compared, it is
a whole episode, with the answers of all its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from moored.errors import MooredError
from moored.files.records import (
    Convert,
    ReadOptions,
    Record,
    Row,
    Unusable,
    read_number,
    weighted_rewards,
)
from moored.files.tables import Rows, Table
from moored.reply import find_answer
from moored.runlog.rollouts import SCHEMA

SHARED = ("schema", "step", "group_id", "episode", "turn", "trajectory_reward", "success", "reply")
IDS = ("prompt_ids", "completion_ids")
FOR_REPLIES = (*SHARED, "images", *IDS, "think_start", "think_end")
FOR_REWARDS = (*SHARED, "observation")
REWARDS = {"trajectory_reward": 1.0}


class OwnRollouts:
    """What `log.rollouts_every` writes."""

    def fits(self, table: Table) -> bool:
        return table.kind == "Parquet" and table.columns.keys() >= {*FOR_REPLIES, *FOR_REWARDS}

    def open(self, table: Table, options: ReadOptions) -> tuple[Rows, Convert]:
        fixed = FOR_REWARDS if options.only_rewards else FOR_REPLIES
        wanted = (*fixed, *options.rewards, *([options.group] if options.group else ()))
        table.require(wanted)
        rows = _checked(table.rows(wanted, arrays=IDS))
        if options.only_rewards:
            return _episodes(rows), partial(_record, options=options, read=_trajectory_fields)
        rows = ((where, row) for where, row in rows if row["turn"] == options.turn - 1)
        return rows, partial(_record, options=options, read=_turn_fields)


OWN = OwnRollouts()


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


def _record(row: Row, *, options: ReadOptions, read: Callable[[Row], dict[str, Any]]) -> Record:
    return Record(
        step=row["step"],
        rewards=weighted_rewards(row, options.rewards or REWARDS),
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
    ids = {name: np.array(row[name], dtype=np.int64) for name in IDS}
    return {
        "prompt": ids["prompt_ids"],
        "response": ids["completion_ids"],
        "think": None if start is None else (start, end),
        "text": row["reply"],
    }
