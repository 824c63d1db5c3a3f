"""`check_env`: does an environment keep the rules that training relies on?

In goes a class, a function that makes an environment, a registered name or `"module:Class"`; out
comes a `CheckReport`, one `Check` a rule, each saying what was wrong, what came, what to do.
The rules themselves are the functions of `moored.envs.check_rules`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from moored.envs.check_probe import Broken, NotApplicable, Subject
from moored.envs.check_rules import FIRST_RULES, RULES
from moored.envs.mix import EnvSource, env_maker, source_name
from moored.errors import EnvError, MooredError, close_match_hint

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
    only: Collection[str] = tuple(RULES),
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Check every rule; a wrong name or option raises, a broken rule is reported.

    `num_episodes` is how often the oracle may try a stochastic task, `num_split_seeds` how many
    tasks of each split are compared. `only` names the checks to run; `progress` is told the name
    of each before it runs.
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
    subject.make()  # a wrong option value raises here, as a wrong option name did above
    subject.close_all()
    checks: list[Check] = []
    blocker = ""
    for name, rule in RULES.items():
        if name not in only:
            continue
        if progress is not None:
            progress(name)
        status, detail = _run(rule, subject) if not blocker else ("skipped", blocker)
        checks.append(Check(name, _claim(rule), status, detail))
        if status == "failed" and name in FIRST_RULES:
            blocker = f"not run until {name!r} passes"
    return CheckReport(source_name(source), tuple(checks))


def _run(rule: Callable[[Subject], str], subject: Subject) -> tuple[Status, str]:
    try:
        return "passed", rule(subject)
    except NotApplicable as note:
        return "skipped", str(note)
    except Broken as problem:
        return "failed", str(problem)
    except MooredError as error:
        return "failed", str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return "failed", f"raised {type(error).__name__} at {where}: {error}"
    finally:
        subject.close_all()


def _claim(rule: Callable[[Subject], str]) -> str:
    return (rule.__doc__ or "").strip().splitlines()[0]
