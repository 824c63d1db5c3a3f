"""Rollout files to records, one row after the other, so that size does not matter.

Four formats, told apart by looking at the file: `moored` (the Parquet of a run directory), `trl`
(completions Parquet of `log_completions`), `verl` (JSON lines of `rollout_data_dir`), `jsonl`
(`prompt`, `response`, and if you like `step`, `group`, `reward`, `think_start`, `think_end`).
A row that cannot be used comes out as a `BadRow`; what to do about it is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from moored.errors import MooredError
from moored.files.records import BadRow, ReadOptions, Record
from moored.files.rows import from_moored, from_plain, from_trl, from_verl
from moored.files.tables import (
    Kind,
    Row,
    Unusable,
    check_schema,
    find_columns,
    find_kind,
    iter_rows,
    parquet_rows,
    require_columns,
)
from moored.names import check_name

Convert = Callable[[Row, ReadOptions], Record]
NEEDED = {
    "moored": (
        *("schema", "step", "group_id", "turn", "trajectory_reward", "reply", "images"),
        *("prompt_ids", "completion_ids", "think_start", "think_end"),
    ),
    "trl": ("prompt", "completion"),
    "verl": ("input", "output"),
    "jsonl": ("prompt", "response"),
}
"""Format -> columns without which it cannot be read."""
KINDS: dict[str, Kind] = {
    "moored": "Parquet",
    "trl": "Parquet",
    "verl": "JSON lines",
    "jsonl": "JSON lines",
}
IDS = ("prompt_ids", "completion_ids")
NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


def read_rows(
    file: Path, options: ReadOptions, reader: str | None = None
) -> Iterator[Record | BadRow]:
    """The rows of one file; `reader` names its format, None looks at the file."""
    name = reader or find_reader(file)
    check_name("reader", name, tuple(NEEDED))
    kind = KINDS[name]
    if (kind == "Parquet") != (find_kind(file) == "Parquet"):
        raise MooredError(f"reader {name!r} reads {kind}, which {str(file)!r} is not")
    if name == "moored":
        rows, convert = _turns(file, options.turn), from_moored
    elif name == "trl":
        rows, convert = _completions(file, options)
    else:
        rows, convert = iter_rows(file, kind), from_verl if name == "verl" else from_plain
    for where, row in rows:
        try:
            yield row if isinstance(row, BadRow) else convert(row, options)
        except Unusable as error:
            yield BadRow(where, str(error))


def find_reader(file: Path) -> str:
    """Which format a file has, by its columns or the keys of its first whole line."""
    kind = find_kind(file)
    formats = [name for name, of in KINDS.items() if of == kind]
    if not formats:
        raise MooredError(
            f"{str(file)!r} is neither Parquet nor JSON lines; write one object a line, or pass "
            f"over what is none: --reader and --skip-bad"
        )
    found = find_columns(file, kind)
    for name in formats:
        if found.keys() >= set(NEEDED[name]):
            return name
    wanted = " or ".join(f"{' and '.join(NEEDED[n])} ({n})" for n in formats if n != "moored")
    held = ", ".join(found)[:300] or "nothing"
    raise MooredError(f"{str(file)!r} holds {held}, but needs {wanted}; rename its columns")


def _completions(file: Path, options: ReadOptions) -> tuple[Iterator[tuple[str, Row]], Convert]:
    columns = find_columns(file, "Parquet")
    numbers = (n for n, is_number in columns.items() if is_number and n not in NOT_REWARDS)
    rewards = options.rewards or tuple(numbers)
    wanted = [*NEEDED["trl"], *rewards]
    require_columns(file, wanted, columns)
    rows = parquet_rows(file, wanted + ["step"] * ("step" in columns))
    return rows, partial(from_trl, rewards=rewards)


def _turns(file: Path, turn: int) -> Iterator[tuple[str, Row]]:
    """One turn of each episode."""
    require_columns(file, NEEDED["moored"], find_columns(file, "Parquet"))
    for where, row in parquet_rows(file, NEEDED["moored"], arrays=IDS):
        check_schema(where, row)
        if row["turn"] == turn - 1:
            yield where, row
