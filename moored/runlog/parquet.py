"""Parquet row by row, in little memory whatever a file unpacks to.

Equal values are stored once, so that a small file may hold gigabytes without saying so: batches are
as small as the longest text demands, and a file that unpacks to far more than rollouts is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from moored.errors import MooredError

ROWS_IN_MEMORY = 256
BATCH_BYTES = 1 << 26
BUFFER_BYTES = 1 << 16
LARGE_BYTES = 1 << 28
MOST_TIMES = 1000
"""A file may unpack to `LARGE_BYTES`, or else to this many times its size."""


def need_pyarrow() -> None:
    """Say how to install pyarrow when it is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MooredError("Parquet files need pyarrow; run: pip install 'moored[data]'") from error


def parquet_columns(file: Path) -> dict[str, bool]:
    """Column -> whether it holds numbers; none where there are no rows."""
    with _open(file) as parquet:
        import pyarrow.types as kinds

        if not parquet.metadata.num_rows:
            return {}
        return {
            field.name: kinds.is_floating(field.type) or kinds.is_integer(field.type)
            for field in parquet.schema_arrow
        }


def parquet_rows(
    file: Path, columns: Sequence[str], arrays: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and the row; columns `arrays`, of lists, as views of a batch."""
    most, place, held = max(LARGE_BYTES, MOST_TIMES * file.stat().st_size), 0, 0
    with _open(file) as parquet:
        unpacked, row_bytes = _sizes(file, parquet.metadata, columns)
        _check(file, unpacked, most)
        size = max(1, min(ROWS_IN_MEMORY, BATCH_BYTES // row_bytes))
        for batch in parquet.iter_batches(batch_size=size, columns=columns):
            # A batch may hold a long text many times.
            held += batch.nbytes
            _check(file, held, most)
            names = batch.schema.names
            values = [
                _to_arrays(column) if name in arrays else column.to_pylist()
                for name, column in zip(names, batch.columns, strict=True)
            ]
            for row in zip(*values, strict=True):
                place += 1
                yield f"{str(file)!r}, row {place}", dict(zip(names, row, strict=True))


def _sizes(file: Path, metadata: Any, columns: Collection[str]) -> tuple[int, int]:
    """Of some columns: bytes that a file declares, and the most that a row may hold."""
    unpacked, row_bytes = 0, 1
    with file.open("rb") as stream:
        for number in range(metadata.num_row_groups):
            group, held, longest = metadata.row_group(number), 0, 0
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.path_in_schema.partition(".")[0] not in columns:
                    continue
                # Equal numbers that follow each other are stored as one.
                held += max(chunk.total_uncompressed_size, 8 * chunk.num_values)
                if chunk.physical_type == "BYTE_ARRAY" and chunk.has_dictionary_page:
                    longest += _dictionary_bytes(stream, chunk)
            unpacked += held
            row_bytes = max(row_bytes, longest, held // max(group.num_rows, 1))
    return unpacked, row_bytes


def _dictionary_bytes(stream: BinaryIO, chunk: Any) -> int:
    """What the texts of a chunk that are stored once unpack to, from the header of their page."""
    stream.seek(chunk.dictionary_page_offset)
    head = stream.read(16)
    # Thrift, compact: the kind of the page, its size unpacked, each a field of 7 bits a byte.
    if head[:3] != b"\x15\x04\x15":
        return chunk.total_uncompressed_size
    size = 0
    for place, byte in enumerate(head[3:8]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    return size >> 1


def _check(file: Path, unpacked: int, most: int) -> None:
    if unpacked > most:
        raise MooredError(
            f"{str(file)!r} has {file.stat().st_size:,} bytes and unpacks to more than "
            f"{most / 1e6:,.0f} MB, as no rollouts do; if they are yours, write them as JSON lines"
        )


def _to_arrays(column: Any) -> list[Any]:
    """Views of a column of lists: no Python object for each of many tokens."""
    values = column.values.to_numpy()
    return [values[start:stop] for start, stop in pairwise(column.offsets.to_pylist())]


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    need_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Left to itself pyarrow fetches the whole file ahead, and without a buffer a row group.
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES) as parquet:
            yield parquet
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        first = str(error).strip().partition("\n")[0]
        raise MooredError(f"cannot read {str(file)!r}: {first}; is it whole?") from error
