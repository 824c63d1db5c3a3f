"""The collapse monitor: what a training loop calls every few steps.

It takes ten lines in any training loop: make it with a `ScoreFn`, give it the groups of a step
before filtering, log what it returns, save its state with the checkpoint.

Environments are measured one by one. Pooled, one fixed text for each of two environments would
count as log 2 nats, because a text says which environment it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from moored.diagnostics.actions import state_action
from moored.diagnostics.alarm import Alarm
from moored.diagnostics.chain import CHAIN, reasoning_action
from moored.diagnostics.information import PERMUTATIONS, information
from moored.diagnostics.look import (
    POOLED,
    EnvironmentLook,
    LookBuilder,
    Measurement,
    share_unmeasured,
)
from moored.diagnostics.pairs import (
    PairSet,
    ScoreFn,
    cross_score,
    first_turn_pairs,
    trajectory_pairs,
    turn_position_pairs,
)
from moored.diagnostics.report import CollapseReport, Verdict
from moored.diagnostics.swap import (
    EPISODE_ROWS,
    SwapSet,
    episode_swap_pairs,
    observation_swap_pairs,
)
from moored.diagnostics.watch import CollapseWatch, Watched, reconciled
from moored.diagnostics.worth import worth_of
from moored.errors import MooredError, TooFewPromptsError
from moored.names import check_name
from moored.types import Group, ScoreMatrix

View = Literal["first_turn", "observation_swap", "episode_swap", "trajectory", "positions", "chain"]
DEFAULT_VIEWS: tuple[View, ...] = (
    "first_turn",
    "observation_swap",
    "episode_swap",
    "trajectory",
)
PREFIXES = {
    "episode_swap": "collapse_episode_swap_sample",
    "observation_swap": "collapse_observation_swap_sample",
    "first_turn": "collapse_first_turn_sample",
    "trajectory": "collapse_trajectory_sample",
}
"""Views that regime and alarm can follow, the most telling first, and the names of their metrics.

Episode swap asks of all turns whether reasoning uses what was observed, observation swap whether
it uses what is new; a single-turn environment has the first turn only; the dialogue before a turn
is the last resort.
"""
RESTS = "It rests on earlier observations: from turn 2 on it does not follow the newest."
POOLED_VIEWS: tuple[View, ...] = ("first_turn", "trajectory")
KEPT_VIEWS: tuple[View, ...] = ("first_turn", "observation_swap")
"""Views whose scores are handed out: N is fixed there, and small."""


@dataclass(slots=True, kw_only=True)
class CollapseMonitor:
    """Measures input dependence, follows regime and alarm of every environment over a run."""

    score: ScoreFn
    views: Sequence[View] = DEFAULT_VIEWS
    num_pairs: int = 64
    """Reasonings of each view and environment."""
    num_prompts: int | Mapping[str, int] | None = None
    """N of the first-turn view and of the swaps, for all environments or for each by name; fix it,
    so that curves can be compared."""
    bootstrap: int = 0
    permutations: int = PERMUTATIONS
    ema_decay: float = 0.9
    seed: int = 0
    chain_rollouts: int = 4
    """Trajectories per prompt in the chain view: it scores their square."""
    _watches: dict[str, dict[str, CollapseWatch]] = field(default_factory=dict)
    """By environment and view."""
    _followed: dict[str, str] = field(default_factory=dict)
    """Environment -> the view that gives its regime and alarm: the first of `PREFIXES` that could
    be measured when it first was. It never changes later, because two series must not be mixed."""

    def __post_init__(self) -> None:
        for view in self.views:
            check_name("view", view, get_args(View))
        for env in self.num_prompts if isinstance(self.num_prompts, Mapping) else ():
            self._watches[env] = {}

    @property
    def alarm(self) -> Alarm | None:
        """The first alarm of the run."""
        found = [self._watches[env][view].alarm for env, view in self._followed.items()]
        return min((alarm for alarm in found if alarm), key=lambda a: a.step, default=None)

    def measure(self, step: int, groups: Sequence[Group]) -> Measurement:
        """Measure all views of every environment on one step's groups."""
        for group in groups:
            self._watches.setdefault(group.env, {})
        environments = [env for env in self._watches if env != POOLED]
        look = LookBuilder(step=step, is_one=len(environments) == 1)
        look.count_replies("", groups)
        found = {}
        for env in environments:
            members = [group for group in groups if group.env == env]
            if members and not look.is_one:
                look.count_replies(f"{env}/", members)
            found[env] = self._measure_environment(env, members, look)
        if not look.is_one:
            self._measure_views(POOLED, groups, look)
        look.metrics["collapse/num_skipped_views"] = float(len(look.skipped))
        return Measurement(
            step=step,
            metrics=look.metrics,
            reports=look.reports,
            skipped=look.skipped,
            environments=found,
            scores=look.scores,
            pairs=look.pairs,
        )

    def _measure_environment(
        self, env: str, groups: Sequence[Group], look: LookBuilder
    ) -> EnvironmentLook:
        watched = self._measure_views(env, groups, look)
        if "chain" in self.views:
            self._measure_chain(env, groups, look)
        if env not in self._followed:
            first = next((view for view in PREFIXES if view in watched), None)
            self._followed |= {} if first is None else {env: first}
        view = self._followed.get(env)
        return EnvironmentLook(
            view=None if view is None else look.name(env, view),
            watched=reconciled(watched, view, look.notes.get(env, "")),
            share_unmeasured=share_unmeasured(groups),
        )

    def _measure_views(
        self, env: str, groups: Sequence[Group], look: LookBuilder
    ) -> dict[str, Watched]:
        """Measure and log the views of one environment; those that cannot be are named."""
        watched, tasks = {}, _tasks(groups)
        for view, draw in self._draws(env, groups, look.step).items():
            try:
                pairs = draw()
                logp_MN = cross_score(pairs, self.score)
                own = {tasks[pair.group_id] for pair in pairs.pairs}
                report = self._report(pairs, logp_MN, tasks, look.step)
                watched[view] = self._watch(env, view).update(look.step, report, prompts=own)
            except TooFewPromptsError as error:
                look.skipped[look.name(env, view)] = str(error)
                continue
            prefix = look.prefix(env, PREFIXES.get(view, f"collapse_{view}"))
            look.reports[look.name(env, view)] = watched[view].report
            if isinstance(pairs, SwapSet):
                look.metrics |= _by_turn(pairs, logp_MN, tasks, prefix)
                if view == "observation_swap" and (pairs.turns > 0).any():
                    later = _swap_report(pairs, logp_MN, tasks, pairs.turns > 0)
                    look.notes |= {env: RESTS} if later.verdict is Verdict.COLLAPSED else {}
                logp_MN, _ = pairs.split(logp_MN)
            if view in KEPT_VIEWS:
                look.scores[look.name(env, view)] = _score_matrix(pairs, logp_MN)
            look.metrics |= watched[view].report.metrics(prefix)
            if view == "first_turn":
                assert isinstance(pairs, PairSet)
                look.pairs[look.name(env, view)] = pairs
                worth = worth_of(pairs, logp_MN, _by_policy(pairs, groups))
                look.metrics |= worth.metrics(prefix) if worth else {}
            if isinstance(pairs, SwapSet):
                look.metrics[f"{prefix}/share_left_out"] = pairs.share_left_out
        return watched

    def _draws(
        self, env: str, groups: Sequence[Group], step: int
    ) -> dict[str, Callable[[], PairSet | SwapSet]]:
        """View name -> function that draws its pairs."""
        num_environments = len(self._watches.keys() - {POOLED})
        common = {"num_pairs": self.num_pairs, "seed": self._seed(step)}
        fixed = {"num_prompts": self._num_prompts(env), **common}
        views = [view for view in self.views if env != POOLED or view in POOLED_VIEWS]
        followed = self._followed.get(env, "")
        longest = max((t.num_turns for g in groups for t in g.trajectories), default=0)
        draws: dict[str, Callable[[], PairSet | SwapSet]] = {}
        if "first_turn" in views:
            draws["first_turn"] = lambda: first_turn_pairs(groups, **fixed)
        # Single-turn replies have only a first turn, for which these views are the same.
        is_wanted = longest > 1 or "first_turn" not in self.views
        if "observation_swap" in views and (is_wanted or followed == "observation_swap"):
            draws["observation_swap"] = lambda: observation_swap_pairs(groups, **fixed)
        if "episode_swap" in views and (is_wanted or followed == "episode_swap"):
            rows = min(self.num_pairs, EPISODE_ROWS)
            draws["episode_swap"] = lambda: episode_swap_pairs(
                groups, **{**fixed, "num_pairs": rows}
            )
        if "trajectory" in views:
            # Its cost is the square of its rows, so that several environments share them.
            rows = self.num_pairs if env == POOLED else max(2, self.num_pairs // num_environments)
            draws["trajectory"] = lambda: trajectory_pairs(groups, **{**common, "num_pairs": rows})
        for position in range(longest if "positions" in views else 0):
            draws[f"turn_{position + 1}"] = lambda position=position: turn_position_pairs(
                groups, position, **common
            )
        return draws

    def _num_prompts(self, env: str) -> int | None:
        fixed = self.num_prompts
        if not isinstance(fixed, Mapping):
            return fixed
        if env == POOLED:
            return min(sum(fixed.values()), self.num_pairs)
        if env not in fixed:
            raise MooredError(
                f"num_prompts has no entry for the environment {env!r}, only for "
                f"{', '.join(fixed)}; name every environment, or give one number for all"
            )
        return fixed[env]

    def _report(
        self,
        pairs: PairSet | SwapSet,
        logp: np.ndarray,
        tasks: Mapping[int, bytes],
        step: int,
    ) -> CollapseReport:
        if isinstance(pairs, SwapSet):
            draws = {"bootstrap": self.bootstrap, "permutations": self.permutations}
            every = np.ones(len(pairs.pairs), dtype=bool)
            return _swap_report(pairs, logp, tasks, every, **draws, seed=self._seed(step))
        return information(
            logp,
            pairs.columns,
            pairs.lengths,
            tasks=None if pairs.view == "first_turn" else _task_numbers(pairs, tasks)[0],
            bootstrap=self.bootstrap,
            permutations=self.permutations,
            seed=self._seed(step),
        )

    def _watch(self, env: str, view: str) -> CollapseWatch:
        watches = self._watches.setdefault(env, {})
        return watches.setdefault(view, CollapseWatch(ema_decay=self.ema_decay))

    def _measure_chain(self, env: str, groups: Sequence[Group], look: LookBuilder) -> None:
        """I(X;A) and I(Z;A|X) over all turns."""
        prefix = look.prefix(env, CHAIN)
        draws = {"permutations": self.permutations, "seed": self._seed(look.step)}
        try:
            acted = state_action(groups, **draws)
            look.metrics |= acted.metrics(f"{prefix}/state_action_mi")
            look.metrics[f"{prefix}/state_action_share_left_out"] = acted.share_left_out
        except TooFewPromptsError as error:
            look.skipped[look.name(env, "state_action")] = str(error)
        sizes = {"rollouts": self.chain_rollouts, "num_pairs": self.num_pairs}
        try:
            thought = reasoning_action(groups, self.score, **sizes, **draws)
            look.metrics |= thought.metrics(f"{prefix}/reasoning_action_mi")
        except TooFewPromptsError as error:
            look.skipped[look.name(env, "reasoning_action")] = str(error)

    def _seed(self, step: int) -> int:
        return int(np.random.SeedSequence([self.seed, step % (1 << 64)]).generate_state(1)[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain JSON."""
        watches = {
            env: {view: watch.state_dict() for view, watch in views.items()}
            for env, views in self._watches.items()
        }
        return {"watches": watches, "followed": dict(self._followed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watches = {env: {} for env in state["watches"]}
        for env, views in state["watches"].items():
            for view, saved in views.items():
                self._watch(env, view).load_state_dict(saved)
        self._followed = dict(state["followed"])


def _tasks(groups: Iterable[Group]) -> dict[int, bytes]:
    """Group id -> key of what its episodes began with: groups of one task have the same."""
    firsts = ((g, next((t.turns[0] for t in g.trajectories if t.turns), None)) for g in groups)
    return {group.group_id: turn.prompt.key for group, turn in firsts if turn is not None}


def _by_policy(pairs: PairSet, groups: Sequence[Group]) -> np.ndarray:
    """(M,) prompt and policy of each reasoning: replies of two policies are not compared."""
    members = {group.group_id: group.trajectories for group in groups}
    keys = [
        (column, members[pair.group_id][pair.trajectory].turns[pair.turn].policy_version)
        for column, pair in zip(pairs.columns.tolist(), pairs.pairs, strict=True)
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys])


def _score_matrix(pairs: PairSet | SwapSet, logp_MN: np.ndarray) -> ScoreMatrix:
    is_swap = isinstance(pairs, SwapSet)
    return ScoreMatrix(
        logp_MN=logp_MN / pairs.lengths[:, None],
        columns_M=pairs.columns,
        blocks_M=pairs.blocks if is_swap else np.zeros(len(pairs.columns), dtype=int),
    )


def _task_numbers(
    pairs: PairSet | SwapSet, tasks: Mapping[int, bytes]
) -> tuple[np.ndarray, dict[bytes, int]]:
    """(M,) task of each row, and the numbers of all tasks.

    Later turns of a task are more of the same: they do not count as further tasks.
    """
    number = {key: place for place, key in enumerate(sorted(set(tasks.values())))}
    return np.array([number[tasks[pair.group_id]] for pair in pairs.pairs]), number


def _swap_report(
    pairs: SwapSet,
    logp: np.ndarray,
    tasks: Mapping[int, bytes],
    rows_M: np.ndarray,
    *,
    bootstrap: int = 0,
    permutations: int = 0,
    seed: int = 0,
) -> CollapseReport:
    """Of some of the rows; `logp` holds all reasonings, then their controls."""
    logp_MN, control = pairs.split(logp)
    own_M, number = _task_numbers(pairs, tasks)
    return information(
        logp_MN[rows_M],
        pairs.columns[rows_M],
        pairs.lengths[rows_M],
        blocks=pairs.blocks[rows_M],
        tasks=own_M[rows_M],
        column_tasks=[[number[tasks[group]] for group in row] for row in pairs.owners],
        control=control.rows(rows_M),
        bootstrap=bootstrap,
        permutations=permutations,
        seed=seed,
    )


def _by_turn(
    pairs: SwapSet, logp: np.ndarray, tasks: Mapping[int, bytes], prefix: str
) -> dict[str, float]:
    """MI and retrieval of each turn number: collapse may begin after the first turn."""
    metrics = {}
    for turn in np.unique(pairs.turns).tolist():
        report = _swap_report(pairs, logp, tasks, pairs.turns == turn)
        for name in ("mi_estimate", "mi_seq_estimate", "retrieval_accuracy"):
            metrics[f"{prefix}/turn_{turn + 1}/{name}"] = getattr(report, name)
    return metrics
