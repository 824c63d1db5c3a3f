"""Rows of a local file or a hub data set, one mapping each.

A file is JSONL, a JSON list or Parquet, recognised by content; JSON may be compressed by gzip.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from moored.errors import EnvError

HUB_PREFIX = "hub:"
Record = tuple[str, Mapping[str, object]]
"""Where a row stands (`line 3 of rows.jsonl`), and its columns."""
FileKey = tuple[Path, int, int]
"""A file's path, time of change and size: what a cache of its rows is keyed by."""


def file_key(source: str | Path, *, hint: str = "") -> FileKey:
    """The key of an existing file; `hint` says what else could have been given."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise EnvError(f"no data file at '{path}'; give a JSON, JSONL or Parquet file{hint}")
    stat = path.stat()
    return path.resolve(), stat.st_mtime_ns, stat.st_size


def read_records(path: Path, columns: Collection[str] | None = None) -> Iterator[Record]:
    """The rows of a file, in order; of a Parquet table these columns, where it has any."""
    with _open(path) as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"PAR1"):
        return _parquet_records(path, columns)
    if head.startswith(b"["):
        return _json_records(path)
    if head.startswith(b"{"):
        return _jsonl_records(path)
    raise EnvError(
        f"'{path}' {'holds no JSON, JSONL or Parquet rows' if head else 'is empty'}; "
        f"write one JSON object per line, a JSON list of objects, or a Parquet table"
    )


def hub_records(hub_id: str, split: str = "train") -> Iterator[Record]:
    """The rows of a hub data set, `owner/name` or `owner/name:config`."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise EnvError(
            f"'{HUB_PREFIX}{hub_id}' needs the datasets package: pip install datasets; "
            f"or download the file and give its path"
        ) from None
    name, _, config = hub_id.partition(":")
    try:
        table = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        raise EnvError(
            f"could not load '{name}' from the hub ({type(error).__name__}: {error}); check the "
            f"id ('hub:owner/name' or 'hub:owner/name:config') and the network, or download the "
            f"file and give its path"
        ) from error
    rows = cast(Iterable[Mapping[str, object]], table)
    return ((f"row {index} of {name}", row) for index, row in enumerate(rows, start=1))


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The file, unpacked if need be; EnvError where it was cut off or damaged."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    try:
        with cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise EnvError(
            f"'{path}' is not a whole gzip file ({error}); download or write it again"
        ) from error


def _jsonl_records(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"line {number} of '{path}'"
            yield where, _as_record(where, _parse_json(where, line))


def _json_records(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        rows = _parse_json(f"'{path}'", file.read())
    assert isinstance(rows, list)
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of '{path}'"
        yield where, _as_record(where, row)


def _parquet_records(path: Path, wanted: Collection[str] | None) -> Iterator[Record]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise EnvError(
            f"reading '{path}' needs pyarrow: pip install 'moored[data]'; or convert it to JSONL"
        ) from None
    try:
        with pq.ParquetFile(path) as table:
            columns = [name for name in table.schema_arrow.names if name in (wanted or ())]
            batches = table.iter_batches(columns=columns or None)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"row {number} of '{path}'", row
    except (pa.ArrowException, OSError) as error:
        raise EnvError(
            f"'{path}' is not a readable Parquet file ({error}); download or write it again"
        ) from error


def _parse_json(where: str, data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise EnvError(
            f"{where} is not complete JSON ({error}); correct, remove or download it again"
        ) from error


def _as_record(where: str, row: object) -> Mapping[str, object]:
    if not isinstance(row, dict):
        raise EnvError(f"{where} must be a JSON object, got {type(row).__name__}; remove it")
    return row
