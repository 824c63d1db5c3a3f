"""Rollout files, how they are read, and what is drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moored.analysis.sample import Draw, draw
from moored.errors import ConfigError
from moored.files.columns import several_rewards
from moored.files.formats import find_format, read_records, unclear_rewards
from moored.files.records import BadRow, ReadOptions, Record
from moored.files.tables import open_table

MOST_PROMPTS = 16
TELL_EVERY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """How much is drawn for each look."""

    num_prompts: int | None = None
    """N; None: as many as a look has, `MOST_PROMPTS` at most."""
    num_pairs: int = 64
    window: int | None = None
    """Stored steps in a look; None: as few as it takes to have enough prompts."""
    skip_bad: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_pairs < self.num_prompts:
            raise ConfigError(
                f"--pairs must be at least --prompts, got {self.num_pairs} and {self.num_prompts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Files, and the steps that they turned out to hold."""

    files: Sequence[Path]
    reading: ReadOptions
    drawing: DrawOptions
    steps: dict[Path, set[int | None]] = field(default_factory=dict)

    def draw(self, tell: Callable[[str], None] = lambda _: None) -> Draw:
        """Go through all files once; `tell` is called with the progress."""
        options = self.drawing
        drawn = draw(
            self._rows(tell),
            num_prompts=options.num_prompts or min(MOST_PROMPTS, options.num_pairs),
            num_pairs=options.num_pairs,
            skip_bad=options.skip_bad,
            seed=options.seed,
        )
        return drawn.pooled(options.window)

    def _rows(self, tell: Callable[[str], None]) -> Iterator[Record | BadRow]:
        num_rows = 0
        for file in self.files:
            steps = self.steps.setdefault(file, set())
            for row in read_records(file, self.reading):
                num_rows += 1
                if num_rows % TELL_EVERY == 0:
                    tell(f"reading {file.name}, {num_rows:,} rows")
                if isinstance(row, Record):
                    steps.add(row.step)
                yield row

    def tells_turns(self) -> bool:
        """True when all files have one row per turn."""
        names = (self.reading.reader or find_format(open_table(file)) for file in self.files)
        return all(name == "moored" for name in names)

    def warnings(self) -> list[str]:
        """What was not read although it is there."""
        unclear = unclear_rewards(self.files[0], self.reading)
        if not unclear:
            return []
        return [f"rewards are not shown: {self.files[0].name!r} {several_rewards(unclear)}"]

    def of_turn(self, turn: int, steps: Sequence[int]) -> RowSource:
        """Another turn, read only from the files that hold any of the steps, as one look."""
        wanted = set(steps) or {None}
        files = [file for file, held in self.steps.items() if held & wanted]
        return RowSource(
            files=files,
            reading=replace(self.reading, turn=turn),
            drawing=replace(self.drawing, window=max(len(steps), 1)),
        )
