"""Rollout files of any trainer, row by row: what `moored advise` and `moored diagnose` share.

Parquet, JSON lines and CSV are told apart by their content. Memory holds some hundred rows of a
file, however long it is. A row that cannot be read comes out as a `BadRow`; what to do about it is
the caller's choice.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from moored.errors import MooredError, close_match_hint
from moored.runlog.rollouts import SCHEMA

Kind = Literal["Parquet", "JSON lines", "CSV"]
Row = Mapping[str, Any]
RUN_FILES = ("config.yaml", "metrics.jsonl")
"""What tells a run directory."""
ROWS_IN_MEMORY = 256
BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: where it stands and why."""

    where: str
    why: str
    is_torn: bool = False
    """A last line cut short, as a writer leaves it that was stopped or still writes."""


class Unusable(Exception):
    """Why a row that could be read cannot be used."""


def expand(paths: Iterable[Path], suffixes: Sequence[str] = (".parquet", ".jsonl")) -> list[Path]:
    """Files as they are; of a folder its rollouts: a run directory's, or all it holds."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        is_run = all((path / name).is_file() for name in RUN_FILES)
        folder = path / "rollouts" if is_run or (path / "rollouts").is_dir() else path
        found = [file for file in folder.glob("*") if file.suffix in suffixes]
        if not found:
            raise MooredError(
                f"{str(folder)!r} holds no {' or '.join(suffixes)} file; a run stores rollouts "
                f"when log.rollouts_every is set"
            )
        files += sorted(found, key=_natural)
    return files


def _natural(file: Path) -> list[tuple[int, str]]:
    """`9.jsonl` before `10.jsonl`."""
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d+)", file.name)]


def find_kind(file: Path) -> Kind:
    """Look at the first bytes; what is neither Parquet nor JSON passes for CSV."""
    try:
        with file.open("rb") as stream:
            head = stream.read(4096)
    except OSError as error:
        raise MooredError(f"cannot read {str(file)!r}: {error.strerror}") from error
    if head.startswith(b"PAR1"):
        return "Parquet"
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not start:
        raise MooredError(f"{str(file)!r} is empty; give a file with rollouts")
    if start.startswith(b"["):
        raise MooredError(f"{str(file)!r} is one JSON array; write one object a line instead")
    return "JSON lines" if start.startswith(b"{") else "CSV"


def find_columns(file: Path, kind: Kind) -> dict[str, bool]:
    """Column -> whether it holds numbers. In text, the first whole row tells."""
    if kind == "Parquet":
        with _open_parquet(file) as parquet:
            import pyarrow.types as kinds

            if parquet.metadata.num_rows:
                return {
                    field.name: kinds.is_floating(field.type) or kinds.is_integer(field.type)
                    for field in parquet.schema_arrow
                }
    bad = None
    for _, row in iter_rows(file, kind):
        if not isinstance(row, BadRow):
            return {name: type(value) in (int, float) for name, value in row.items()}
        bad = bad or row
    if bad is not None:
        raise MooredError(f"{bad.where} {bad.why}")
    raise MooredError(f"{str(file)!r} holds no rows; give a file with rollouts")


def require_columns(file: Path, wanted: Iterable[str], columns: Collection[str]) -> None:
    """Complain of the first that is missing."""
    for name in wanted:
        if name not in columns:
            hint = close_match_hint(name, columns)[:300]
            raise MooredError(f"{str(file)!r} has no column {name!r}; {hint}")


def iter_rows(
    file: Path, kind: Kind, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, Row | BadRow]]:
    """Where each row stands, and the row; of Parquet only `columns`."""
    if kind == "Parquet":
        return parquet_rows(file, columns)
    return _json_rows(file) if kind == "JSON lines" else _csv_rows(file)


def _json_rows(file: Path) -> Iterator[tuple[str, Row | BadRow]]:
    with file.open("rb") as stream:
        for place, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            where = f"{str(file)!r}, line {place}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = BadRow(where, f"is not JSON: {error}", is_torn=not line.endswith(b"\n"))
            if not isinstance(row, dict | BadRow):
                row = BadRow(where, f"is not a JSON object: {row!r:.60}")
            yield where, row


def _csv_rows(file: Path) -> Iterator[tuple[str, Row | BadRow]]:
    place, line = 0, b""

    def lines() -> Iterator[str]:
        nonlocal place, line
        for place, line in enumerate(stream, start=1):  # noqa: B007
            yield line.decode("utf-8-sig")

    with file.open("rb") as stream:
        reader = csv.reader(lines())
        try:
            names = next((fields for fields in reader if fields), [])
            for fields in reader:
                where = f"{str(file)!r}, line {place}"
                if len(fields) == len(names):
                    yield where, dict(zip(names, fields, strict=True))
                elif fields:
                    why = f"has {len(fields)} fields instead of {len(names)}"
                    yield where, BadRow(where, why, is_torn=not line.endswith(b"\n"))
        except (csv.Error, UnicodeDecodeError) as error:
            where = f"{str(file)!r}, line {place}"
            raise MooredError(f"{where} is neither JSON nor CSV: {error}") from error


def parquet_rows(
    file: Path, columns: Sequence[str] | None = None, *, arrays: Collection[str] = ()
) -> Iterator[tuple[str, Row]]:
    """As `iter_rows`; `arrays` names columns of lists that come as arrays, to be copied if kept."""
    place = 0
    with _open_parquet(file) as parquet:
        for batch in parquet.iter_batches(batch_size=ROWS_IN_MEMORY, columns=columns):
            names = batch.schema.names
            values = [
                _to_arrays(column) if name in arrays else column.to_pylist()
                for name, column in zip(names, batch.columns, strict=True)
            ]
            for row in zip(*values, strict=True):
                place += 1
                yield f"{str(file)!r}, row {place}", dict(zip(names, row, strict=True))


def _to_arrays(column: Any) -> list[Any]:
    """Views of a column of lists: no Python object for each of many tokens."""
    values = column.values.to_numpy()
    return [values[start:stop] for start, stop in pairwise(column.offsets.to_pylist())]


@contextmanager
def _open_parquet(file: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MooredError("Parquet files need pyarrow; run: pip install 'moored[data]'") from error
    try:
        # Left to itself pyarrow fetches the whole file ahead, and without a buffer a row group.
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES) as parquet:
            yield parquet
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        first = str(error).strip().partition("\n")[0]
        raise MooredError(f"cannot read {str(file)!r}: {first}; is it whole?") from error


def check_schema(where: str, row: Row) -> None:
    """Refuse rows of moored's own rollouts that another version wrote."""
    if row["schema"] != SCHEMA:
        raise MooredError(
            f"{where} has schema {row['schema']}, this version reads {SCHEMA}; read it with the "
            f"version that wrote it"
        )


def number(row: Row, name: str) -> float:
    """NaN where there is none. Text is parsed, since CSV holds nothing else."""
    value = row.get(name)
    if value is None or value == "":
        return math.nan
    try:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return float(value.lower() == "true")
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise Unusable(f"has {name!r} = {value!r:.80}, which is no number") from None


def whole_number(row: Row, name: str) -> int | None:
    """None where there is none."""
    value = number(row, name)
    if math.isnan(value):
        return None
    if not value.is_integer():
        raise Unusable(f"has {name!r} = {row[name]!r:.80}, which is no whole number")
    return int(value)
