"""Question-and-answer rows from a local file or a hub id.

`load_rows` reads MetaMathQA rows (`query`, `response` ending in "The answer is: …") and GSM8K rows
(`question`, `answer` ending in "#### …") from JSON, JSONL or Parquet, recognised by content.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moored.envs.math.answer import bare_answer
from moored.errors import EnvError

logger = logging.getLogger(__name__)

HUB_PREFIX = "hub:"
Record = tuple[str, Mapping[str, object]]
"""Where a row stands (`line 3 of rows.jsonl`), and its columns."""


@dataclass(frozen=True, slots=True)
class Schema:
    """How one kind of row spells question and answer."""

    question: str
    answer: str
    marker: re.Pattern[str]
    """What stands before the final answer."""


SCHEMAS = (
    Schema("query", "response", re.compile(r"the answer is\s*:?", re.IGNORECASE)),
    Schema("question", "answer", re.compile(r"####")),
)
ORIGIN = "original_question"
"""MetaMathQA's column for the question a row was rephrased from."""
COLUMNS = tuple(name for schema in SCHEMAS for name in (schema.question, schema.answer))


@dataclass(frozen=True, slots=True)
class Row:
    """One question and its final answer."""

    question: str
    answer: str
    origin: str
    """Rows of one origin are rewordings of each other and belong to one split."""


def load_rows(source: str | Path) -> tuple[Row, ...]:
    """Read every row of a file, or of `hub:owner/name[:config]`; a repeated call is free."""
    if str(source).startswith(HUB_PREFIX):
        return _load_hub(str(source).removeprefix(HUB_PREFIX))
    path = Path(source).expanduser()
    if not path.is_file():
        raise EnvError(
            f"no data file at '{path}'; give a JSON, JSONL or Parquet file, "
            f"or 'hub:owner/name' for a hub dataset"
        )
    stat = path.stat()
    return _load_file(path.resolve(), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _load_file(path: Path, mtime_ns: int, size: int) -> tuple[Row, ...]:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"PAR1"):
        records = _parquet_records(path)
    elif head.startswith(b"["):
        records = _json_records(path)
    elif head.startswith(b"{"):
        records = _jsonl_records(path)
    else:
        raise EnvError(
            f"'{path}' {'is empty' if size == 0 else 'holds no JSON, JSONL or Parquet rows'}; "
            f"write one JSON object per line, a JSON list of objects, or a Parquet table"
        )
    return _collect(records, str(path))


@functools.lru_cache(maxsize=4)
def _load_hub(hub_id: str) -> tuple[Row, ...]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise EnvError(
            f"'{HUB_PREFIX}{hub_id}' needs the datasets package: pip install datasets; "
            f"or download the file and give its path"
        ) from None
    name, _, config = hub_id.partition(":")
    try:
        table = datasets.load_dataset(name, config or None, split="train")
    except Exception as error:
        raise EnvError(
            f"could not load '{name}' from the hub ({type(error).__name__}: {error}); check the "
            f"id ('hub:owner/name' or 'hub:owner/name:config') and the network, or download the "
            f"file and give its path"
        ) from error
    rows = cast(Iterable[Mapping[str, object]], table)
    records = ((f"row {index} of {name}", row) for index, row in enumerate(rows, start=1))
    return _collect(records, name)


def _collect(records: Iterable[Record], source: str) -> tuple[Row, ...]:
    """Turn records into rows; those without a final answer are left out, with a warning."""
    rows, unusable = [], []
    for where, record in records:
        row = _read_row(where, record)
        if row is None:
            unusable.append(where)
        else:
            rows.append(row)
    if not rows:
        what = "no final answer in any row" if unusable else "there are no rows"
        raise EnvError(
            f"'{source}': {what}; a response must end in 'The answer is: …' (MetaMathQA) or an "
            f"answer in '#### …' (GSM8K)"
        )
    if unusable:
        logger.warning(
            "%s: left out %d of %d rows without a final answer, the first is %s",
            source,
            len(unusable),
            len(rows) + len(unusable),
            unusable[0],
        )
    return tuple(rows)


def _read_row(where: str, record: Mapping[str, object]) -> Row | None:
    """One row; None when no usable final answer stands at its end."""
    schema = next((s for s in SCHEMAS if s.question in record and s.answer in record), None)
    if schema is None:
        raise EnvError(
            f"{where} has the columns {', '.join(map(str, record)) or '(none)'}; rename them to "
            f"query and response (MetaMathQA) or question and answer (GSM8K)"
        )
    question, solution = record[schema.question], record[schema.answer]
    for column, value in ((schema.question, question), (schema.answer, solution)):
        if not isinstance(value, str):
            raise EnvError(
                f"{where}: column {column} must be text, got {type(value).__name__}; "
                f"correct or remove the row"
            )
    question, solution = str(question).strip(), str(solution)
    parts = schema.marker.split(solution)
    answer = parts[-1].strip()
    if len(parts) < 2 or not question or not bare_answer(answer):
        return None
    origin = record.get(ORIGIN)
    return Row(question, answer, origin if isinstance(origin, str) and origin else question)


def _jsonl_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"line {number} of '{path}'"
            yield where, _as_record(where, _parse_json(where, line))


def _json_records(path: Path) -> Iterator[Record]:
    rows = _parse_json(f"'{path}'", path.read_bytes())
    assert isinstance(rows, list)
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of '{path}'"
        yield where, _as_record(where, row)


def _parquet_records(path: Path) -> Iterator[Record]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise EnvError(
            f"reading '{path}' needs pyarrow: pip install 'moored[data]'; or convert it to JSONL"
        ) from None
    try:
        with pq.ParquetFile(path) as table:
            columns = [name for name in table.schema_arrow.names if name in (*COLUMNS, ORIGIN)]
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
