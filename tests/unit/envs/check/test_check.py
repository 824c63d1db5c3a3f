"""check_env passes the documented example and catches every way of breaking a rule."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moored.envs.check.nasty import EXECUTED, NASTY_REPLIES, fuzz_replies
from moored.envs.check.rules import RULES
from moored.envs.check.runner import CheckReport, check_env
from moored.errors import ConfigError, EnvError, UnknownNameError
from moored.reply import parse_reply

PAGE = Path(__file__).parents[4] / "docs" / "write-your-own-environment.md"

BROKEN = """
import os, random, sys, threading, time
from dataclasses import dataclass, replace
from moored.envs import Resource
from moored.reply import parse_reply
from moored.types import Message
from my_env import ReverseWord

WORDS = {"anchor", "buoy", "cable", "dock", "eddy", "fender", "gale", "harbour", "inlet", "jetty"}


LOG = []

@dataclass
class Logged(Resource):
    def open(self):
        LOG.append("open")
        self.lock = threading.Lock()  # which cannot be pickled

    def close(self):
        LOG.append("close")

class Logging(ReverseWord):
    def resources(self):
        return {"logged": Logged()}

    def step(self, reply):
        with self.logged.lock:
            return super().step(reply)

class HiddenPenalty(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), penalty=0.0)

class NumericName(ReverseWord):
    name = 7

class NoTurns(ReverseWord):
    def __init__(self):
        super().__init__(max_turns=0)

class NoOracle(ReverseWord):
    oracle = None

class DictMessages(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        return [message.to_dict() for message in super().reset(task_seed)]

class OnlyUser(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        return super().reset(task_seed)[1:]

class WrongPart(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        system, user = super().reset(task_seed)
        return [system, Message("user", [{"type": "txt", "txt": user.text}])]

class TextReward(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), reward="1")

class IntTerminated(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), terminated=1)

class EndsTwice(ReverseWord):
    def step(self, reply):
        result = super().step(reply)
        return replace(result, truncated=result.terminated)

class TupleResult(ReverseWord):
    def step(self, reply):
        return "Right.", 1.0, True

class SetOrder(ReverseWord):
    def _make_word(self, rng):
        return "".join(WORDS) + super()._make_word(rng)

class PromptNoise(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        return super().reset(task_seed + episode_seed)

class LeftOver(ReverseWord):
    steps = 0
    def step(self, reply):
        self.steps += 1
        return replace(super().step(reply), reward=float(self.steps))

class OracleWithSideEffect(ReverseWord):
    helped = False
    def reset(self, task_seed, episode_seed=0):
        self.helped = False
        return super().reset(task_seed)
    def oracle(self):
        self.helped = True
        return super().oracle()
    def step(self, reply):
        helped = self.helped
        result = super().step(reply)
        self.helped = helped
        return replace(result, metrics={"helped": float(helped)})

class HiddenNoise(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        self.noise = random.Random(episode_seed)
        return super().reset(task_seed)
    def step(self, reply):
        return replace(super().step(reply), reward=self.noise.random())

class GlobalRandom(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        random.seed(task_seed)
        return super().reset(task_seed)

class Lambda(ReverseWord):
    def __init__(self):
        super().__init__()
        self.check = lambda answer: answer == self._word

class Forgetful(ReverseWord):
    def __getstate__(self):
        return self.__dict__ | {"_turns_left": self.max_turns}

class Endless(ReverseWord):
    def step(self, reply):
        self._turns_left = self.max_turns
        return replace(super().step(reply), terminated=False)

class StepsOn(ReverseWord):
    def step(self, reply):
        self._turns_left = self._turns_left or 1
        return super().step(reply)

class WrongOracle(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), success=False)

class FewWords(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        messages = super().reset(task_seed)
        self._word = sorted(WORDS)[task_seed % 7]
        return [messages[0], Message("user", f"The word is {self._word}.")]

class Echoes(ReverseWord):
    def step(self, reply):
        text = reply.encode(errors="replace").decode()
        return replace(super().step(reply), observation=f"Wrong: {text}")

class EchoesSurrogates(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), observation=f"Wrong: {reply[:99]}")

class Crashes(ReverseWord):
    def step(self, reply):
        answer = parse_reply(reply).answer or ""
        float(answer) if answer.isdigit() else 0
        return super().step(reply)

class Runs(ReverseWord):
    def step(self, reply):
        try:
            eval(parse_reply(reply).answer or "")
        except Exception:
            pass
        return super().step(reply)

class Slow(ReverseWord):
    def step(self, reply):
        time.sleep(0.06 if len(reply) > 900_000 else 0)
        return super().step(reply)

class Lenient(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), is_valid=True)

class NotANumber(ReverseWord):
    def step(self, reply):
        result = super().step(reply)
        return replace(result, reward=result.reward if result.is_valid else float("nan"))

class ChokesLater(ReverseWord):
    def step(self, reply):
        if self._turns_left < self.max_turns and len(reply) > 900_000:
            raise OverflowError("too long")
        return super().step(reply)

class SameNoise(ReverseWord):
    is_stochastic = True

class PaysNothing(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), reward=0.0)

class CostsToSolve(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), reward=-1.0)

class PaysMalformed(ReverseWord):
    def step(self, reply):
        result = super().step(reply)
        return replace(result, reward=1.0 if result.success else 0.5)

class PaysAnyWord(ReverseWord):
    def step(self, reply):
        result = super().step(reply)
        reward = 1.0 if result.is_valid else -0.1
        return replace(result, reward=reward, terminated=True, success=True)

class DearWords(ReverseWord):
    # A wrong word costs 0.3, a reply without tags 0.1: RAGEN's rule, with its hole.
    def step(self, reply):
        result = super().step(reply)
        is_wrong = result.is_valid and not result.success
        return replace(result, reward=-0.3 if is_wrong else result.reward)

class DearGuesses(ReverseWord):
    # Only a guess shows what a valid turn may cost.
    def guess(self, rng):
        return rng.choice("xy")
    def step(self, reply):
        result = super().step(reply)
        is_guess = parse_reply(reply).answer in ("x", "y")
        return replace(result, reward=-1.0 if is_guess else result.reward)

class QuitsOnMalformed(ReverseWord):
    # Every turn without success costs 0.1, and a malformed reply saves the second one.
    def step(self, reply):
        result = super().step(reply)
        if not result.is_valid:
            self._turns_left = 0
        return replace(
            result,
            reward=1.0 if result.success else -0.1,
            terminated=result.terminated or not result.is_valid,
        )

class LosesAtTheEnd(ReverseWord):
    # The end without success costs 1, however it came; a malformed turn 0.1 more.
    def step(self, reply):
        result = super().step(reply)
        is_lost = result.terminated and not result.success
        return replace(result, reward=result.reward - is_lost)

class TakesNothing(ReverseWord):
    # No reply is valid.
    def step(self, reply):
        return replace(super().step(reply), is_valid=False)

class ShowsItsSeed(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        messages = super().reset(task_seed % 7)
        return [messages[0], Message("user", f"Task {task_seed}: the word is {self._word}.")]

class Exits(ReverseWord):
    def step(self, reply):
        if not parse_reply(reply).is_valid:
            sys.exit("give a proper reply")
        return super().step(reply)

class ExitsOnBombs(ReverseWord):
    def step(self, reply):
        if "9**9**9" in reply:
            sys.exit(3)
        return super().step(reply)

class Interrupts(ReverseWord):
    def oracle(self):
        raise KeyboardInterrupt

class Crashes2(ReverseWord):
    def step(self, reply):
        if "9**9**9" in reply:
            os._exit(7)
        return super().step(reply)

class Hangs(ReverseWord):
    def step(self, reply):
        while "9**9**9" in reply:
            pass
        return super().step(reply)

class HangsInC(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        sum(range(10**14 if task_seed == 3 else 1))
        return super().reset(task_seed)

class HangsAtBirth(ReverseWord):
    def __init__(self):
        super().__init__()
        time.sleep(3600)

class BadConstructor(ReverseWord):
    def __init__(self):
        1 / 0

class ClosesBadly(ReverseWord):
    def close(self):
        raise OSError("no handle")

class Prints(ReverseWord):
    def reset(self, task_seed, episode_seed=0):
        print("hello from the environment")
        return super().reset(task_seed)

class OneTask(ReverseWord):
    def _make_word(self, rng):
        return "anchor"
    def reset(self, task_seed, episode_seed=0):
        return super().reset(3)
"""

CAUGHT = [
    ("NumericName", "protocol", "name"),
    ("NoTurns", "protocol", "max_turns"),
    ("NoOracle", "protocol", "oracle"),
    ("DictMessages", "protocol", "Message"),
    ("OnlyUser", "protocol", "['user']"),
    ("WrongPart", "protocol", "a part of"),
    ("TextReward", "protocol", "reward"),
    ("IntTerminated", "protocol", "terminated"),
    ("EndsTwice", "protocol", "truncated at once"),
    ("TupleResult", "protocol", "StepResult"),
    ("SetOrder", "processes", "PYTHONHASHSEED="),
    ("PromptNoise", "episode_seed", "3 different first messages"),
    ("LeftOver", "determinism", "a reused instance (turn 1"),
    ("OracleWithSideEffect", "determinism", "oracle() was called"),
    ("HiddenNoise", "noise", "is_stochastic is False"),
    ("GlobalRandom", "global_random", "global random state"),
    ("Lambda", "pickling", "pickling raised"),
    ("Forgetful", "pickling", "a copy pickled after 1 turns"),
    ("Endless", "ending", "max_turns = 2"),
    ("StepsOn", "ending", "after the end"),
    ("WrongOracle", "reference", "did not succeed"),
    ("PaysNothing", "reference", "total reward is 0"),
    ("CostsToSolve", "reference", "total reward is -1"),
    ("PaysMalformed", "reference", "malformed replies 1"),
    ("PaysAnyWord", "reference", "another task's solution 1"),
    ("SameNoise", "noise", "is_stochastic is True"),
    ("ShowsItsSeed", "splits", "validation tasks are train tasks"),
    ("ChokesLater", "replies", "in mid-episode raised OverflowError"),
    ("Exits", "determinism", "SystemExit"),
    ("ExitsOnBombs", "replies", "SystemExit: 3"),
    ("BadConstructor", "protocol", "ZeroDivisionError at broken_envs.py:"),
    ("ClosesBadly", "protocol", "OSError at broken_envs.py:"),
    ("FewWords", "splits", "of 7 validation tasks"),
    ("Echoes", "observations", "1000039 characters"),
    ("EchoesSurrogates", "replies", "cannot be encoded"),
    ("Crashes", "replies", "ValueError"),
    ("Runs", "replies", "ran code"),
    ("Slow", "replies", "more than 50"),
    ("Lenient", "malformed", "is_valid=True"),
    ("DearWords", "penalty", "a valid one -0.3"),
    ("DearGuesses", "penalty", "at most -1"),
    ("QuitsOnMalformed", "penalty", "2 valid turns"),
    ("NotANumber", "rewards", "reward = nan"),
]


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory):
    """`my_env` holds the code of the documentation page, `broken_envs` ways to break it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_env.py").write_text("\n\n".join(documented_blocks()))
    (folder / "broken_envs.py").write_text(BROKEN)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in ("my_env", "broken_envs"):
        sys.modules.pop(name, None)


def documented_blocks() -> list[str]:
    """The Python code blocks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def documented_example() -> str:
    """The first of them, a whole environment; the second adds a resource to it."""
    example, _ = documented_blocks()
    return example


def status_of(report: CheckReport) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def test_the_documented_example_keeps_all_rules() -> None:
    report = check_env("my_env:ReverseWord", reply_limit_s=60.0)
    report.raise_if_failed()
    assert set(status_of(report).values()) == {"passed"}
    assert list(status_of(report)) == list(RULES)


def test_the_documented_resource_keeps_all_rules(tmp_path) -> None:
    words = tmp_path / "words.txt"
    rng = random.Random(0)
    words.write_text(" ".join("".join(rng.choices("abcdef", k=8)) for _ in range(5000)))
    report = check_env("my_env:ReverseListedWord", options={"path": str(words)}, reply_limit_s=60.0)
    report.raise_if_failed()
    assert set(status_of(report).values()) == {"passed"}


def test_a_resource_that_cannot_be_opened_is_an_error(tmp_path) -> None:
    options = {"path": str(tmp_path / "missing.txt")}
    with pytest.raises(EnvError, match="word_list"):
        check_env("my_env:ReverseListedWord", options=options)


def test_resources_are_opened_once_and_closed_for_a_check() -> None:
    rules = [name for name in RULES if name != "processes"]  # those open one of their own
    report = check_env(
        "broken_envs:Logging",
        num_tasks=2,
        num_split_seeds=20,
        reply_limit_s=60.0,
        in_child=False,
        only=rules,
    )
    assert report.ok and sys.modules["broken_envs"].LOG == ["open", "close"]


def test_the_documentation_names_every_rule() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == list(RULES)


def test_the_documented_example_is_short() -> None:
    assert len(documented_example().splitlines()) <= 50


@pytest.mark.parametrize(("name", "rule", "detail"), CAUGHT, ids=[case[0] for case in CAUGHT])
def test_a_broken_environment_is_caught(name: str, rule: str, detail: str) -> None:
    report = check_env(
        f"broken_envs:{name}",
        num_tasks=2,
        num_split_seeds=20,
        reply_limit_s=0.05 if name == "Slow" else 60.0,
        only=[rule],
        in_child=False,
    )
    failed = {check.name: check.detail for check in report.failed}
    assert rule in failed, str(report)
    assert detail in failed[rule]
    assert not report.ok
    with pytest.raises(EnvError, match=name):
        report.raise_if_failed()


def test_every_rule_has_an_environment_that_breaks_it() -> None:
    assert {rule for _, rule, _ in CAUGHT} == set(RULES)


def test_rules_after_a_broken_protocol_are_not_run() -> None:
    report = check_env("broken_envs:TextReward", in_child=False)
    assert status_of(report).pop("protocol") == "failed"
    assert [check.detail for check in report.checks[1:]] == ["not run until 'protocol' passes"] * (
        len(RULES) - 1
    )


BOMB = "step('<think></think><answer>9**9**9</answer>') of task "


@pytest.mark.parametrize(
    ("name", "only", "rule", "call", "end"),
    [
        ("Hangs", ["ending", "replies", "rewards"], "replies", BOMB, "not returned after 2 s"),
        ("HangsInC", ["protocol", "noise"], "protocol", "reset(3, 0)", "not returned after 2 s"),
        ("HangsAtBirth", ["protocol"], "protocol", "the constructor", "not returned after 2 s"),
        ("Crashes2", ["replies", "rewards"], "replies", BOMB, "ended the process, exit code 7"),
        ("Interrupts", ["protocol"], "protocol", "raised KeyboardInterrupt at broken_envs", ""),
        ("Exits", ["protocol", "determinism"], "determinism", "raised SystemExit at broken", ""),
    ],
)
def test_hangs_exits_and_crashes_are_reported_with_the_call(
    name: str, only: list[str], rule: str, call: str, end: str
) -> None:
    report = check_env(f"broken_envs:{name}", num_tasks=4, only=only, call_limit_s=2.0)
    assert [check.name for check in report.checks] == only
    assert [check.name for check in report.failed] == [rule]
    assert report.failed[0].detail.startswith(call)
    assert report.failed[0].detail.endswith(end)
    after = report.checks[only.index(rule) + 1 :]
    assert all(check.detail == f"not run until {rule!r} passes" for check in after)


def test_a_child_finds_the_same_as_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    child, here = (
        check_env("broken_envs:Prints", num_tasks=1, num_split_seeds=5, in_child=in_child)
        for in_child in (True, False)
    )
    assert status_of(child) == status_of(here)
    assert child.ok


def test_what_an_environment_prints_stays_out_of_the_report(
    capfd: pytest.CaptureFixture[str],
) -> None:
    check_env("broken_envs:Prints", num_tasks=1, only=["protocol"])
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello from the environment" in err


def test_noise_may_be_rare_and_depend_on_options() -> None:
    assert check_env("frozen_lake", options={"slip": 0.0}, only=["noise"], in_child=False).ok
    rare = check_env("frozen_lake", options={"slip": 0.001}, only=["noise"], in_child=False)
    assert "rarely" in rare.checks[0].detail
    # The oracle pulls the safe arm here; only the names in the prompt lead to the risky one.
    options = {"safe_reward": 0.3}
    unseen = check_env("bandit", options=options, only=["noise"], in_child=False)
    assert "rarely" in unseen.checks[0].detail


def test_splits_are_skipped_when_there_is_one_task() -> None:
    report = check_env("broken_envs:OneTask", num_tasks=2, num_split_seeds=5)
    assert report.ok
    assert status_of(report)["splits"] == "skipped"


def test_classes_functions_and_options_are_taken() -> None:
    cls = importlib.import_module("my_env").ReverseWord
    rules = ("protocol", "processes")
    assert check_env(cls, options={"length": 9}, num_tasks=1, only=rules).ok
    report = check_env(lambda: cls(max_turns=3), num_tasks=1, only=rules)
    assert status_of(report)["processes"] == "passed"
    assert "max_turns = 3" in report.checks[0].detail


def test_wrong_names_and_options_raise_before_any_check() -> None:
    with pytest.raises(UnknownNameError, match="ReverseWorld"):
        check_env("my_env:ReverseWorld")
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        check_env("my_env:ReverseWord", options={"lenght": 3})
    with pytest.raises(ConfigError, match="whole number"):
        check_env("my_env:ReverseWord", options={"length": 2.5})
    with pytest.raises(EnvError, match="boxes"):
        check_env("sokoban", options={"boxes": 0})
    with pytest.raises(EnvError, match="num_tasks"):
        check_env("my_env:ReverseWord", num_tasks=0)
    with pytest.raises(EnvError, match="pickling"):
        check_env("my_env:ReverseWord", only=["pickle"])


def test_progress_names_each_check() -> None:
    seen: list[str] = []
    check_env("my_env:ReverseWord", only=["noise", "ending"], progress=seen.append)
    assert seen == ["noise", "ending"]


def test_a_class_of_a_script_cannot_be_sent_to_a_fresh_process(tmp_path: Path) -> None:
    check = (
        "from moored.envs.check.runner import check_env\n"
        "report = check_env(ReverseWord, num_tasks=1, num_split_seeds=5, reply_limit_s=60.0)\n"
        "assert report.ok, report\n"
        "print([check.name for check in report.checks if check.status == 'skipped'])\n"
    )
    script = tmp_path / "script.py"
    script.write_text(documented_example() + "\n\n" + check)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (result.stderr, result.stdout) == ("", "['processes']\n")


def test_nasty_replies_hold_what_they_promise() -> None:
    assert max(map(len, NASTY_REPLIES)) >= 1_000_000
    assert len(set(NASTY_REPLIES)) == len(NASTY_REPLIES)
    num_valid = sum(parse_reply(reply).is_valid for reply in NASTY_REPLIES)
    assert 30 < num_valid < len(NASTY_REPLIES) - 30
    assert EXECUTED == []


def test_fuzzed_replies_are_seeded_and_reach_past_the_tags() -> None:
    replies = list(fuzz_replies(random.Random(1), 500, answers=["Left || Right"]))
    assert replies == list(fuzz_replies(random.Random(1), 500, answers=["Left || Right"]))
    assert replies != list(fuzz_replies(random.Random(2), 500, answers=["Left || Right"]))
    answers = {parse_reply(reply).answer for reply in replies}
    assert "Left || Right" in answers
    assert None in answers


def penalty_check(source: str, **options: object) -> tuple[str, str]:
    """Status and detail of the rule "penalty"."""
    report = check_env(source, options=options, num_tasks=2, only=["penalty"], in_child=False)
    return report.checks[0].status, report.checks[0].detail


def test_what_the_end_of_an_episode_costs_is_not_held_against_its_last_turn() -> None:
    status, detail = penalty_check("broken_envs:LosesAtTheEnd")
    assert (status, detail) == (
        "passed",
        "malformed turns earn -1.1 to -0.1, valid ones of the same task no less",
    )


def test_nothing_is_said_of_penalties_where_no_valid_turn_can_be_played() -> None:
    status, detail = penalty_check("broken_envs:TakesNothing")
    assert status == "skipped" and "no valid turn" in detail


@pytest.mark.parametrize("game", ["sokoban", "rubik", "sudoku"])
def test_the_penalty_of_ragen_is_found_wherever_turns_cost_more(game: str) -> None:
    assert penalty_check(game)[0] == "passed"
    status, detail = penalty_check(game, format_penalty=-0.1)
    assert status == "failed" and "a malformed turn earned -0.1" in detail


def test_a_malformed_reply_that_costs_something_without_a_penalty_is_pointed_out():
    def note(name: str) -> str:
        (found,) = [c for c in check_env(name, num_tasks=2).checks if c.name == "malformed"]
        assert found.status == "passed"
        return found.detail

    assert "penalty" in note("broken_envs:HiddenPenalty")
    assert "penalty" not in note("my_env:ReverseWord")
