"""Rows of a local file or a hub data set, one mapping each.

A file is JSONL, a JSON list or Parquet, recognised by content; JSON may be compressed by gzip.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from moored.errors import EnvError, MooredError
from moored.files.records import BadRow
from moored.files.tables import find_kind, open_table

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


def read_records(path: Path, columns: Collection[str] = ()) -> Iterator[Record]:
    """The rows of a file, in order; of a Parquet table these columns, where it has any."""
    try:
        if find_kind(path) == "CSV":
            raise EnvError(
                f"'{path}' holds no JSON, JSONL or Parquet rows; write one JSON object per line, "
                f"a JSON list of objects, or a Parquet table"
            )
        table = open_table(path)
        wanted = [name for name in columns if name in table.columns] or list(table.columns)
        for place, row in table.rows(wanted):
            where = " of ".join(reversed(place.rsplit(", ", 1)))
            if isinstance(row, BadRow):
                raise EnvError(f"{where} {row.why}; correct, remove or download it again")
            yield where, row
    except EnvError:
        raise
    except MooredError as error:
        raise EnvError(str(error)) from error


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
