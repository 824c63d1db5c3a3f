"""Parquet row by row, with errors a user can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moored.errors import MooredError

ROWS_IN_MEMORY = 256


def parquet_columns(file: Path) -> dict[str, str]:
    """Column -> "number" or "other"."""
    with _open(file) as parquet:
        import pyarrow.types as kinds

        return {
            field.name: "number"
            if kinds.is_floating(field.type) or kinds.is_integer(field.type)
            else "other"
            for field in parquet.schema_arrow
        }


def parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a row stands and what the columns hold there."""
    with _open(file) as parquet:
        number = 0
        for batch in parquet.iter_batches(batch_size=ROWS_IN_MEMORY, columns=list(columns)):
            for row in batch.to_pylist():
                number += 1
                yield f"{str(file)!r}, row {number}", row


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MooredError("Parquet files need pyarrow; run: pip install 'moored[data]'") from error
    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet
    except (OSError, pa.ArrowException) as error:
        first = str(error).strip().splitlines()[0]
        raise MooredError(f"cannot read {str(file)!r}: {first}; is it whole?") from error
