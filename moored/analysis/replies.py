"""What runs wrote about the same tasks at their start, middle and end, from stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moored.analysis.excerpts import differing_parts
from moored.errors import MooredError
from moored.runlog.rollouts import read_groups
from moored.types import Group, content_text


@dataclass(frozen=True, slots=True)
class TaskReplies:
    """One task at one step: what the model saw, and the first reply of every run."""

    step: int
    seen: str
    replies: tuple[str, ...]


def shared_replies(runs: Sequence[Path], *, num_tasks: int = 2) -> list[TaskReplies]:
    """Replies to tasks that all runs met, at the first, the middle and the last stored step.

    Runs with the same seed and environments meet the same tasks at the same steps.
    """
    files = [_files_by_step(run) for run in runs]
    steps = sorted(set.intersection(*(set(of_run) for of_run in files)))
    if not steps:
        raise MooredError(
            f"{len(runs)} runs have no step whose rollouts are stored in all of them; set the same "
            f"log.rollouts_every (10 by default)"
        )
    found: list[TaskReplies] = []
    for step in dict.fromkeys([steps[0], steps[len(steps) // 2], steps[-1]]):
        groups = [_by_task(read_groups(of_run[step])) for of_run in files]
        found += _replies_of_step(step, groups, num_tasks)
    if not found:
        raise MooredError("the runs met no task in common; give runs with the same seed")
    return found


def _replies_of_step(
    step: int, groups: Sequence[Mapping[tuple[str, int], Group]], num_tasks: int
) -> list[TaskReplies]:
    shared = [task for task in groups[0] if all(task in others for others in groups)]
    turns = [
        [of_run[task].trajectories[0].turns[0] for of_run in groups] for task in shared[:num_tasks]
    ]
    seen = _differing_lines([content_text(of_task[0].seen) for of_task in turns])
    return [
        TaskReplies(step, text, tuple(turn.reply for turn in of_task))
        for text, of_task in zip(seen, turns, strict=True)
    ]


def _files_by_step(run: Path) -> dict[int, Path]:
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    return {int(file.stem.removeprefix("step_")): file for file in files}


def _by_task(groups: Sequence[Group]) -> dict[tuple[str, int], Group]:
    """Groups whose first episode has a turn, by environment and task."""
    return {
        (group.env, group.task_seed): group
        for group in groups
        if group.trajectories and group.trajectories[0].turns
    }


def _differing_lines(texts: Sequence[str]) -> list[str]:
    """Texts from where they differ, without the lines in which all of them end."""
    lines = [text.split("\n") for text in differing_parts(texts)]
    if len(texts) > 1:
        while all(lines) and len({of_text[-1] for of_text in lines}) == 1:
            lines = [of_text[:-1] for of_text in lines]
    return ["\n".join(of_text) for of_text in lines]
