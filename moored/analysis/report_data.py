"""One run directory, read for a report: what can be read, and what is wrong with the rest.

Only a run without a single finished step is refused; any other part that is missing or damaged is
named in `problems`, and the report goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moored.analysis.compare import OptionChange, look_values, read_changes
from moored.analysis.diagnosis import Diagnosis, Series
from moored.analysis.figures import ENTROPY
from moored.analysis.report_rollouts import Rollouts, read_rollouts
from moored.analysis.stored import read_diagnosis, read_links, read_worth
from moored.config_text import read_yaml
from moored.errors import MooredError, RunLogError
from moored.runlog.log import read_records, step_of_file
from moored.runlog.scores import read_scores, stored_scores
from moored.types import ScoreMatrix

Points = tuple[list[int], list[float]]
"""Steps, and a number at each."""
STEP_CURVES = {
    "training loss": "train/loss",
    "held-out loss": "evaluation/loss",
    "success": "rollout/success_rate",
    "validation success": "evaluation/success_rate",
    "reward": "rollout/reward_mean",
    "reply tokens": "rollout/reply_tokens_mean",
    "well-formed replies": "rollout/validity_rate",
    "well-formed turns": "rollout/valid_turn_reward_mean",
    "malformed turns": "rollout/malformed_turn_reward_mean",
    "kept groups": "filter/kept_fraction",
    "reward variance": "rollout/reward_variance_mean",
    "outcome-free share": "signal/outcome_free_share",
}
"""Name of a curve -> its key in metrics.jsonl."""
WORTH = "worth"
WORTH_CAPTION = (
    "Inside prompts: above 0 where replies whose reasoning depends more on their prompt earn more."
)
"""Of the correlation of gain and reward: its curve, and what stands at its figure."""
OUTCOME_FREE_CAPTION = (
    "The part of each update's push, |advantage| times tokens, that lies in groups whose "
    "trajectories all succeeded or all failed. Above the line it is most of it."
)
CHAIN_CURVES = {
    "task and action": ("state_action_mi", "Task and action, I(X;A)"),
    "reasoning and action": ("reasoning_action_mi", "Reasoning and action, I(Z;A|X)"),
}
"""Name of a curve -> its name in the log, and the title of its figure."""
CHAIN_CAPTION = (
    "Minus what chance gives: I(X;A) says whether actions depend on the task, I(Z;A|X) whether "
    "reasoning controls them."
)
OUTCOME_FREE = "outcome-free share"
FIGURES = {
    "training loss": ("Training loss", "nats per reply token"),
    "held-out loss": ("Held-out loss", "nats per reply token"),
    "success": ("Success", "share"),
    "validation success": ("Validation success", "share"),
    "reward": ("Reward", "mean over trajectories"),
    "retrieval": ("Retrieval of the prompt", "share"),
    "MI": ("MI of reasoning and prompt", "nats per token"),
    "H(Z|X)": ("Conditional entropy H(Z|X)", ENTROPY),
    WORTH: ("Dependence and reward", "correlation"),
    **{name: (title, "nats beyond chance") for name, (_, title) in CHAIN_CURVES.items()},
    "reply tokens": ("Length of replies", "tokens"),
    "well-formed replies": ("Well-formed replies", "share"),
    "well-formed turns": ("Reward of a well-formed turn", "mean over turns"),
    "malformed turns": ("Reward of a malformed turn", "mean over turns"),
    "kept groups": ("Kept by the filter", "share of groups"),
    "groups without variance": ("Groups without variance", "share of groups"),
    "reward variance": ("Reward variance in a group", "mean over groups"),
    OUTCOME_FREE: ("Outcome-free share", "share of the push"),
    "seconds": ("Time of a step", "seconds"),
}
"""Name of a curve -> title and axis of its figure, in order."""
TOTAL = "step_s"
"""Key of a record that holds the whole step, in the log of a warm start."""
THE_REST = "the rest"
"""Phase of what is left of a total; in a warm start mostly the evaluation."""
MOST_POINTS = 500
"""Of a curve; longer ones are averaged down, since a screen shows no more."""
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunData:
    """All that a report shows of one run."""

    path: Path
    steps: Sequence[Mapping[str, Any]]
    timing: Sequence[Mapping[str, Any]]
    diagnosis: Diagnosis | None
    """None when training measured nothing."""
    scores: Mapping[int, Mapping[str, ScoreMatrix]]
    """Step -> view -> matrix, of the first stored look and of the last."""
    rollouts: Rollouts | None
    gradients: Sequence[Mapping[str, Any]]
    """Measurements of `gradients.jsonl`, oldest first."""
    starts: Sequence[Mapping[str, Any]]
    """Records of `starts.jsonl`: command, versions and machine of every start."""
    changes: Sequence[OptionChange]
    """Options that were changed when the run was resumed."""
    options: Mapping[str, Any]
    """config.yaml, the last values; empty when it cannot be read."""
    config_text: str
    problems: tuple[str, ...]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"]

    @property
    def num_steps(self) -> int | None:
        """As many as the run was to have."""
        found = self.options.get("num_steps")
        return found if isinstance(found, int) else None

    @property
    def series(self) -> tuple[Series, ...]:
        return self.diagnosis.series if self.diagnosis is not None else ()

    @property
    def alarm_step(self) -> int | None:
        """The first alarm of any environment."""
        return min(
            (each.alarm.step for each in self.series if each.alarm is not None), default=None
        )


def read_run(path: Path) -> RunData:
    """Everything; damaged parts become `problems`."""
    steps = read_records(path)
    if not steps:
        raise RunLogError(f"{str(path)!r} has no finished step; there is nothing to show yet")
    problems: list[str] = []
    options = _attempt(problems, lambda: read_yaml(path / "config.yaml"), {})
    rollouts = _attempt(problems, lambda: read_rollouts(path, **_scoring(options)), None)
    if rollouts is not None:
        problems += rollouts.problems
    return RunData(
        path=path,
        steps=steps,
        timing=_attempt(problems, lambda: read_records(path, "timing"), []),
        diagnosis=_attempt(problems, lambda: _diagnosis(path), None),
        scores=_attempt(problems, lambda: _scores(path), {}),
        rollouts=rollouts,
        gradients=_attempt(problems, lambda: _gradients(path), []),
        changes=_attempt(problems, lambda: read_changes(path), []),
        starts=_attempt(problems, lambda: read_records(path, "starts"), []),
        options=options,
        config_text=(path / "config.yaml").read_text(encoding="utf-8") if options else "",
        problems=tuple(dict.fromkeys(problems)),
    )


def _scores(path: Path) -> dict[int, dict[str, ScoreMatrix]]:
    files = stored_scores(path)
    return {
        step_of_file(file): read_scores(file) for file in dict.fromkeys([*files[:1], *files[-1:]])
    }


def step_curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """The curves of metrics.jsonl that have a number anywhere."""
    found = {name: points(steps, key) for name, key in STEP_CURVES.items()}
    found["groups without variance"] = _zero_share(steps)
    return {name: curve for name, curve in found.items() if curve[0]}


def look_curves(looks: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """MI, H(Z|X) and retrieval of the view that verdicts rest on; worth, and the chain."""
    found: dict[str, Points] = {}
    for look in looks:
        values = {name: values[0] for name, values in look_values([look]).items()}
        for name, value in (values | _worths(look) | _chain(look)).items():
            steps, numbers = found.setdefault(name, ([], []))
            steps.append(look["step"])
            numbers.append(value)
    return found


def _worths(look: Mapping[str, Any]) -> dict[str, float]:
    """What dependence earns in each environment, named as in `look_values`."""
    found = {f"{WORTH}{end}": read_worth(look, env) for end, env in _environments(look).items()}
    return {name: worth.correlation for name, worth in found.items() if worth is not None}


def _chain(look: Mapping[str, Any]) -> dict[str, float]:
    """I(X;A) and I(Z;A|X) of a look, by curve; the environment is part of the name."""
    return {
        f"{name}{end}": links[logged].mi_nats
        for end, env in _environments(look).items()
        for name, (logged, _) in CHAIN_CURVES.items()
        if logged in (links := read_links(look, env))
    }


def _environments(look: Mapping[str, Any]) -> dict[str, str | None]:
    """How a curve of an environment ends, and what the log calls it; a single one has no name."""
    envs = look.get("environments", ())
    return {f", {env}": env for env in envs} if len(envs) > 1 else {"": None}


def phase_seconds(timing: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each phase, one number for each record; 0 where a step had no such phase.

    Where the whole step was measured too, what its phases leave of it is a phase of its own.
    """
    keys = dict.fromkeys(key for record in timing for key in record if key.endswith("_s"))
    has_total = keys.pop(TOTAL, TOTAL) is None
    seconds = {
        key.removesuffix("_s").replace("_", " "): [_or_zero(record.get(key)) for record in timing]
        for key in keys
    }
    if has_total:
        known = [math.fsum(_or_zero(record.get(key)) for key in keys) for record in timing]
        totals = [_or_zero(record.get(TOTAL)) for record in timing]
        rest = [max(total - part, 0.0) for total, part in zip(totals, known, strict=True)]
        seconds[THE_REST] = rest
    return seconds


def points(records: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Where a key has a number, and which."""
    known = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    return [step for step, _ in known], [float(value) for _, value in known]


def thinned(
    x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points, each the mean of as many neighbours; a short curve as it is."""
    if len(x) <= most:
        return list(x), list(y)
    size = math.ceil(len(x) / most)
    starts = np.arange(0, len(x), size)
    counts = np.diff(np.append(starts, len(x)))
    middle = [x[int(s + (n - 1) // 2)] for s, n in zip(starts, counts, strict=True)]
    return middle, (np.add.reduceat(np.asarray(y, dtype=float), starts) / counts).tolist()


def smoothed(y: Sequence[float], window: int) -> list[float]:
    """Running mean over `window` neighbours around each, fewer at the ends.

    Of an even number, one more lies behind than before.
    """
    values = np.asarray(y, dtype=float)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low = np.maximum(places - window // 2, 0)
    high = np.minimum(places + (window + 1) // 2, len(values))
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def _zero_share(steps: Sequence[Mapping[str, Any]]) -> Points:
    known = [
        (record["step"], record["filter/num_zero"] / record["filter/num_groups"])
        for record in steps
        if record.get("filter/num_zero") is not None and record.get("filter/num_groups")
    ]
    return [step for step, _ in known], [share for _, share in known]


def _or_zero(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _attempt(problems: list[str], read: Callable[[], Found], otherwise: Found) -> Found:
    try:
        return read()
    except (MooredError, OSError) as error:
        problems.append(str(error))
        return otherwise


def _diagnosis(path: Path) -> Diagnosis | None:
    return read_diagnosis(path) if read_records(path, "collapse") else None


def _scoring(options: Mapping[str, Any]) -> dict[str, Any]:
    """How the filter of the run scores rewards."""
    found = options.get("filter")
    chosen = found if isinstance(found, Mapping) else {}
    ddof = 1 if chosen.get("ddof") == 1 else 0
    return {"ddof": ddof, "reward": str(chosen.get("reward", "task"))}


def _gradients(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_records(path, "gradients")
    for record in found:
        if not isinstance(record.get("buckets"), list):
            raise RunLogError(
                f"{str(path / 'gradients.jsonl')!r} has no buckets at step {record['step']}"
            )
    return sorted(found, key=lambda record: record["step"])
