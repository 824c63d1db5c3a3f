"""Questions with their answers, from a file of rows.

`load_questions` reads HotpotQA and 2WikiMultihopQA rows (`question`, `answer`, with
`supporting_facts` where there are any) and NQ rows (`question`, and `answer` or `golden_answers`
as a list) from JSON, JSONL or Parquet.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moored.envs.record_files import file_key, read_records
from moored.errors import EnvError

logger = logging.getLogger(__name__)

ANSWER_COLUMNS = ("golden_answers", "answers", "answer")
SUPPORT = "supporting_facts"


@dataclass(frozen=True, slots=True)
class Question:
    """One question, what answers it, and where that stands."""

    text: str
    answers: tuple[str, ...]
    """Any of them is right."""
    titles: tuple[str, ...]
    """Titles of the passages it needs, in the order of the hops; empty where they are not known."""
    key: str
    """What two questions share exactly when they ask for the same."""


def load_questions(path: str | Path) -> tuple[Question, ...]:
    """All questions of a file; a repeated call is free until the file changes."""
    return _load_questions(*file_key(path))


@functools.lru_cache(maxsize=4)
def _load_questions(path: Path, mtime_ns: int, size: int) -> tuple[Question, ...]:
    questions, without = [], []
    for where, record in read_records(path, ("question", *ANSWER_COLUMNS, SUPPORT)):
        question = _read_question(where, record)
        if question is None:
            without.append(where)
        else:
            questions.append(question)
    if not questions:
        raise EnvError(f"'{path}' holds no question with an answer; check its columns and rows")
    if without:
        logger.warning(
            "%s: left out %d of %d rows without question or answer, the first is %s",
            path,
            len(without),
            len(questions) + len(without),
            without[0],
        )
    return tuple(questions)


def _read_question(where: str, record: Mapping[str, object]) -> Question | None:
    """One question; None when the row has an empty question or answer."""
    column = next((name for name in ANSWER_COLUMNS if record.get(name) is not None), None)
    text = record.get("question")
    if column is None or not isinstance(text, str):
        raise EnvError(
            f"{where} has the columns {', '.join(map(str, record)) or '(none)'}; a question needs "
            f"question, and answer or golden_answers"
        )
    found = record[column]
    given = [found] if isinstance(found, str) else found
    if not isinstance(given, list) or not all(isinstance(answer, str) for answer in given):
        raise EnvError(f"{where}: {column} must be text or a list of texts, got {found!r:.80}")
    text, answers = text.strip(), tuple(answer.strip() for answer in given if answer.strip())
    if not text or not answers:
        return None
    return Question(text, answers, _support_titles(where, record.get(SUPPORT)), text)


def _support_titles(where: str, support: object) -> tuple[str, ...]:
    """Titles of `[[title, sentence], …]`, or of `{"title": […], …}` as in tables; each once."""
    if support is None:
        return ()
    rows = support.get("title") if isinstance(support, Mapping) else support
    if not isinstance(rows, list):
        raise EnvError(f"{where}: {SUPPORT} must be a list of titles, got {support!r:.80}")
    named = [row[0] if isinstance(row, list) and row else row for row in rows]
    titles = [title for title in named if isinstance(title, str)]
    if len(titles) < len(named):
        raise EnvError(f"{where}: {SUPPORT} must name titles as text, got {support!r:.80}")
    return tuple(dict.fromkeys(titles))
