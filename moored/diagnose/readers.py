"""Rollout files to records, one row after the other, so that size does not matter.

Four formats, told apart by looking at the file: `moored` (the Parquet of a run directory), `trl`
(completions Parquet of `log_completions`), `verl` (JSON lines of `rollout_data_dir`), `jsonl`
(`prompt`, `response`, and if you like `step`, `group`, `reward`, `think_start`, `think_end`).
A row that cannot be used comes out as a `BadRow`; what to do about it is the caller's choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from moored.diagnose.parquet import parquet_columns, parquet_rows
from moored.diagnose.records import BadRow, ReadOptions, Record
from moored.diagnose.rows import Row, Unusable, from_moored, from_plain, from_trl, from_verl
from moored.errors import MooredError
from moored.names import check_name
from moored.rollout_store import SCHEMA

PARQUET_MAGIC = b"PAR1"
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
PARQUET_FORMATS = ("moored", "trl")
NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


def read_rows(
    file: Path, options: ReadOptions, reader: str | None = None
) -> Iterator[Record | BadRow]:
    """The rows of one file; `reader` names its format, None looks at the file."""
    name = reader or find_reader(file)
    check_name("reader", name, tuple(NEEDED))
    if (name in PARQUET_FORMATS) != is_parquet(file):
        kind = "Parquet" if name in PARQUET_FORMATS else "JSON lines"
        raise MooredError(f"reader {name!r} reads {kind}, which {str(file)!r} is not")
    if name == "moored":
        yield from _read_moored(file, options)
    elif name == "trl":
        yield from _read_trl(file, options)
    else:
        yield from _read_lines(file, from_verl if name == "verl" else from_plain, options)


def find_reader(file: Path) -> str:
    """Which format a file has, by its columns or the keys of its first line."""
    if is_parquet(file):
        found, formats = parquet_columns(file), PARQUET_FORMATS
    else:
        found, formats = _first_keys(file), ("verl", "jsonl")
    for name in formats:
        if set(NEEDED[name]) <= set(found):
            return name
    wanted = " or ".join(f"{' and '.join(NEEDED[n])} ({n})" for n in formats if n != "moored")
    held = ", ".join(found)[:300] or "nothing"
    raise MooredError(f"{str(file)!r} holds {held}, but needs {wanted}; rename its columns")


def is_parquet(file: Path) -> bool:
    """Look at the first bytes; complains of what is no file, and of an empty one."""
    try:
        with file.open("rb") as handle:
            start = handle.read(len(PARQUET_MAGIC))
    except OSError as error:
        raise MooredError(f"cannot read {str(file)!r}: {error.strerror}") from error
    if not start:
        raise MooredError(f"{str(file)!r} is empty; give a file with rollouts")
    return start == PARQUET_MAGIC


def expand(paths: Sequence[Path]) -> list[Path]:
    """Files as they are; of a folder its rollouts: a run directory's, or all it holds."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        found = [f for f in folder.iterdir() if f.suffix in (".parquet", ".jsonl")]
        if not found:
            raise MooredError(
                f"{str(folder)!r} holds no .parquet or .jsonl file; a run stores rollouts when "
                f"log.rollouts_every is set"
            )
        files += sorted(found, key=_natural)
    return files


def _natural(file: Path) -> list[tuple[int, str]]:
    """`9.jsonl` before `10.jsonl`."""
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d+)", file.name)]


def _first_keys(file: Path) -> list[str]:
    for _, row in _json_rows(file):
        if isinstance(row, BadRow):
            raise MooredError(
                f"{row.where} {row.why}; give JSON lines or Parquet, or say what it is: --reader"
            )
        return list(row)
    raise MooredError(f"{str(file)!r} holds no rows; give a file with rollouts")


def _json_rows(file: Path) -> Iterator[tuple[str, Row | BadRow]]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            where = f"{str(file)!r}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = f"is not JSON: {error}"
                yield where, BadRow(where, why, is_torn=not line.endswith(b"\n"))
                continue
            whole = isinstance(row, dict)
            yield where, row if whole else BadRow(where, "is not a JSON object")


def _read_lines(
    file: Path, convert: Callable[[Row, ReadOptions], Record], options: ReadOptions
) -> Iterator[Record | BadRow]:
    for where, row in _json_rows(file):
        yield row if isinstance(row, BadRow) else _converted(where, row, convert, options)


def _read_trl(file: Path, options: ReadOptions) -> Iterator[Record | BadRow]:
    columns = parquet_columns(file)
    _require(file, "trl", columns)
    rewards = options.rewards or tuple(
        name for name, kind in columns.items() if kind == "number" and name not in NOT_REWARDS
    )
    missing = [name for name in rewards if name not in columns]
    if missing:
        raise MooredError(
            f"{str(file)!r} has no column {missing[0]!r}; it has {', '.join(columns)}"
        )
    wanted = [name for name in ("step", "prompt", "completion", *rewards) if name in columns]
    convert = partial(from_trl, rewards=rewards)
    for where, row in parquet_rows(file, wanted):
        yield _converted(where, row, convert, options)


def _read_moored(file: Path, options: ReadOptions) -> Iterator[Record | BadRow]:
    columns = parquet_columns(file)
    _require(file, "moored", columns)
    for where, row in parquet_rows(file, NEEDED["moored"]):
        if row["schema"] != SCHEMA:
            raise MooredError(
                f"{where} has schema {row['schema']}, this version reads {SCHEMA}; read it with "
                f"the version that wrote it"
            )
        if row["turn"] == options.turn - 1:
            yield _converted(where, row, from_moored, options)


def _require(file: Path, name: str, columns: Mapping[str, str]) -> None:
    missing = [column for column in NEEDED[name] if column not in columns]
    if missing:
        raise MooredError(
            f"{str(file)!r} has no column {missing[0]!r}, which {name} files have; it has "
            f"{', '.join(columns)[:300]}"
        )


def _converted(
    where: str, row: Row, convert: Callable[[Row, ReadOptions], Record], options: ReadOptions
) -> Record | BadRow:
    try:
        return convert(row, options)
    except Unusable as error:
        return BadRow(where, str(error))
