"""What training measured, read back from `collapse.jsonl`: the run's own looks and alarms.

Nothing is scored again, so the diagnosis of a run says what the run said, and needs no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from moored.algo.snr import FIRST_STEPS
from moored.analysis.diagnosis import Diagnosis, Look, RewardStats, Series, TurnLook, label_of
from moored.analysis.models import read_run_config
from moored.diagnostics.alarm import Alarm
from moored.diagnostics.chain import CHAIN, LINKS, Link
from moored.diagnostics.monitor import PREFIXES
from moored.diagnostics.report import CollapseReport, Interval, Regime, Verdict
from moored.diagnostics.watch import CollapseWatch, Watched
from moored.diagnostics.worth import Worth
from moored.errors import MooredError, RunLogError
from moored.files.tables import check_stores_rollouts
from moored.runlog.log import read_records


def has_looks(run: Path) -> bool:
    """True when training measured anything."""
    return any(record.get("reports") for record in read_records(run, "collapse"))


def why_no_looks(run: Path) -> str:
    """Why training measured nothing; raises where there is nothing to score either."""
    check_stores_rollouts(run)
    records = read_records(run, "collapse")
    if not records:
        return "training measured nothing (collapse.every=0)"
    return f"training could measure none of its {len(records)} looks ({_first_reason(records)})"


def followed_views(run: Path) -> set[str]:
    """The views that training judged its environments by."""
    entries = (
        entry
        for record in read_records(run, "collapse")
        for entry in record.get("environments", {}).values()  # pyright: ignore
    )
    return {entry["view"].rpartition("/")[2] for entry in entries if entry["view"]}


def read_diagnosis(run: Path) -> Diagnosis:
    """The looks of a run directory, with the verdicts and alarms that training gave."""
    config = read_run_config(run)
    records = read_records(run, "collapse")
    steps = read_records(run)
    rewards = {record["step"]: _rewards(record) for record in steps}
    where = str(run / "collapse.jsonl")
    found: dict[str, SeriesReader] = {}
    for record in records:
        environments = _part(record, "environments", where)
        for env, entry in environments.items():
            if env not in found:
                is_one = len(environments) == 1
                found[env] = SeriesReader(env, is_one, config.collapse.ema_decay, where)
            reward = rewards.get(record["step"]) if len(environments) == 1 else None
            found[env].add(record, entry, reward)
    series = tuple(reader.finish() for reader in found.values() if reader.looks)
    if not series:
        raise MooredError(
            f"none of the {len(records)} looks in {where!r} has a verdict: "
            f"{_first_reason(records)}; score the rollouts afresh: --rescore"
        )
    unmeasured = {
        env: next(iter(reader.skipped.values()))
        for env, reader in found.items()
        if not reader.looks
    }
    return Diagnosis(
        series=series,
        unmeasured=unmeasured,
        source="measured by training (collapse.jsonl)",
        temperature=config.rollout.temperature,
        outcome_free_share=early_share(steps),
        divides_by_std=config.algorithm.divides_by_std,
    )


def early_share(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean outcome-free share of the first steps that trained on anything; None where none did."""
    shares = [record.get("signal/outcome_free_share") for record in steps]
    known = [share for share in shares if share is not None][:FIRST_STEPS]
    return fmean(known) if known else None


@dataclass(slots=True)
class SeriesReader:
    """Gathers the looks of one environment."""

    env: str
    is_one: bool
    """The run has one environment, whose views have no prefix."""
    ema_decay: float
    where: str
    looks: list[Look] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    others: dict[str, list[Look]] = field(default_factory=dict)
    turns: dict[int, CollapseReport] = field(default_factory=dict)
    """Of the last look."""
    links: dict[str, list[tuple[int, Link]]] = field(default_factory=dict)
    view: str = ""
    unmeasured_since: int | None = None
    alarm: Alarm | None = None
    _watch: CollapseWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = CollapseWatch(ema_decay=self.ema_decay)

    def add(
        self,
        record: Mapping[str, Any],
        entry: Mapping[str, Any],
        rewards: RewardStats | None,
        **facts: Any,
    ) -> bool:
        """Take in a look, and say whether it was measured; `facts` are further fields of it."""
        step, followed = record["step"], entry["view"]
        facts = {"steps": (step,), **facts}
        for name, link in read_links(record, None if self.is_one else self.env).items():
            self.links.setdefault(name, []).append((step, link))
        reports = {
            name: read_report(stored, f"{self.where!r}, step {step}")
            for name, stored in record["reports"].items()
            if self.is_one or self._is_mine(name)
        }
        if followed not in reports:
            self.skipped[label_of(facts["steps"])] = self._reason(record["skipped"], followed)
            self.unmeasured_since = self.unmeasured_since or step
            return False
        self.unmeasured_since = None
        worths = {"first_turn": read_worth(record, None if self.is_one else self.env)}
        self.view = self._short(followed)
        missing = entry.get("share_unmeasured")
        self.looks.append(
            Look(
                watched=_judged(self._watch.update(step, reports[followed]), entry),
                valid_thinking_rate=None if missing is None else 1.0 - missing,
                rewards=rewards,
                worth=worths.get(self.view),
                **facts,
            )
        )
        if entry["alarm"] is not None and self.alarm is None:
            self.alarm = _read_alarm(entry["alarm"], f"{self.where!r}, step {step}")
        self._add_others({n: r for n, r in reports.items() if n != followed}, worths, facts)
        return True

    def _reason(self, reasons: Mapping[str, str], followed: str | None) -> str:
        """Why the view that the verdict follows, or any of this environment, was not measured."""
        own = [why for name, why in reasons.items() if self.is_one or self._is_mine(name)]
        return reasons.get(followed or "") or next(iter(own), "the reason is not logged")

    def _is_mine(self, name: str) -> bool:
        return name.startswith(f"{self.env}/")

    def _add_others(
        self,
        reports: Mapping[str, CollapseReport],
        worths: Mapping[str, Worth | None],
        facts: Mapping[str, Any],
    ) -> None:
        self.turns = {}
        for name, report in reports.items():
            view = self._short(name)
            if view.startswith("turn_"):
                self.turns[int(view.removeprefix("turn_"))] = report
                continue
            look = Look(watched=_alone(report), worth=worths.get(view), **facts)
            self.others.setdefault(view, []).append(look)

    def _short(self, name: str) -> str:
        return name if self.is_one else name.removeprefix(f"{self.env}/")

    def finish(self) -> Series:
        return Series(
            env=self.env,
            view=self.view,
            looks=tuple(self.looks),
            alarm=self.alarm,
            skipped=self.skipped,
            turns=tuple(TurnLook(turn=t, report=r) for t, r in sorted(self.turns.items())),
            others={view: tuple(looks) for view, looks in self.others.items()},
            links={name: tuple(found) for name, found in self.links.items()},
            unmeasured_since=self.unmeasured_since,
        )


def read_worth(record: Mapping[str, Any], env: str | None) -> Worth | None:
    """What dependence earns at a look, in one environment of several or in the only one."""
    prefix = PREFIXES["first_turn"]
    return Worth.from_log(record, prefix if env is None else f"{prefix}/{env}")


def read_links(record: Mapping[str, Any], env: str | None) -> dict[str, Link]:
    """The rest of the chain at a look, in one environment of several or in the only one."""
    prefix = CHAIN if env is None else f"{CHAIN}/{env}"
    found = {name: Link.from_log(record, f"{prefix}/{name}") for name in LINKS}
    return {name: link for name, link in found.items() if link is not None}


def _judged(watched: Watched, entry: Mapping[str, Any]) -> Watched:
    """What training said of a look, where it wrote it down."""
    if entry.get("verdict") is None:
        return watched
    regime = entry["regime"]
    return replace(
        watched,
        verdict=Verdict(entry["verdict"]),
        why=entry["why"],
        prompts_needed=entry["prompts_needed"],
        regime=None if regime is None else Regime(regime),
    )


def _read_alarm(stored: Mapping[str, Any], where: str) -> Alarm:
    missing = [each.name for each in fields(Alarm) if each.name not in stored]
    if missing:
        raise RunLogError(
            f"the alarm in {where} has no {missing[0]!r}: another version of moored wrote it; "
            f"score the rollouts afresh: --rescore"
        )
    known: dict[str, Any] = {each.name: stored[each.name] for each in fields(Alarm)}
    known["kind"] = Regime(stored["kind"])
    return Alarm(**known)


def _alone(report: CollapseReport) -> Watched:
    """A report that is judged by itself."""
    return Watched(
        report=report,
        verdict=report.verdict,
        why=report.why,
        prompts_needed=None,
        regime=report.regime,
        alarm=None,
    )


def _rewards(record: Mapping[str, Any]) -> RewardStats | None:
    mean, variance = record.get("rollout/reward_mean"), record.get("rollout/reward_variance_mean")
    if mean is None:
        return None
    return RewardStats(
        mean=mean,
        std_in_group=None if variance is None else variance**0.5,
        zero_spread_share=None,
        num_groups=int(record.get("filter/num_groups") or 0),
    )


def _part(record: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    if name not in record:
        raise RunLogError(
            f"{where!r} names no {name}: another version of moored wrote it; score the rollouts "
            f"afresh: --rescore"
        )
    return record[name]


def _first_reason(records: Sequence[Mapping[str, Any]]) -> str:
    """Why no view was measured that a verdict follows."""
    skipped = (pair for record in records for pair in record["skipped"].items())
    reasons = (why for name, why in skipped if name.rpartition("/")[2] in PREFIXES)
    return next(reasons, f"collapse.views has none of {', '.join(PREFIXES)}")


def read_report(stored: Mapping[str, Any], where: str) -> CollapseReport:
    """A report from its `to_dict`."""
    names = {each.name for each in fields(CollapseReport)}
    needed = [
        each.name
        for each in fields(CollapseReport)
        if each.default is MISSING and each.default_factory is MISSING
    ]
    missing = [name for name in needed if stored.get(name) is None]
    if missing:
        raise RunLogError(
            f"{where} has no {missing[0]!r}: another version of moored wrote it; score the "
            f"rollouts afresh: --rescore"
        )
    known = {name: value for name, value in stored.items() if name in names}
    regime = stored.get("regime")
    return CollapseReport(
        **known
        | {
            "retrieval_at": {int(k): value for k, value in stored["retrieval_at"].items()},
            "intervals": {k: Interval(**v) for k, v in stored.get("intervals", {}).items()},
            "verdict": Verdict(stored.get("verdict", Verdict.CANNOT_TELL)),
            "regime": None if regime is None else Regime(regime),
        }
    )
