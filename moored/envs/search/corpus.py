"""Passages to search, from a file of rows.

`load_corpus` reads JSONL, a JSON list or Parquet: rows with `title` and `text`, or with `contents`
as Search-R1's corpora have it, the title in the first line and the text below.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moored.envs.base import encodable
from moored.envs.record_files import file_key, read_records
from moored.errors import EnvError


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus."""

    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as Search-R1 writes them."""
        return f'"{self.title}"\n{self.text}'


def parse_contents(contents: str) -> Passage:
    """The inverse of `Passage.contents`; quotes around the title may be missing."""
    title, _, text = contents.partition("\n")
    return Passage(title.strip().strip('"').strip(), text.strip())


def load_corpus(path: str | Path) -> tuple[Passage, ...]:
    """All passages of a file; a repeated call is free until the file changes."""
    return _load_corpus(*file_key(path))


@functools.lru_cache(maxsize=2)
def _load_corpus(path: Path, mtime_ns: int, size: int) -> tuple[Passage, ...]:
    passages = tuple(_read_passage(where, record) for where, record in read_records(path))
    if not passages:
        raise EnvError(f"'{path}' holds no passages; write one JSON object per line")
    return passages


def _read_passage(where: str, record: Mapping[str, object]) -> Passage:
    contents = record.get("contents")
    if isinstance(contents, str):
        return parse_contents(encodable(contents))
    title, text = record.get("title"), record.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        raise EnvError(
            f"{where} has the columns {', '.join(map(str, record)) or '(none)'}; a passage needs "
            f"title and text, or contents, as text"
        )
    return Passage(encodable(title).strip(), encodable(text).strip())
