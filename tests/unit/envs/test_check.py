"""check_env passes the documented example and catches every way of breaking a rule."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moored.envs.base import parse_reply
from moored.envs.check import CheckReport, check_env
from moored.envs.check_rules import RULES
from moored.envs.nasty import EXECUTED, NASTY_REPLIES, fuzz_replies
from moored.errors import ConfigError, EnvError, UnknownNameError

PAGE = Path(__file__).parents[3] / "docs" / "write-your-own-environment.md"

BROKEN = """
import random, time
from dataclasses import replace
from moored.envs.base import parse_reply
from moored.types import Message
from my_env import ReverseWord

WORDS = {"anchor", "buoy", "cable", "dock", "eddy", "fender", "gale", "harbour", "inlet", "jetty"}


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

class IntDone(ReverseWord):
    def step(self, reply):
        return replace(super().step(reply), done=1)

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
        return replace(super().step(reply), done=False)

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

class OneTask(ReverseWord):
    def _make_word(self, rng):
        return "anchor"
    def reset(self, task_seed, episode_seed=0):
        return super().reset(3)
"""

CAUGHT = [
    ("NumericName", "protocol", "name must be a str, got 7"),
    ("NoTurns", "protocol", "max_turns must be at least 1, got 0"),
    ("NoOracle", "protocol", "has no method oracle()"),
    ("DictMessages", "protocol", "must return a list of moored.types.Message"),
    ("OnlyUser", "protocol", "a system and a user message, got roles ['user']"),
    ("WrongPart", "protocol", "a part of the first user message must be"),
    ("TextReward", "protocol", "reward must be a float, got '1'"),
    ("IntDone", "protocol", "done must be a bool, got 1"),
    ("TupleResult", "protocol", "must return a moored.envs.StepResult, got ('Right.'"),
    ("SetOrder", "processes", "gave other first messages in a process with PYTHONHASHSEED="),
    ("PromptNoise", "episode_seed", "3 different first messages under 3 episode seeds"),
    ("LeftOver", "determinism", "a reused instance (turn 1: reward 1.0 against"),
    ("OracleWithSideEffect", "determinism", "where oracle() was called before each reply (turn 1:"),
    ("HiddenNoise", "noise", "but is_stochastic is False"),
    ("GlobalRandom", "global_random", "the global random state changed"),
    ("Lambda", "pickling", "pickling raised"),
    ("Forgetful", "pickling", "a copy pickled after 1 turns (turn 1: "),
    ("Endless", "ending", "was not done after max_turns = 2 replies"),
    ("StepsOn", "ending", "step after the end returned a result"),
    ("WrongOracle", "reference", "the oracle did not succeed in 1 episode(s), rewards [1.0]"),
    ("FewWords", "splits", "of 7 validation tasks are train tasks too"),
    ("Echoes", "observations", "1000039 characters in one message, more than the 20000"),
    ("EchoesSurrogates", "replies", "an observation cannot be encoded: surrogates not allowed"),
    ("Crashes", "replies", r"step('<think></think><answer>\xb2</answer>') raised ValueError"),
    ("Runs", "replies", "ran code from the reply"),
    ("Slow", "replies", "ms, more than 50"),
    ("Lenient", "malformed", "step('') gave is_valid=True"),
    ("NotANumber", "rewards", "gave reward = nan"),
]


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory):
    """`my_env` holds the code of the documentation page, `broken_envs` ways to break it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_env.py").write_text(documented_example())
    (folder / "broken_envs.py").write_text(BROKEN)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in ("my_env", "broken_envs"):
        sys.modules.pop(name, None)


def documented_example() -> str:
    """The Python code block of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def status_of(report: CheckReport) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def test_the_documented_example_keeps_all_rules() -> None:
    report = check_env("my_env:ReverseWord")
    report.raise_if_failed()
    assert set(status_of(report).values()) == {"passed"}
    assert list(status_of(report)) == list(RULES)


def test_the_documentation_names_every_rule() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == list(RULES)


def test_the_documented_example_is_short() -> None:
    assert len(documented_example().splitlines()) < 60


@pytest.mark.parametrize(("name", "rule", "detail"), CAUGHT, ids=[case[0] for case in CAUGHT])
def test_a_broken_environment_is_caught(name: str, rule: str, detail: str) -> None:
    report = check_env(f"broken_envs:{name}", num_tasks=2, num_split_seeds=20, only=[rule])
    failed = {check.name: check.detail for check in report.failed}
    assert rule in failed, str(report)
    assert detail in failed[rule]
    assert not report.ok
    with pytest.raises(EnvError, match=f"broken_envs:{name} breaks the environment contract"):
        report.raise_if_failed()


def test_every_rule_has_an_environment_that_breaks_it() -> None:
    assert {rule for _, rule, _ in CAUGHT} == set(RULES)


def test_rules_after_a_broken_protocol_are_not_run() -> None:
    report = check_env("broken_envs:TextReward")
    assert status_of(report).pop("protocol") == "failed"
    assert [check.detail for check in report.checks[1:]] == ["not run until 'protocol' passes"] * 13


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
    with pytest.raises(UnknownNameError, match="has no attribute 'ReverseWorld'"):
        check_env("my_env:ReverseWorld")
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        check_env("my_env:ReverseWord", options={"lenght": 3})
    with pytest.raises(EnvError, match="num_tasks must be at least 1, got 0"):
        check_env("my_env:ReverseWord", num_tasks=0)
    with pytest.raises(EnvError, match="there is no check 'pickle'; did you mean 'pickling'"):
        check_env("my_env:ReverseWord", only=["pickle"])


def test_progress_names_each_check() -> None:
    seen: list[str] = []
    check_env("my_env:ReverseWord", only=["noise", "ending"], progress=seen.append)
    assert seen == ["noise", "ending"]


def test_a_class_of_a_script_cannot_be_sent_to_a_fresh_process(tmp_path: Path) -> None:
    check = (
        "from moored.envs.check import check_env\n"
        "report = check_env(ReverseWord, num_tasks=1, num_split_seeds=5)\n"
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
