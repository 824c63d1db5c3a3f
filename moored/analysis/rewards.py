"""Rewards by group, from the rollout files of any trainer.

Files are read row by row, and only what a filter looks at is kept: a few dozen bytes for each
trajectory.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moored.algo.groups import cap_malformed
from moored.analysis.excerpts import Excerpts
from moored.errors import MooredError
from moored.files.formats import read_records
from moored.files.records import ReadOptions, Record, Skipped, usable
from moored.files.tables import expand
from moored.reply import find_answer

EXCERPT_CHARS = 400
"""Of a prompt, from where those of its environment differ."""
TELL_EVERY = 1024
DEFAULTS = ReadOptions()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RewardGroups:
    """One entry for each trajectory (M) or group (P), in the order of the files."""

    rewards: np.ndarray
    """(M,) NaN where there is none."""
    group_of: np.ndarray
    """(M,) index of each trajectory's group."""
    steps: np.ndarray
    """(P,) step of each group; the number of its file where no step is given."""
    prompts: tuple[str, ...]
    """(P,) each prompt from where prompts differ; empty where there is none."""
    earned: np.ndarray | None
    """(M,) rewards with the penalties that `rewards` leave out; None: they leave none out."""
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
            earned=None if self.earned is None else self.earned[member],
            success=None if self.success is None else self.success[member],
            behaviours=None if self.behaviours is None else self.behaviours[member],
        )


def read_rewards(
    paths: Sequence[str | Path],
    options: ReadOptions = DEFAULTS,
    *,
    skip_bad: bool = False,
    on_rows: Callable[[int], None] | None = None,
) -> RewardGroups:
    """Read files, and those of folders, one after the other.

    Groups are identified by file, step, and the group's column or, without one, the prompt.
    `on_rows` is called now and then with the number of trajectories read so far.
    """
    seen, skipped = _Seen(), Skipped()
    options = replace(options, only_rewards=True)
    for file_number, file in enumerate(expand(paths), start=1):
        for record in usable(read_records(file, options), skipped, skip_bad=skip_bad):
            seen.add(file_number, record)
            if on_rows is not None and len(seen.rewards) % TELL_EVERY == 0:
                on_rows(len(seen.rewards))
    seen.notes += [f"{where}, the last one, is cut short: left out" for where in skipped.torn]
    if skipped.num_bad:
        seen.notes.append(f"{skipped.num_bad} rows cannot be used and are left out")
    return seen.finish()


@dataclass(slots=True)
class _Seen:
    """What is kept of the trajectories read so far."""

    rewards: array[float] = field(default_factory=lambda: array("d"))
    group_of: array[int] = field(default_factory=lambda: array("q"))
    earned: array[float] = field(default_factory=lambda: array("d"))
    success: array[float] = field(default_factory=lambda: array("d"))
    is_valid: array[int] = field(default_factory=lambda: array("b"))
    behaviours: array[int] = field(default_factory=lambda: array("q"))
    index: dict[bytes, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    prompts: list[tuple[str | None, int]] = field(default_factory=list)
    """Environment of each group, and the number of its prompt among those of the environment."""
    excerpts: dict[str | None, Excerpts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, file_number: int, record: Record) -> None:
        step = file_number if record.step is None else record.step
        named = record.prompt if record.group is None else record.group
        key = f"{file_number} {step} {named}".encode(errors="surrogatepass")
        key = hashlib.blake2b(key, digest_size=16).digest()
        group = self.index.setdefault(key, len(self.steps))
        if group == len(self.steps):
            self.steps.append(step)
            excerpts = self.excerpts.setdefault(record.env, Excerpts(EXCERPT_CHARS))
            self.prompts.append((record.env, excerpts.add(_text(record.prompt))))
        self.group_of.append(group)
        self.rewards.append(record.reward)
        self.earned.append(record.earned)
        self.success.append(record.success)
        self.is_valid.append(record.is_valid)
        if record.response is not None:
            self.behaviours.append(hash(find_answer(_text(record.response))))

    def finish(self) -> RewardGroups:
        rewards = np.array(self.rewards)
        missing = int(np.count_nonzero(~np.isfinite(rewards)))
        if missing == len(rewards):
            raise MooredError(f"none of the {missing} rewards is a finite number")
        if missing:
            self.notes.append(f"{missing} of {len(rewards)} rewards are missing and take no part")
        success, earned = np.array(self.success), None
        if not all(self.is_valid):
            earned = np.array(self.earned)
            earned = np.where(np.isnan(earned), rewards, earned)
            rewards = self._without_penalties(rewards, success > 0.5)
        is_told = bool(np.isfinite(success).all())
        knows_behaviour = len(self.behaviours) == len(rewards)
        # Trainers sum rewards in float32 and store them as doubles; as float32 they are compared
        # with the rounding they have.
        single = rewards.astype(np.float32)
        is_single = np.array_equal(single.astype(np.float64), rewards, equal_nan=True)
        shown = {env: excerpts.finish() for env, excerpts in self.excerpts.items()}
        return RewardGroups(
            rewards=single if is_single else rewards,
            group_of=np.array(self.group_of),
            steps=np.array(self.steps),
            earned=earned,
            prompts=tuple(shown[env][number] for env, number in self.prompts),
            success=success if is_told else None,
            behaviours=np.array(self.behaviours) if knows_behaviour else None,
            notes=tuple(self.notes),
        )

    def _without_penalties(self, rewards: np.ndarray, success: np.ndarray) -> np.ndarray:
        """What the filter scores, group by group, where replies were malformed."""
        self.notes.append(
            "penalties for malformed replies are left out, as filter.reward=task does; --reward "
            "trajectory_reward takes all that was earned"
        )
        is_valid, group_of = np.array(self.is_valid, dtype=bool), np.array(self.group_of)
        found = rewards.copy()
        order = np.argsort(group_of, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(group_of[order])) + 1):
            found[members] = cap_malformed(rewards[members], is_valid[members], success[members])
        return found


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
