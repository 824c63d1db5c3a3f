"""Mixed environments: parsing, option errors, and which group gets which environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest

from moored.config import EnvConfig
from moored.envs import ENVIRONMENTS
from moored.envs.base import StepResult
from moored.envs.mix import REQUIRED, EnvMix, make_env, open_env, option_defaults
from moored.errors import ConfigError, EnvError, MooredError, UnknownNameError
from moored.types import Message


class Echo:
    """Say hello."""

    name = "echo"
    is_stochastic = False

    def __init__(self, *, max_turns: int = 1, word: str = "hello") -> None:
        if max_turns < 1:
            raise EnvError(f"echo: max_turns must be at least 1, got {max_turns}")
        self.max_turns, self.word = max_turns, word

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        return [Message("system", "Echo."), Message("user", self.word)]

    def step(self, reply: str) -> StepResult:
        return StepResult(observation="", reward=0.0, terminated=True)

    def oracle(self) -> str:
        return self.word

    def close(self) -> None:
        pass


class LoudEcho(Echo):
    def __init__(self, *, volume: int = 11, **options) -> None:
        super().__init__(**options)
        self.volume = volume


class Unreachable(Echo):
    num_closed = 0

    def check_available(self) -> None:
        raise EnvError(f"unreachable: nobody answers to {self.word!r}")

    def close(self) -> None:
        Unreachable.num_closed += 1


def test_a_mix_is_refused_by_the_environment_whose_episodes_cannot_begin() -> None:
    specs = [EnvConfig(name=f"{__name__}:{kind}") for kind in ("Echo", "Unreachable")]
    EnvMix(specs[:1]).check()
    before = Unreachable.num_closed
    with pytest.raises(EnvError, match="nobody answers"):
        EnvMix(specs).check()
    assert Unreachable.num_closed == before + 1


def test_an_environment_that_cannot_begin_is_not_opened() -> None:
    with (
        pytest.raises(EnvError, match="nobody answers"),
        open_env(Unreachable, word="bye"),
    ):
        raise AssertionError("it was opened")


def test_options_reach_the_constructor() -> None:
    assert make_env(Echo, max_turns=3).max_turns == 3


def test_a_function_makes_environments_too() -> None:
    assert make_env(lambda turns=4: Echo(max_turns=turns), turns=2).max_turns == 2


def test_options_of_base_classes_are_known_where_they_are_passed_on() -> None:
    assert option_defaults(LoudEcho) == {"volume": 11, "max_turns": 1, "word": "hello"}
    assert make_env(LoudEcho, max_turns=5).max_turns == 5


def test_an_option_without_default_must_be_given() -> None:
    def make(size):
        return Echo(max_turns=size)

    assert option_defaults(make) == {"size": REQUIRED}
    with pytest.raises(ConfigError, match="size"):
        make_env(make)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turn": 3}, "did you mean 'max_turns'"),
        ({"colour": 3}, "choose one of max_turns, word"),
        ({"max_turns": "five"}, "a whole number"),
        ({"max_turns": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(MooredError, match=message):
        make_env(Echo, **options)


def make_anything(
    *,
    count: int = 1,
    share: float = 0.5,
    is_on: bool = False,
    word: str = "",
    path: str | Path | None = None,
    span: int | Sequence[int] = (1, 2),
    rows: str | Sequence[str] | None = None,
    file: Path = Path(),
    view: Literal["grid", "image"] = "grid",
    table: Mapping[str, object] | None = None,
    hook: Callable[[], int] | None = None,
    bare_count=3,
    bare=None,
) -> Echo:
    return Echo(word=repr(locals()))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("count", 8), ("count", -8.0), ("share", 1), ("share", 0.25), ("is_on", True)),
        *(("word", "5"), ("path", "a"), ("path", Path("a")), ("path", None), ("span", 3)),
        *(("span", [3, 4.0]), ("span", (3, 4)), ("rows", ["a"]), ("rows", "a b"), ("rows", None)),
        *(
            ("view", "image"),
            ("table", {}),
            ("file", "a"),
            ("file", Path("a")),
            ("hook", print),
            ("bare_count", 4),
            ("bare", object()),
        ),
    ],
)
def test_option_values_of_the_right_kind_are_taken(option: str, value: object) -> None:
    env = make_env(make_anything, **{option: value})
    assert isinstance(env, Echo)


def test_a_whole_float_becomes_a_count() -> None:
    assert "'count': 8," in make_env(make_anything, count=8.0).reset(0)[1].text
    assert "'span': [3, 4]," in make_env(make_anything, span=[3, 4.0]).reset(0)[1].text


def test_a_kind_that_is_not_known_takes_everything() -> None:
    class Own:
        pass

    def make(*, own: Own | None = None) -> Echo:
        return Echo(word=repr(own))

    assert make_env(make, own=5).reset(0)[1].text.endswith("5")


WHOLE = "a whole number"
WHOLES = "a whole number or a list of whole numbers"
ROWS = "text or a list of texts or null"


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        *(("count", True, WHOLE), ("count", 2.5, WHOLE), ("count", "5", WHOLE)),
        *(("count", None, WHOLE), ("count", float("nan"), WHOLE), ("count", [1], WHOLE)),
        *(("share", True, "a number"), ("share", "x", "a number"), ("is_on", 1, "true or false")),
        *(("is_on", "yes", "true or false"), ("word", 5, "text"), ("word", None, "text")),
        *(("path", 5, "text or a path or null"), ("span", "34", WHOLES), ("span", True, WHOLES)),
        *(("span", [1, 2.5], WHOLES), ("span", None, WHOLES), ("bare_count", "4", WHOLE)),
        *(("rows", [1, 2], ROWS), ("rows", 3, ROWS), ("file", 5, "a path")),
        *(("view", "grit", "one of 'grid', 'image'"), ("table", [1], "a mapping or null")),
        *(("hook", 5, "a function or null"), ("share", float, "a number")),
    ],
)
def test_option_values_of_another_kind_are_refused(option: str, value: object, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(make_anything, **{option: value})
    assert repr(option) in str(caught.value) and f"must be {kind}" in str(caught.value)


@pytest.mark.parametrize("name", list(ENVIRONMENTS))
def test_every_count_and_number_of_every_environment_is_typed(name: str) -> None:
    factory = ENVIRONMENTS.get_object(name)
    assert callable(factory)
    defaults = option_defaults(factory)
    given = {option: "text" for option, default in defaults.items() if default is REQUIRED}
    for option, default in defaults.items():
        for value in (True, "x") if type(default) in (int, float) else ():
            with pytest.raises(ConfigError, match=option):
                make_env(name, **{**given, option: value})


def test_an_instance_is_not_a_source() -> None:
    with pytest.raises(EnvError, match="class"):
        make_env(Echo())  # pyright: ignore[reportArgumentType]


def test_what_is_made_must_be_an_environment() -> None:
    with pytest.raises(EnvError, match="lacks name"):
        make_env(lambda: {})


class Failing(Echo):
    def __init__(self, *, at: str) -> None:
        super().__init__()
        self.at = at
        self.fail("init")

    def close(self) -> None:
        self.fail("close")

    def fail(self, at: str) -> None:
        if at == self.at:
            raise RuntimeError(f"no {at}")


@pytest.mark.parametrize("at", ["init", "close"])
def test_what_its_code_raises_before_a_run_is_a_sentence_that_says_where(at: str) -> None:
    mix = EnvMix([EnvConfig(name=f"{__name__}:Failing", options={"at": at})])
    why = rf"test_mix\.py:\d+: no {at}$"
    with pytest.raises(EnvError, match=why):
        mix.check()
    with pytest.raises(EnvError, match=r"Failing raised .*: no init"), open_env(Failing, at="init"):
        pass


class Leaving(Echo):
    def __init__(self) -> None:
        sys.exit("the licence has expired")


def test_an_environment_that_exits_before_a_run_is_a_sentence_too() -> None:
    why = r"test_mix\.py:\d+: the licence has expired$"
    with pytest.raises(EnvError, match=why), open_env(Leaving):
        pass


def test_unknown_names_are_explained() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sokoban'"):
        make_env("sokobann")


def mix_of(*names: str) -> EnvMix:
    return EnvMix([EnvConfig(name=name) for name in names])


def test_every_stretch_of_groups_holds_the_mix() -> None:
    weights = {"a": 5, "b": 2, "c": 0.37}
    mix = EnvMix([EnvConfig(name=name, weight=weight) for name, weight in weights.items()])
    names = [mix.specs[mix.index_of_group(group, seed=7)].name for group in range(5000)]
    for start in range(0, 5000, 37):
        for length in (16, 100, 2000):
            window = names[start : start + length]
            for name, weight in weights.items():
                share = len(window) * weight / sum(weights.values())
                assert abs(window.count(name) - share) < 4


def test_the_choice_depends_on_group_and_seed_alone() -> None:
    mix = mix_of("a", "b")
    forward = [mix.index_of_group(group, seed=1) for group in range(64)]
    backward = [mix.index_of_group(group, seed=1) for group in reversed(range(64))]
    assert backward[::-1] == forward
    assert forward != [mix.index_of_group(group, seed=2) for group in range(64)]


def test_one_environment_takes_every_group() -> None:
    mix = mix_of("a")
    assert {mix.index_of_group(group, seed=group) for group in range(1000)} == {0}


def test_the_fewest_groups_of_an_environment_in_a_step():
    assert mix_of("a").fewest_groups(8) == [8]
    # Half of eight, give or take one.
    mix = EnvMix([EnvConfig(name="a"), EnvConfig(name="b")])
    assert mix.fewest_groups(8, seed=3) == [3, 3]
    counts = [
        [mix.index_of_group(40 * step + i, seed=3) for i in range(8)].count(0)
        for step in range(500)
    ]
    assert min(counts) == 3


def test_entries_of_one_name_are_numbered_in_records():
    mix = EnvMix([EnvConfig(name="a"), EnvConfig(name="b"), EnvConfig(name="a")])
    assert mix.names == ("a#1", "b", "a#2")


def test_records_do_not_say_in_which_folder_an_environment_lies():
    mix = EnvMix([EnvConfig(name="/home/me/games/mine.py:Mine"), EnvConfig(name="gym:ALE/Pong-v5")])
    assert mix.names == ("mine.py:Mine", "gym:ALE/Pong-v5")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("sokoban", {"rows": 3, "cols": 5}, "room"),
        ("countdown", {"max_number": 1, "max_target": 1}, "target"),
    ],
)
def test_options_that_allow_no_task_are_refused_before_a_run(name, options, problem) -> None:
    with pytest.raises(EnvError, match=problem):
        EnvMix([EnvConfig(name=name, options=options)]).check()
