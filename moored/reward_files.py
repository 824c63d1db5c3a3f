"""Rewards by group from the rollout files of any trainer.

Reads moored's rollouts (Parquet), TRL's completions (Parquet), verl's rollouts (JSON lines), and
plain Parquet, JSON lines or CSV with a reward and a group or prompt. Files are read row by row and
only what a filter looks at is kept, a few dozen bytes a trajectory.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moored.errors import MooredError, close_match_hint
from moored.rollout_store import SCHEMA

REWARD_NAMES = ("reward", "score")
GROUP_NAMES = ("group", "group_id")
PROMPT_NAMES = ("prompt", "input")
RESPONSE_NAMES = ("completion", "response", "output", "action")
TRL_MARK = "advantage"
"""TRL names reward columns after the reward functions; this one tells its files."""
OWN_COLUMNS = ("schema", "step", "group_id", "episode", "turn", "trajectory_reward", "success")
OWN_TEXTS = ("observation", "reply")
EXCERPT_CHARS = 400
ROWS_IN_MEMORY = 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardGroups:
    """One entry a trajectory (M) or a group (P), in the order of the files."""

    rewards: np.ndarray
    """(M,) NaN where there is none."""
    group_of: np.ndarray
    """(M,) index of each trajectory's group."""
    steps: np.ndarray
    """(P,) step of each group; the number of its file where no step is given."""
    prompts: tuple[str, ...]
    """(P,) beginning of each prompt; empty where there is none."""
    success: np.ndarray | None
    behaviours: np.ndarray | None
    """(M,) hash of the answer (all answers of an episode); equal behaviours are equal numbers."""
    notes: tuple[str, ...] = ()
    """What was left out."""

    def at_step(self, step: int) -> RewardGroups:
        """The groups of one step."""
        chosen = np.flatnonzero(self.steps == step)
        if len(chosen) == 0:
            raise MooredError(
                f"there is no step {step}; there are {len(np.unique(self.steps))} steps from "
                f"{self.steps.min()} to {self.steps.max()}"
            )
        member = np.isin(self.group_of, chosen)
        return replace(
            self,
            rewards=self.rewards[member],
            group_of=np.searchsorted(chosen, self.group_of[member]),
            steps=self.steps[chosen],
            prompts=tuple(self.prompts[i] for i in chosen.tolist()),
            success=None if self.success is None else self.success[member],
            behaviours=None if self.behaviours is None else self.behaviours[member],
        )


def read_rewards(
    files: Sequence[str | Path],
    *,
    reward: Mapping[str, float] | None = None,
    group: str | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> RewardGroups:
    """Read files one after the other; `reward` names reward columns and their weights.

    Groups are told apart by file, step, and the `group` column or, without one, the prompt.
    `on_rows` is told now and then how many trajectories have been read.
    """
    seen = _Seen()
    for number, file in enumerate(map(Path, files), start=1):
        source = _open(file, seen.notes)
        columns = _find_columns(source, reward or {}, group)
        before = len(seen.rewards)
        for place, row in source.rows(columns.names):
            seen.add(number, columns, row, f"{file} {source.unit} {place}")
            if on_rows is not None and len(seen.rewards) % ROWS_IN_MEMORY == 0:
                on_rows(len(seen.rewards))
        if len(seen.rewards) == before:
            raise MooredError(f"{str(file)!r} holds no rows")
    return seen.finish()


@dataclass(frozen=True, slots=True)
class _Source:
    """A file whose column names are known and whose rows are yet to be read."""

    file: Path
    names: list[str]
    numeric: list[str]
    """Columns of numbers; in text files those of the first row."""
    unit: str
    rows: Callable[[Sequence[str]], Iterator[tuple[int, Mapping[str, Any]]]]
    """Wanted columns -> (line or row number, row)."""


@dataclass(frozen=True, slots=True)
class _Columns:
    reward: Mapping[str, float]
    group: str | None
    prompt: str | None
    response: str | None
    success: str | None
    step: str | None

    @property
    def names(self) -> list[str]:
        others = (self.group, self.prompt, self.response, self.success, self.step)
        return [*self.reward, *(name for name in others if name is not None)]


def _find_columns(source: _Source, reward: Mapping[str, float], group: str | None) -> _Columns:
    for name in (*reward, *([group] if group else [])):
        if name not in source.names:
            hint = close_match_hint(name, tuple(source.names))
            raise MooredError(f"{str(source.file)!r} has no column {name!r}; {hint}")
    found = _Columns(
        reward=reward or {_reward_column(source): 1.0},
        group=group or _first(GROUP_NAMES, source.names),
        prompt=_first(PROMPT_NAMES, source.names),
        response=_first(RESPONSE_NAMES, source.names),
        success=_first(("success",), source.names),
        step=_first(("step",), source.names),
    )
    if found.group is None and found.prompt is None:
        raise MooredError(
            f"{str(source.file)!r} has neither {_listed(GROUP_NAMES)} nor {_listed(PROMPT_NAMES)} "
            f"to tell groups by; it has {_listed(source.names)}: name one with --group"
        )
    return found


def _reward_column(source: _Source) -> str:
    name = _first(REWARD_NAMES, source.names)
    if name is not None:
        return name
    others = [n for n in source.numeric if n not in ("step", TRL_MARK, *GROUP_NAMES)]
    if TRL_MARK in source.names and len(others) == 1:
        return others[0]
    if TRL_MARK in source.names and others:
        flags = " ".join(f"--reward {name}" for name in others)
        raise MooredError(
            f"{str(source.file)!r} has several columns that may be rewards; name those that are "
            f"(they are added up; NAME=2 counts twice): {flags}"
        )
    raise MooredError(
        f"{str(source.file)!r} has no column {_listed(REWARD_NAMES)}; it has "
        f"{_listed(source.names)}: name the rewards with --reward"
    )


def _first(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) if len(names) <= 2 else ", ".join(names)


@dataclass(slots=True)
class _Seen:
    """What is kept of the rows read so far."""

    rewards: array[float] = field(default_factory=lambda: array("d"))
    group_of: array[int] = field(default_factory=lambda: array("q"))
    success: array[float] = field(default_factory=lambda: array("d"))
    behaviours: array[int] = field(default_factory=lambda: array("q"))
    index: dict[tuple[int, int, bytes], int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, number: int, columns: _Columns, row: Mapping[str, Any], where: str) -> None:
        step = number if columns.step is None else _step(row, columns.step, where)
        key = (number, step, _group_key(columns, row, where))
        group = self.index.setdefault(key, len(self.steps))
        if group == len(self.steps):
            self.steps.append(step)
            prompt = None if columns.prompt is None else row.get(columns.prompt)
            self.prompts.append(_text(prompt)[:EXCERPT_CHARS])
        self.group_of.append(group)
        self.rewards.append(_total(columns.reward, row, where))
        if columns.success is not None:
            self.success.append(_number(row, columns.success, where))
        if columns.response is not None:
            self.behaviours.append(hash(_answer(_text(row.get(columns.response)))))

    def finish(self) -> RewardGroups:
        rewards = np.array(self.rewards)
        missing = int(np.count_nonzero(~np.isfinite(rewards)))
        if missing == len(rewards):
            raise MooredError(f"none of the {missing} rewards is a finite number")
        if missing:
            self.notes.append(f"{missing} of {len(rewards)} rewards are missing and take no part")
        success = np.array(self.success)
        is_told = len(success) == len(rewards) and bool(np.isfinite(success).all())
        knows_behaviour = len(self.behaviours) == len(rewards)
        # Trainers sum rewards in float32 and store them as doubles; as float32 they are compared
        # with the rounding they have.
        single = rewards.astype(np.float32)
        is_single = np.array_equal(single.astype(np.float64), rewards, equal_nan=True)
        return RewardGroups(
            rewards=single if is_single else rewards,
            group_of=np.array(self.group_of),
            steps=np.array(self.steps),
            prompts=tuple(self.prompts),
            success=success if is_told else None,
            behaviours=np.array(self.behaviours) if knows_behaviour else None,
            notes=tuple(self.notes),
        )


def _group_key(columns: _Columns, row: Mapping[str, Any], where: str) -> bytes:
    """Short and the same for equal group ids, or equal prompts where there are none."""
    name = columns.group or columns.prompt
    value = None if name is None else row.get(name)
    if value is None or value == "":
        raise MooredError(f"{where}: {name} is missing, so its group is unknown")
    return hashlib.blake2b(str(value).encode(errors="replace"), digest_size=16).digest()


def _step(row: Mapping[str, Any], name: str, where: str) -> int:
    step = _number(row, name, where)
    if not step.is_integer():
        raise MooredError(f"{where}: {name} must be a whole number, got {row[name]!r:.60}")
    return int(step)


def _total(weights: Mapping[str, float], row: Mapping[str, Any], where: str) -> float:
    """Weighted sum of the rewards that are there; NaN when none is."""
    values = {name: _number(row, name, where) for name in weights}
    there = [weights[name] * value for name, value in values.items() if math.isfinite(value)]
    return math.fsum(there) if there else math.nan


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    if name not in row:
        raise MooredError(f"{where} has no {name!r}; every row needs it (null when unknown)")
    value = row[name]
    try:
        return math.nan if value is None or value == "" else float(value)
    except (TypeError, ValueError):
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return float(value.lower() == "true")
        raise MooredError(f"{where}: {name} must be a number, got {value!r:.60}") from None


def _text(value: Any) -> str:
    """The text of a string, of a message content, or of the messages that are not the system's."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping):
        return _text(value.get("content") or value.get("text"))
    if isinstance(value, Sequence):
        shown = [v for v in value if not (isinstance(v, Mapping) and v.get("role") == "system")]
        return "\n".join(_text(item) for item in shown or value)
    return str(value)


def _answer(text: str) -> str:
    """What stands between the last answer tags, or the whole text."""
    _, tag, after = text.rpartition("<answer>")
    return after.partition("</answer>")[0].strip() if tag else text.strip()


def _open(file: Path, notes: list[str]) -> _Source:
    """Choose a reader by the first bytes of the file."""
    try:
        with file.open("rb") as stream:
            head = stream.read(4096)
    except OSError as error:
        hint = "; give the files in it" if file.is_dir() else ""
        raise MooredError(f"cannot read {str(file)!r}: {error.strerror}{hint}") from error
    if head.startswith(b"PAR1"):
        return _open_parquet(file)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise MooredError(f"{str(file)!r} is empty")
    if start.startswith(b"["):
        raise MooredError(f"{str(file)!r} is one JSON array; write one object a line instead")
    return _open_jsonl(file, notes) if start.startswith(b"{") else _open_csv(file)


def _open_jsonl(file: Path, notes: list[str]) -> _Source:
    _, first = next(_json_lines(file, []), (0, {}))
    numeric = [k for k, v in first.items() if isinstance(v, int | float)]
    return _Source(file, list(first), numeric, "line", lambda _: _json_lines(file, notes))


def _json_lines(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects; a last line that was cut while it was written is left out."""
    with file.open("rb") as stream:
        for place, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                if place > 1 and not line.endswith(b"\n"):
                    notes.append(f"line {place} of {file}, the last one, is cut short: left out")
                    return
                raise MooredError(f"{file} line {place} is not whole JSON: {error}") from error
            if not isinstance(value, dict):
                raise MooredError(f"{file} line {place} must be an object, got {value!r:.60}")
            yield place, value


def _open_csv(file: Path) -> _Source:
    def rows(_: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            try:
                for row in reader:
                    # Fields that a cut line lacks come as None.
                    if None in row or None in row.values():
                        width = len(reader.fieldnames or ())
                        raise MooredError(
                            f"{file} line {reader.line_num} does not have {width} fields"
                        )
                    yield reader.line_num, row
            except (csv.Error, UnicodeDecodeError) as error:
                raise MooredError(f"{str(file)!r} is no readable CSV: {error}") from error

    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            names = next(csv.reader(stream))
    except (csv.Error, UnicodeDecodeError) as error:
        raise MooredError(f"{str(file)!r} is neither Parquet, JSON lines nor CSV") from error
    return _Source(file, names, [], "line", rows)


def _open_parquet(file: Path) -> _Source:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MooredError("Parquet files need pyarrow; run: pip install 'moored[data]'") from error
    try:
        schema = pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise MooredError(f"cannot read {str(file)!r}: {error}") from error
    if set(OWN_COLUMNS) <= set(schema.names):
        names = ["step", "group", "prompt", "response", "reward", "success"]
        return _Source(file, names, [], "row", lambda _: _own_episodes(file))
    is_number = (pa.types.is_integer, pa.types.is_floating)
    numeric = [f.name for f in schema if any(check(f.type) for check in is_number)]
    return _Source(file, schema.names, numeric, "row", lambda names: _parquet_rows(file, names))


def _parquet_rows(file: Path, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = 0
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=ROWS_IN_MEMORY, columns=list(names)):
                for row in batch.to_pylist():
                    place += 1
                    yield place, row
    except (OSError, pa.ArrowException) as error:
        raise MooredError(f"cannot read {str(file)!r}: {error}") from error


def _own_episodes(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """moored's own rollouts hold a row a turn: one row an episode, its answers joined."""
    rows = _parquet_rows(file, [*OWN_COLUMNS, *OWN_TEXTS])
    for _, turns in groupby(rows, lambda r: (r[1]["step"], r[1]["group_id"], r[1]["episode"])):
        (place, first), *later = turns
        if first["schema"] != SCHEMA:
            raise MooredError(
                f"{str(file)!r} has schema {first['schema']}, this version reads {SCHEMA}; read it "
                f"with the version that wrote it"
            )
        answers = [_answer(turn["reply"] or "") for turn in (first, *(row for _, row in later))]
        yield (
            place,
            {
                "step": first["step"],
                "group": first["group_id"],
                "prompt": first["observation"],
                "response": "\n".join(answers),
                "reward": first["trajectory_reward"],
                "success": first["success"],
            },
        )
