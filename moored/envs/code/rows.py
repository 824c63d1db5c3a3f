"""Problems from data sets: DeepCoder-Preview, HumanEval and MBPP rows, recognised by their columns.

`load_problems(source)` gives the problems of each split. A problem belongs to one split, however
often and in whatever wording of white space it occurs; a row that its data set tests with is never
trained on, nor is one whose tests run beside the program.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from moored.envs.base import SPLIT_SEEDS, Split, split_of_content
from moored.envs.code.contests import read_deepcoder
from moored.envs.code.functions import read_humaneval, read_mbpp
from moored.envs.code.problem import Problem
from moored.envs.record_files import HUB_PREFIX, Record, file_key, hub_records, read_records
from moored.errors import EnvError

logger = logging.getLogger(__name__)

READERS = (
    (("entry_point", "canonical_solution", "test", "prompt"), read_humaneval),
    (("code", "test_list"), read_mbpp),
    (("problem", "tests"), read_deepcoder),
)
"""Columns of a kind of row, and what reads it: a problem, or None where it has no tests."""
STRICTEST: tuple[Split, ...] = ("test", "validation", "train")


def load_problems(source: str | Path, max_tests: int) -> Mapping[Split, tuple[Problem, ...]]:
    """The problems of a file or of `hub:owner/name[:config[:split]]`; a repeated call is free."""
    if str(source).startswith(HUB_PREFIX):
        return _load_hub(str(source).removeprefix(HUB_PREFIX), max_tests)
    key = file_key(source, hint=", or 'hub:owner/name:config' for a hub dataset")
    return _load_file(*key, max_tests)


@functools.lru_cache(maxsize=4)
def _load_file(
    path: Path, mtime_ns: int, size: int, max_tests: int
) -> Mapping[Split, tuple[Problem, ...]]:
    # Files of a hub data set are called train-00000-of-00003.parquet, test-….
    is_test = path.name.startswith("test")
    return _collect(read_records(path), str(path), max_tests, is_test=is_test)


@functools.lru_cache(maxsize=4)
def _load_hub(hub_id: str, max_tests: int) -> Mapping[Split, tuple[Problem, ...]]:
    name, config, split = [*hub_id.split(":", 2), "", ""][:3]
    records = hub_records(f"{name}:{config}", split or "train")
    # A part of a split, or several, is written `test[:100]` and `train+test`.
    return _collect(records, name, max_tests, is_test="test" in re.findall("[a-z]+", split))


def _collect(
    records: Iterable[Record], source: str, max_tests: int, *, is_test: bool
) -> Mapping[Split, tuple[Problem, ...]]:
    problems = [_with_few_tests(problem, max_tests) for problem in _read_all(records, source)]
    if is_test:
        problems = [replace(problem, split="test") for problem in problems]
    found = dict(assign_splits(problems))
    trained = tuple(problem for problem in found["train"] if problem.kind != "beside")
    if len(trained) < len(found["train"]):
        logger.warning(
            "%s: %d rows are not trained on, as their tests need objects of the program and so run "
            "beside it, where a program can deceive them",
            source,
            len(found["train"]) - len(trained),
        )
    return {**found, "train": trained}


def _read_all(records: Iterable[Record], source: str) -> list[Problem]:
    """Every problem; rows without tests or with ones that cannot be read are left out."""
    problems: list[Problem] = []
    unusable: list[str] = []
    for where, record in records:
        try:
            problem = _reader_of(where, record)(record)
        except (ValueError, TypeError, LookupError, SyntaxError, AttributeError) as error:
            if isinstance(error, EnvError):
                raise
            unusable.append(f"{where} ({type(error).__name__}: {error})")
            continue
        if problem is None:
            unusable.append(f"{where} (no tests)")
        else:
            problems.append(problem)
    if not problems:
        first = f"the first is {unusable[0]}" if unusable else "there are no rows"
        raise EnvError(f"'{source}': no row can be used, {first}; correct or replace the file")
    if unusable:
        logger.warning(
            "%s: left out %d of %d rows whose tests cannot be used, the first is %s",
            source,
            len(unusable),
            len(problems) + len(unusable),
            unusable[0],
        )
    return problems


def _reader_of(
    where: str, record: Mapping[str, object]
) -> Callable[[Mapping[str, object]], Problem | None]:
    for columns, read in READERS:
        if all(name in record for name in columns):
            return read
    raise EnvError(
        f"{where} has the columns {', '.join(map(str, record)) or '(none)'}; a row needs "
        f"problem and tests (DeepCoder), prompt, entry_point, test and canonical_solution "
        f"(HumanEval), or text, code and test_list (MBPP)"
    )


def assign_splits(problems: Iterable[Problem]) -> Mapping[Split, tuple[Problem, ...]]:
    """Each problem's split: the strictest that one of its rows has, else by the hash of its key."""
    rows: dict[str, list[Problem]] = {}
    for problem in problems:
        rows.setdefault(" ".join(problem.key.split()), []).append(problem)
    found: dict[Split, list[Problem]] = {split: [] for split in SPLIT_SEEDS}
    for key, same in rows.items():
        named = {problem.split for problem in same}
        strictest: list[Split] = [split for split in STRICTEST if split in named]
        found[strictest[0] if strictest else split_of_content(key)] += same
    return {split: tuple(members) for split, members in found.items()}


def _with_few_tests(problem: Problem, max_tests: int) -> Problem:
    """Keep the tests with the longest input, as DeepCoder does, in their order."""
    if len(problem.cases) <= max_tests:
        return problem
    order = sorted(range(len(problem.cases)), key=lambda i: -len(repr(problem.cases[i].given)))
    kept = sorted(order[:max_tests])
    return replace(problem, cases=tuple(problem.cases[i] for i in kept))
