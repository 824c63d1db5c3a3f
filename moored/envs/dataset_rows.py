"""Question-and-answer rows from a local file or a hub id.

`load_rows` reads MetaMathQA rows (`query`, `response` ending in "The answer is: …") and GSM8K rows
(`question`, `answer` ending in "#### …") from JSON, JSONL or Parquet, recognised by content.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moored.envs.math.answer import bare_answer
from moored.envs.record_files import HUB_PREFIX, Record, file_key, hub_records, read_records
from moored.errors import EnvError

logger = logging.getLogger(__name__)


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
CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's notes for a calculator: 3 * 4 = <<3*4=12>>12."""
COLUMNS = tuple(name for schema in SCHEMAS for name in (schema.question, schema.answer))


@dataclass(frozen=True, slots=True)
class Row:
    """One question and its final answer."""

    question: str
    answer: str
    origin: str
    """Rows of one origin are rewordings of each other and belong to one split."""
    solution: str = ""
    """The working before the final answer, one step per line."""


def load_rows(source: str | Path) -> tuple[Row, ...]:
    """Read every row of a file, or of `hub:owner/name[:config]`; a repeated call is free."""
    if str(source).startswith(HUB_PREFIX):
        return _load_hub(str(source).removeprefix(HUB_PREFIX))
    return _load_file(*file_key(source, hint=", or 'hub:owner/name' for a hub dataset"))


@functools.lru_cache(maxsize=4)
def _load_file(path: Path, mtime_ns: int, size: int) -> tuple[Row, ...]:
    return _collect(read_records(path, (*COLUMNS, ORIGIN)), str(path))


@functools.lru_cache(maxsize=4)
def _load_hub(hub_id: str) -> tuple[Row, ...]:
    return _collect(hub_records(hub_id), hub_id.partition(":")[0])


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
    steps = CALCULATOR.sub("", parts[0]).partition("####")[0].strip()
    origin = origin if isinstance(origin, str) and origin else question
    return Row(question, answer, origin, steps)
