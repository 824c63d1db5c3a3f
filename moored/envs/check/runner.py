"""`check_env`: does an environment keep the rules that training relies on?

It takes a class, a function that makes an environment, a registered name or `"module:Class"`, and
returns a `CheckReport`: one `Check` per rule, each saying what was wrong, what came, what to do.
The rules themselves are the functions of `moored.envs.check.rules`.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from moored.envs.base import check_available
from moored.envs.check.probe import NotApplicable, Subject
from moored.envs.check.rules import FIRST_RULES, RULES
from moored.envs.check.types import Broken
from moored.envs.mix import EnvSource, env_maker, source_name
from moored.envs.serving.wire import NoRoomError
from moored.envs.worker import START_LIMIT_S, Worker, WorkerLost, emit
from moored.errors import EnvError, MooredError, close_match_hint, describe_raised

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One rule and whether the environment keeps it."""

    name: str
    claim: str
    """The rule in one sentence."""
    status: Status
    detail: str
    """What was seen; after a failure, what to do."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks of one environment."""

    env: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True when nothing failed; skipped checks do not count."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def raise_if_failed(self) -> None:
        """Raise an `EnvError` that lists every failed check."""
        if not self.ok:
            lines = [f"{check.name}: {check.detail}" for check in self.failed]
            raise EnvError(f"{self.env} breaks the environment contract:\n  " + "\n  ".join(lines))

    def __str__(self) -> str:
        lines = [f"{check.status:8}{check.name:14}{check.detail}" for check in self.checks]
        return "\n".join([self.env, *lines])


def check_env(
    source: EnvSource,
    *,
    options: Mapping[str, object] | None = None,
    num_tasks: int = 8,
    num_episodes: int = 64,
    num_split_seeds: int = 200,
    max_observation_chars: int = 20_000,
    reply_limit_s: float = 0.05,
    call_limit_s: float = 60.0,
    in_child: bool = True,
    only: Collection[str] = tuple(RULES),
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Check every rule; a wrong name or option or a full server raises, a broken rule is reported.

    `num_episodes` is how often a stochastic task is played, at most, to see a success or noise;
    `num_split_seeds` how many tasks of each split are compared. The rules run in a child process,
    which is killed when one call takes over `call_limit_s`; a class it cannot find (of a script or
    notebook) is checked in this process, as is any with `in_child=False`, e.g. for a debugger.
    `only` names the checks to run; `progress` is called with the name of each before it runs.
    """
    for name, value in (("num_tasks", num_tasks), ("num_episodes", num_episodes)):
        if value < 1:
            raise EnvError(f"{name} must be at least 1, got {value}")
    for name in only:
        if name not in RULES:
            raise EnvError(f"there is no check {name!r}; {close_match_hint(name, RULES)}")
    subject = Subject(
        maker=env_maker(source, options or {}),
        num_tasks=num_tasks,
        num_episodes=num_episodes,
        num_split_seeds=num_split_seeds,
        max_observation_chars=max_observation_chars,
        reply_limit_s=reply_limit_s,
    )
    names = [name for name in RULES if name in only]
    checks: list[Check] = []
    for event in _events(subject, names, call_limit_s, in_child=in_child):
        if isinstance(event, Check):
            checks.append(event)
        elif progress is not None:
            progress(event)
    return CheckReport(source_name(source), tuple(checks))


def _events(
    subject: Subject, names: list[str], call_limit_s: float, *, in_child: bool
) -> Iterator[str | Check]:
    """The name of each rule before it runs, then its check; in a child where that can be."""
    finished: list[str] = []
    try:
        if in_child:
            for event in _watch_child(subject, names, call_limit_s):
                finished += [event.name] if isinstance(event, Check) else []
                yield event
            return
    except NotApplicable:
        pass  # reported by the rule "processes"
    except _ChildDied as death:
        broken, *others = (name for name in names if name not in finished)
        yield Check(broken, _claim(broken), "failed", str(death))
        yield from (_skipped(name, broken) for name in others)
        return
    yield from run_rules(subject, names)


class _ChildDied(Exception):
    """The watched child hung or ended; the message says during which call."""


def _watch_child(subject: Subject, names: list[str], call_limit_s: float) -> Iterator[str | Check]:
    """What `run_rules` yields in a child process, which says what it calls next.

    Raises what it raises, NotApplicable when the child cannot be handed the environment, and
    _ChildDied when one call took over `call_limit_s` or ended the process.
    """
    portable = dataclasses.replace(subject, maker=subject.portable_maker())
    worker = Worker(f"{__name__}:run_watched", is_quiet=False)
    last_call, limit_s = "starting the process", START_LIMIT_S
    try:
        for event in worker.watch(pickle.dumps((portable, names)), limit_s=call_limit_s):
            if isinstance(event, _Call):
                last_call, limit_s = event.text, call_limit_s
            else:
                yield event
    except WorkerLost as lost:
        if lost.is_late:
            raise _ChildDied(f"{last_call} had not returned after {limit_s:g} s") from None
        raise _ChildDied(f"{last_call} ended the process, {lost}") from None
    finally:
        worker.stop()


@dataclass(frozen=True, slots=True)
class _Call:
    """The call that the child makes next."""

    text: str


def run_watched(job: bytes) -> None:
    """In the child: hand over each call before it is made, and each event."""
    try:
        subject, names = pickle.loads(job)
    except Exception as error:
        raise NotApplicable(f"a fresh process cannot load this class: {error!r}") from error
    watched = dataclasses.replace(subject, announce=lambda call: emit(_Call(call)), is_watched=True)
    for event in run_rules(watched, names):
        emit(event)


def run_rules(subject: Subject, names: list[str]) -> Iterator[str | Check]:
    """Run the rules in order; after a broken one of FIRST_RULES the others are skipped."""
    try:
        _refuse_wrong_options(subject)
        yield from _run_in_order(subject, names)
    finally:
        subject.close_resources()


def _run_in_order(subject: Subject, names: list[str]) -> Iterator[str | Check]:
    blocker = ""
    for name in names:
        yield name
        if blocker:
            yield _skipped(name, blocker)
            continue
        status, detail = _run(RULES[name], subject)
        yield Check(name, _claim(name), status, detail)
        if status == "failed" and name in FIRST_RULES:
            blocker = name


def _refuse_wrong_options(subject: Subject) -> None:
    """Raise what the environment says about its options; the first rule reports other errors."""
    try:
        check_available(subject.make().env)
    except MooredError:
        raise
    except (Exception, SystemExit):
        return
    finally:
        subject.close_all()


def _run(rule: Callable[[Subject], str], subject: Subject) -> tuple[Status, str]:
    try:
        return "passed", rule(subject)
    except NotApplicable as note:
        return "skipped", str(note)
    except NoRoomError:  # says nothing about the environment
        raise
    except (Broken, MooredError) as problem:
        return "failed", str(problem)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not subject.is_watched:
            raise
        return "failed", describe_raised(error)
    finally:
        subject.close_all()


def _skipped(name: str, blocker: str) -> Check:
    return Check(name, _claim(name), "skipped", f"not run until {blocker!r} passes")


def _claim(name: str) -> str:
    return (RULES[name].__doc__ or "").strip().splitlines()[0]
