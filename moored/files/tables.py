"""Parquet, JSON and CSV read row by row; the content decides which of them a file is.

Memory holds some hundred rows of a file, however long it is; only a JSON list or table is read
whole. A row that cannot be read comes out as a `BadRow`; what to do about it is up to the caller.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import BinaryIO, Literal, cast

from moored.config_text import read_yaml
from moored.errors import MooredError, close_match_hint
from moored.files.records import BadRow, Row
from moored.runlog.parquet import parquet_columns, parquet_rows

Kind = Literal["Parquet", "JSON lines", "JSON", "CSV"]
Rows = Iterator[tuple[str, Row | BadRow]]
"""Where each row stands, and the row."""
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".table.json", ".csv")
DELIMITERS = (",", ";", "\t")
"""Of columns in CSV; the first that stands in the head is taken."""
RUN_FILES = ("config.yaml", "metrics.jsonl")
"""Files that mark a folder as a run directory."""
ROLLOUT_FOLDERS = ("rollouts", "completions", "rollout_data")
"""Where trainers put rollouts inside their output: moored, TRL, and users of verl."""
GZIP = b"\x1f\x8b"
PACKED = (GZIP, b"PK\x03\x04", b"\x28\xb5\x2f\xfd")
"""How gzip, zip and zstd files begin; of these gzip is read, once."""
WANDB_TABLE = re.compile(
    rb'\{\s*("_type"\s*:\s*"table"|"columns"\s*:\s*\[|"column_types"\s*:|"data"\s*:\s*\[\s*\[)'
)
MOST_LINE_BYTES = 1 << 26
MOST_JSON_BYTES = 1 << 29
ROWS_LOOKED_AT = 64
"""Rows of a text file that tell its columns."""


def expand(paths: Iterable[str | Path]) -> list[Path]:
    """Files as they are; of a folder its rollouts: a run's, a trainer's output, or all it holds."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MooredError(f"{str(path)!r} does not exist; {_near(path)}")
        files += _files_of(path) if path.is_dir() else [path]
    return files


def is_run(folder: Path) -> bool:
    """True for a run directory of `moored train`."""
    return all((folder / name).is_file() for name in RUN_FILES)


def check_stores_rollouts(run: Path) -> None:
    """Refuse the run directory of a warm start, in which nothing is sampled that could be read."""
    try:
        is_warm_start = read_yaml(run / "config.yaml").get("command") == "sft"
    except MooredError:
        return
    if is_warm_start:
        raise MooredError(
            f"{str(run)!r} is a warm start, in which input dependence is not measured and no "
            f"rollouts are stored; see how it went with `moored report {quote(str(run))}`, or try "
            f"its model with `moored eval {quote(str(run / 'model'))}`"
        )


def _files_of(folder: Path) -> list[Path]:
    subfolders = [folder / name for name in ROLLOUT_FOLDERS if (folder / name).is_dir()]
    searched = [folder / "rollouts"] if is_run(folder) else [*subfolders[:1], folder]
    for place in searched:
        found = [
            file for file in place.glob("*") if file.name.endswith(SUFFIXES) and file.is_file()
        ]
        # Among others an empty file is one whose writer has just begun.
        if found := [file for file in found if file.stat().st_size] or found:
            return sorted(found, key=_natural)
    if is_run(folder):
        check_stores_rollouts(folder)
        raise MooredError(
            f"the run {str(folder)!r} stored no rollouts; set log.rollouts_every (10 by default) "
            f"when training"
        )
    below = sorted({file.parent for file in folder.glob("*/*") if file.name.endswith(SUFFIXES)})
    if below:
        hint = f"name a folder below it: {', '.join(map(str, below[:4]))}"
    else:
        hint = "give rollout files, a folder of them, a run directory or a trainer's output folder"
    raise MooredError(f"{str(folder)!r} holds no {' or '.join(SUFFIXES)} file; {hint}")


def _near(path: Path) -> str:
    """What there is instead of a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f"nor does its folder {str(folder)!r}; check the path from {str(Path.cwd())!r}"
    names = [each.name for each in folder.iterdir() if not each.name.startswith(".")]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {str(folder / close[0])!r}?"
    shown = ", ".join(sorted(names)[:6]) + (", …" if len(names) > 6 else "")
    return f"{str(folder)!r} holds {shown or 'nothing'}"


def _natural(file: Path) -> list[tuple[int, str]]:
    """`9.jsonl` before `10.jsonl`."""
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d+)", file.name)]


def find_kind(file: Path) -> Kind:
    """Look at the first bytes, unpacked; what is neither Parquet nor JSON passes for CSV."""
    if file.exists() and not file.is_file():
        raise MooredError(
            f"{str(file)!r} is no regular file but a folder, a pipe or a device; write the rows "
            f"into a file and give that (.jsonl.gz is read too)"
        )
    with _open(file) as stream:
        head = stream.read(4096)
    if head.startswith(b"PAR1") and not _is_gzip(file):
        return "Parquet"
    if head.startswith((b"PAR1", *PACKED)):
        raise MooredError(f"{str(file)!r} is compressed; unpack it first")
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not start:
        raise MooredError(f"{str(file)!r} is empty; give a file with rows")
    if start.startswith(b"[") or WANDB_TABLE.match(start):
        return "JSON"
    return "JSON lines" if start.startswith(b"{") else "CSV"


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(GZIP)) == GZIP


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if need be."""
    try:
        with cast(BinaryIO, gzip.open(file)) if _is_gzip(file) else file.open("rb") as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MooredError(f"{str(file)!r} is not a whole gzip file ({error})") from error
    except OSError as error:
        raise MooredError(f"cannot read {str(file)!r}: {error.strerror}") from error


def _lines(file: Path, stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(MOST_LINE_BYTES + 1):
        if len(line) > MOST_LINE_BYTES:
            raise MooredError(
                f"{str(file)!r} has a line of more than {MOST_LINE_BYTES >> 20} MB; write one row "
                f"on each"
            )
        yield line


@dataclass(frozen=True, slots=True)
class Table:
    """A file whose kind and columns are known."""

    file: Path
    kind: Kind
    columns: Mapping[str, bool]
    """Column -> whether it holds numbers; in text, the first whole rows tell."""

    def rows(self, names: Sequence[str]) -> Rows:
        """Where each row stands, and the row; of Parquet only columns `names` are read."""
        if self.kind == "Parquet":
            there = [name for name in dict.fromkeys(names) if name in self.columns]
            return parquet_rows(self.file, there)
        return _text_rows(self.file, self.kind)

    def require(self, wanted: Iterable[str]) -> None:
        """Complain about the first column that is missing."""
        for name in wanted:
            if name not in self.columns:
                hint = close_match_hint(name, self.columns)[:300]
                raise MooredError(f"{str(self.file)!r} has no column {name!r}; {hint}")


def open_table(file: Path) -> Table:
    """Look at a file: its kind and its columns."""
    kind = find_kind(file)
    found = parquet_columns(file) if kind == "Parquet" else _text_columns(file, kind)
    if not found:
        raise MooredError(f"{str(file)!r} holds no rows; give a file with some")
    return Table(file, kind, found)


def _text_columns(file: Path, kind: Kind) -> dict[str, bool]:
    """Of the first whole rows: some may lack a column, or hold nothing in it."""
    bad, num_seen, found = None, 0, {}
    is_number = _parses if kind == "CSV" else _is_number
    for _, row in _text_rows(file, kind):
        if isinstance(row, BadRow):
            bad = bad or row
            continue
        for name, value in row.items():
            known = found.setdefault(name, set())
            if value is not None and value != "":
                known.add(is_number(value))
        num_seen += 1
        if num_seen == ROWS_LOOKED_AT:
            break
    if bad is not None and not num_seen:
        raise MooredError(f"{bad.where} {bad.why}")
    return {name: known == {True} for name, known in found.items()}


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _parses(text: str) -> bool:
    """Whether a field of a CSV, which holds text only, is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_rows(file: Path, kind: Kind) -> Rows:
    read = {"JSON lines": _line_rows, "JSON": _json_rows, "CSV": _csv_rows}[kind]
    return read(file)


def _json_rows(file: Path) -> Rows:
    """A list of objects, or a table as W&B stores it: names of columns, and rows of values."""
    with _open(file) as stream:
        text = stream.read(MOST_JSON_BYTES + 1)
    if len(text) > MOST_JSON_BYTES:
        raise MooredError(
            f"{str(file)!r} is one JSON value of more than {MOST_JSON_BYTES >> 20} MB, which is "
            f"not read row by row; write one object on each line instead"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MooredError(f"{str(file)!r} is not JSON: {error}; is it whole?") from error
    names = None
    if isinstance(found, dict):
        names, found = found.get("columns"), found.get("data")
        if not isinstance(names, list) or not isinstance(found, list):
            raise MooredError(f"{str(file)!r} is no table of W&B: it needs columns and data")
    for place, values in enumerate(found, start=1):
        where, row = f"{str(file)!r}, row {place}", values
        if names is not None and isinstance(values, list) and len(values) == len(names):
            row = dict(zip(map(str, names), values, strict=True))
        if not isinstance(row, dict):
            wanted = "a JSON object" if names is None else f"a list of {len(names)} values"
            row = BadRow(where, f"is not {wanted}: {values!r:.60}")
        yield where, row


def _line_rows(file: Path) -> Rows:
    with _open(file) as stream:
        for place, line in enumerate(_lines(file, stream), start=1):
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


def _csv_rows(file: Path) -> Rows:
    place, line = 0, b""

    def lines() -> Iterator[str]:
        nonlocal place, line
        for place, line in enumerate(_lines(file, stream), start=1):  # noqa: B007
            yield line.decode("utf-8-sig")

    with _open(file) as stream:
        try:
            text = lines()
            head = next((line for line in text if line.strip()), "")
            delimiter = next((sign for sign in DELIMITERS if sign in head), ",")
            reader = csv.reader(chain([head], text), delimiter=delimiter)
            names = next(reader, [])
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
