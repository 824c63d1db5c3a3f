"""The formats of rollout files, and the only place that distinguishes them.

`moored` is the Parquet of a run directory, `trl` the completions of `log_completions`, `verl` the
JSON lines of `rollout_data_dir`, `plain` anything else with columns of known names. All but the
first hold one reply per row, as Parquet, JSON lines or CSV. A new format is one object with
`fits` and `open`, and one line in `FORMATS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, cast

from moored.errors import ConfigError, MooredError, close_match_hint
from moored.files.columns import ColumnFormat
from moored.files.records import (
    BadRow,
    Convert,
    Exchange,
    ReadOptions,
    Record,
    Row,
    Unusable,
    read_number,
    weighted_rewards,
)
from moored.files.tables import Rows, Table, open_table
from moored.reply import find_answer
from moored.runlog.rollouts import read_rows

OWN_SHARED = (
    "schema",
    "step",
    "group_id",
    "env",
    "episode",
    "turn",
    "trajectory_reward",
    "success",
    "reply",
)
OWN_FOR_REPLIES = (
    *(*OWN_SHARED, "images", "prompt_ids", "completion_ids", "think_start", "think_end"),
)
OWN_FOR_REWARDS = (*OWN_SHARED, "observation", "turn_reward", "turn_penalty", "is_valid")
OWN_REWARDS = {"trajectory_reward": 1.0}
Episode = Sequence[tuple[str, Row]]
"""Where each row of an episode stands, and the row."""
TASK_REWARDS = {"task_reward": 1.0}
"""What the filter of a run scores: rewards without penalties, made of the turns of an episode."""


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
            record = row if isinstance(row, BadRow) else convert(row)
        except Unusable as error:
            record = BadRow(where, str(error))
        if record is not None:
            yield record


def unclear_rewards(file: Path, options: ReadOptions) -> tuple[str, ...]:
    """Columns that may be rewards, where there are several: none of them is taken."""
    table = open_table(file)
    chosen = get_format(options.reader or find_format(table))
    return chosen.choose(table, options).unclear if isinstance(chosen, ColumnFormat) else ()


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

    A record is an episode. When only rewards are compared, it has the answers of all turns; unless
    rewards are named, its reward is then the one that the filter of a run scores.
    """

    def fits(self, table: Table) -> bool:
        return table.kind == "Parquet" and table.columns.keys() >= {
            *OWN_FOR_REPLIES,
            *OWN_FOR_REWARDS,
        }

    def open(self, table: Table, options: ReadOptions) -> tuple[Rows, Convert]:
        fixed = OWN_FOR_REWARDS if options.only_rewards else OWN_FOR_REPLIES
        other = next((role for role in options.columns if role != "group"), None)
        if other is not None:
            raise ConfigError(
                f"{str(table.file)!r} is a rollout file of moored, whose columns are known; leave "
                f"{other!r} out of --columns"
            )
        wanted = (*fixed, *options.rewards, *options.columns.values())
        table.require(wanted)
        rows = read_rows(table.file, (*wanted, "observation_start"))
        by_episode = groupby(rows, lambda r: (r[1]["step"], r[1]["group_id"], r[1]["episode"]))
        episodes = (list(members) for _, members in by_episode)
        if options.only_rewards:
            return _whole(episodes), partial(_own_record, options=options, read=_trajectory_fields)
        return _turns(episodes, options.turn), partial(
            _own_record, options=options, read=_turn_fields
        )


def _turns(episodes: Iterator[Episode], turn: int | None) -> Rows:
    """The first row of each episode, with all that are asked for; those without are left out."""
    for episode in episodes:
        where = episode[0][0]
        rows = [row for _, row in episode if row["turn"] is not None]
        if turn is not None:
            rows = [row for row in rows if row["turn"] == turn - 1]
        elif [row["turn"] for row in rows] != list(range(len(rows))):
            why = "lacks turns of its episode; keep rows in order, or take one turn: --turn 1"
            yield where, BadRow(where, why)
            continue
        if rows:
            yield where, {**rows[0], "turns": rows}


def _whole(episodes: Iterator[Episode]) -> Rows:
    """The first row of each episode, with answers, reward and validity of all its turns."""
    for found in episodes:
        where, first = found[0]
        turns = [row for _, row in found if row["turn"] is not None]
        earned = math.fsum(turn["turn_reward"] - turn["turn_penalty"] for turn in turns)
        facts = {
            "answers": "\n".join(find_answer(row["reply"] or "") for _, row in found),
            "task_reward": None if first["trajectory_reward"] is None else earned,
            "is_valid": all(turn["is_valid"] for turn in turns),
        }
        yield where, {**first, **facts}


def _own_record(row: Row, *, options: ReadOptions, read: Callable[[Row], dict[str, Any]]) -> Record:
    usual = TASK_REWARDS if options.only_rewards else OWN_REWARDS
    return Record(
        step=row["step"],
        rewards=weighted_rewards(row, options.rewards or usual),
        is_valid=bool(options.rewards) or not options.only_rewards or row["is_valid"],
        group=str(row[options.columns.get("group", "group_id")]),
        env=row["env"],
        earned=math.nan if options.rewards else read_number(row, "trajectory_reward"),
        success=read_number(row, "success"),
        **read(row),
    )


def _trajectory_fields(row: Row) -> dict[str, Any]:
    return {"prompt": row["observation"], "response": row["answers"]}


def _turn_fields(row: Row) -> dict[str, Any]:
    turns = row["turns"]
    if any(turn["images"] for turn in turns):
        raise Unusable("holds images; only text can be scored")
    found, *later = [
        {
            "prompt": turn["prompt_ids"],
            "response": turn["completion_ids"],
            "think": None
            if turn["think_start"] is None
            else (turn["think_start"], turn["think_end"]),
            "text": turn["reply"],
            "observation_start": turn.get("observation_start"),
        }
        for turn in turns
    ]
    return found | {"later": tuple(Exchange(**turn) for turn in later)}


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
