"""What a report shows of stored rollouts: rewards by prompt, RV, and whole trajectories.

Only the columns that are shown are read, never token ids, so a file takes a fraction of the time
that `runlog.rollouts.read_groups` needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moored.algo.groups import cap_malformed, group, moments
from moored.analysis.excerpts import differing_parts
from moored.analysis.report import Article, Passage
from moored.errors import MooredError, RunLogError, require_packages
from moored.runlog.rollouts import read_rows

REWARD_COLUMNS = ("group_id", "env", "task_seed", "kept", "episode", "trajectory_reward")
REWARD_COLUMNS += ("success", "stop", "turn", "turn_reward", "turn_penalty", "is_valid")
TEXT_COLUMNS = (*REWARD_COLUMNS, "observation", "reply")
MOST_FILES = 24
"""Whose groups the histogram of RV counts, spread evenly over the run."""
MOST_PROMPTS = 64
"""In a heat map."""
MOST_CHARS = 1500
"""Of an observation or a reply."""
MOST_TURNS = 12
EACH_KIND = 2
"""Trajectories of each kind."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepGroups:
    """The groups of one stored step: P prompts, G trajectories each."""

    step: int
    labels: tuple[str, ...]
    """Environment and task of each group."""
    rewards_PG: np.ndarray
    """NaN after an error."""
    variance_P: np.ndarray
    """RV: variance, in each group, of the rewards that the filter goes by."""
    is_kept_P: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """All that a report needs of the stored rollouts of a run."""

    stages: Mapping[str, StepGroups]
    """Early, middle and late."""
    kept_variance: np.ndarray
    dropped_variance: np.ndarray
    num_files: int
    """Whose groups are in the two arrays."""
    trajectories: tuple[Article, ...]
    problems: tuple[str, ...] = ()
    """Files that cannot be read."""


def read_rollouts(run: Path, *, ddof: int = 0, reward: str = "task") -> Rollouts | None:
    """Read a run's stored rollouts; None when it stored none.

    `ddof` and `reward` are those of its filter.
    """
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    if not files:
        return None
    require_packages("rollouts", ["pyarrow"])
    chosen = _spread(files, MOST_FILES)
    read, problems = {}, []
    for file in chosen:
        try:
            read[file] = _step_groups(file, ddof, reward)
        except MooredError as error:
            problems.append(str(error))
    groups = list(read.values())
    return Rollouts(
        stages=_stages(groups),
        kept_variance=_joined([each.variance_P[each.is_kept_P] for each in groups]),
        dropped_variance=_joined([each.variance_P[~each.is_kept_P] for each in groups]),
        num_files=len(groups),
        trajectories=_pick_trajectories(list(read)),
        problems=tuple(problems),
    )


def _spread(files: Sequence[Path], most: int) -> list[Path]:
    """At most `most` of them, the first and the last included."""
    if len(files) <= most:
        return list(files)
    places = np.linspace(0, len(files) - 1, most).round().astype(int)
    return [files[place] for place in places]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *arrays])


def _stages(groups: Sequence[StepGroups]) -> dict[str, StepGroups]:
    if len(groups) < 3:
        return dict(zip(("early", "late"), groups, strict=False))
    return {"early": groups[0], "middle": groups[len(groups) // 2], "late": groups[-1]}


def _step_groups(file: Path, ddof: int, reward: str) -> StepGroups:
    labels, rewards, scored, is_kept = [], [], [], []
    for members in _groups(_rows(file, REWARD_COLUMNS)):
        episodes = list(_episodes(members))
        labels.append(f"{members[0]['env']}, task {members[0]['task_seed']}")
        is_kept.append(bool(members[0]["kept"]))
        rewards.append([_number(turns[0]["trajectory_reward"]) for turns in episodes])
        if reward == "success":
            is_known = np.isfinite(rewards[-1])
            won = [bool(turns[0]["success"]) for turns in episodes]
            scored.append(np.where(is_known, won, np.nan).tolist())
        else:
            scored.append(rewards[-1] if reward == "total" else _task_rewards(episodes))
    if not labels:
        raise RunLogError(f"{str(file)!r} holds no group")
    return StepGroups(
        step=_step(file),
        labels=tuple(labels),
        rewards_PG=_padded(rewards),
        variance_P=moments(group(_padded(scored))).variance(ddof),
        is_kept_P=np.array(is_kept),
    )


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[*row, *[np.nan] * (width - len(row))] for row in rows], dtype=float)


def _task_rewards(episodes: Sequence[Sequence[Row]]) -> Sequence[float]:
    """What `filter.reward=task` scores of the episodes of a group."""
    is_valid = [all(row["is_valid"] is not False for row in turns) for turns in episodes]
    return cap_malformed(
        np.array([_task_reward(turns) for turns in episodes]),
        np.array(is_valid),
        np.array([bool(turns[0]["success"]) for turns in episodes]),
    ).tolist()


def _task_reward(turns: Sequence[Row]) -> float:
    """Without penalties for malformed replies; NaN after an error."""
    if turns[0]["trajectory_reward"] is None:
        return float("nan")
    return sum((row["turn_reward"] or 0.0) - (row["turn_penalty"] or 0.0) for row in turns)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _pick_trajectories(files: Sequence[Path]) -> tuple[Article, ...]:
    """Some of each kind, from the last step that has any."""
    found: dict[str, list[Article]] = {}
    for file in [*reversed(files[-3:]), *files[:1]]:
        of_file = _of_kinds(file)
        for kind, shown in of_file.items():
            found.setdefault(kind, shown)
    order = ("succeeded", "highest reward", "failed", "lowest reward", "dropped by the filter")
    return tuple(shown for kind in order for shown in found.get(kind, ()))


def _of_kinds(file: Path) -> dict[str, list[Article]]:
    """The trajectories of a step to show, by kind; each from another group where possible."""
    groups = [list(_episodes(members)) for members in _groups(_rows(file, TEXT_COLUMNS))]
    seen = _first_observations(groups)
    episodes = [
        (place, turns)
        for place, members in enumerate(groups)
        for turns in members
        if _is_whole(turns)
    ]
    episodes.sort(key=lambda item: item[1][0]["episode"])  # one of each group, then the next
    kept = [item for item in episodes if item[1][0]["kept"]] or episodes
    chosen: dict[str, list[tuple[int, list[Row]]]] = {}
    if any(turns[0]["success"] is not None for _, turns in episodes):
        chosen["succeeded"] = [item for item in kept if item[1][0]["success"]]
        chosen["failed"] = [item for item in kept if not item[1][0]["success"]]
    else:
        ranked = sorted(kept, key=lambda item: -item[1][0]["trajectory_reward"])
        chosen["highest reward"], chosen["lowest reward"] = ranked[:1], ranked[1:][-1:]
    chosen["dropped by the filter"] = [item for item in episodes if not item[1][0]["kept"]]
    return {
        kind: [_shown(kind, _step(file), seen[place], turns) for place, turns in _some(items)]
        for kind, items in chosen.items()
        if items
    }


def _some(items: Sequence[tuple[int, list[Row]]]) -> list[tuple[int, list[Row]]]:
    """`EACH_KIND` of them, of different groups as far as there are any."""
    firsts = list({place: (place, turns) for place, turns in reversed(items)}.values())[::-1]
    others = [item for item in items if item not in firsts]
    return [*firsts, *others][:EACH_KIND]


def _is_whole(turns: Sequence[Row]) -> bool:
    """An episode that an error ended has no reward."""
    return turns[0]["turn"] is not None and turns[0]["trajectory_reward"] is not None


def _first_observations(groups: Sequence[Sequence[Sequence[Row]]]) -> list[str]:
    """What the model saw first in each group, from where the prompts of its environment differ."""
    firsts = [members[0][0] for members in groups]
    by_env: dict[str, list[int]] = {}
    for place, row in enumerate(firsts):
        by_env.setdefault(row["env"], []).append(place)
    shown = [""] * len(groups)
    for places in by_env.values():
        texts = differing_parts([firsts[place]["observation"] or "" for place in places])
        for place, text in zip(places, texts, strict=True):
            shown[place] = text
    return shown


def _shown(kind: str, step: int, first: str, turns: Sequence[Row]) -> Article:
    row = turns[0]
    label = f"{row['env']}, task {row['task_seed']}, episode {row['episode']}"
    stop = str(row["stop"]).replace("_", " ")
    return Article(
        title=kind.capitalize(),
        about=f"Step {step}, {label}: reward {row['trajectory_reward']:.4g}, {stop}",
        passages=tuple(
            Passage(
                f"Turn {number}: reward {turn['turn_reward'] or 0.0:.4g}"
                f"{'' if turn['is_valid'] else ', malformed'}",
                first if number == 1 else _cut(turn["observation"] or ""),
                _cut(turn["reply"] or ""),
            )
            for number, turn in enumerate(turns[:MOST_TURNS], start=1)
        ),
        more=f"and {len(turns) - MOST_TURNS} more turns" if len(turns) > MOST_TURNS else "",
    )


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} …"


def _rows(file: Path, columns: Sequence[str]) -> list[Row]:
    return [row for _, row in read_rows(file, columns)]


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for _, members in itertools.groupby(rows, lambda row: row["group_id"]):
        yield list(members)


def _episodes(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for _, turns in itertools.groupby(rows, lambda row: row["episode"]):
        yield list(turns)


def _step(file: Path) -> int:
    number = file.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else 0
