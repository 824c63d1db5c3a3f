"""Episodes played by oracles: valid in every environment, in the shares that are asked for."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moored.config import EnvConfig
from moored.envs.base import split_of_seed
from moored.envs.mix import make_env
from moored.errors import ConfigError, EnvError, MooredError
from moored.reply import parse_reply
from moored.sft import source as sources
from moored.sft.boilerplate import write_boilerplate
from moored.sft.demonstrations import TraceMix, play
from moored.sft.options import load_sft_config
from moored.sft.source import OracleSource, open_source
from tests.unit.sft.lessons import LETTERS, Copy, Endless, Lost, Taught

BUILT_IN = (
    "bandit",
    "countdown",
    "frozen_lake",
    "metamath",
    "rubik",
    "sokoban",
    "sudoku",
    "2048",
)

GROUNDED = TraceMix()


def replies(episode) -> list[str]:
    return [message.text for message in episode.messages if message.role == "assistant"]


@pytest.mark.parametrize("kind", ["grounded", "noised", "plain"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_demonstration_is_valid(name, kind):
    env = make_env(name)
    for task_seed in range(6):
        episode = play(env, task_seed, random.Random(task_seed), kind=kind, noise=0.5)
        assert episode.is_valid
        assert episode.messages[-1].role == "assistant"


@pytest.mark.parametrize("name", ["bandit", "countdown", "metamath", "rubik", "sokoban", "sudoku"])
def test_a_grounded_demonstration_succeeds(name):
    env = make_env(name)
    assert all(play(env, seed, random.Random(0)).success for seed in range(6))


def test_an_environment_of_several_turns_is_played_to_its_end():
    episode = play(Copy(max_turns=3), 5, random.Random(0))
    assert [m.role for m in episode.messages] == ["system", *["user", "assistant"] * 3]
    shown = [m.text[-2] for m in episode.messages if m.role == "user"]
    assert [parse_reply(reply).answer for reply in replies(episode)] == shown


def test_an_episode_that_the_environment_does_not_end_ends_with_its_turns():
    episode = play(Endless(max_turns=3), 5, random.Random(0))
    assert len(replies(episode)) == 3 and episode.messages[-1].role == "assistant"


def test_reasoning_is_the_environments_own_where_it_has_some():
    taught, copied = (play(env(), 5, random.Random(0)) for env in (Taught, Copy))
    letter = parse_reply(replies(taught)[0]).answer
    assert parse_reply(replies(taught)[0]).think == f"Letter {letter}."
    # Without a method of its own: stock phrases, and still the oracle's answer.
    assert parse_reply(replies(copied)[0]).answer == letter
    assert "Letter" not in replies(copied)[0]


def test_noise_replaces_answers_by_guesses_at_the_stated_rate():
    env, answers = Taught(), []
    for seed in range(2000):
        episode = play(env, 5, random.Random(seed), kind="noised", noise=0.4)
        answers.append(parse_reply(replies(episode)[0]).answer)
    env.reset(5)
    assert set(answers) == set(LETTERS)
    # A quarter of the guesses is right: 1 - 0.4 * 3 / 4.
    assert answers.count(env.oracle()) / 2000 == pytest.approx(0.7, abs=0.03)


def test_an_episode_ends_where_the_oracle_knows_no_further():
    episode = play(Lost(max_turns=3), 5, random.Random(0))
    assert [message.role for message in episode.messages] == ["system", "user", "assistant"]


def test_kinds_come_in_the_stated_shares():
    mix = TraceMix(grounded=0.3, noised=0.9)
    assert mix.shares == pytest.approx({"grounded": 0.03, "noised": 0.27, "plain": 0.7})
    rng = random.Random(0)
    counts = Counter(mix.draw(rng) for _ in range(4000))
    for kind, share in mix.shares.items():
        assert counts[kind] / 4000 == pytest.approx(share, abs=0.03)


def test_an_episode_is_a_function_of_seed_split_and_number(monkeypatch):
    seeds = []
    monkeypatch.setattr(
        sources, "play", lambda env, seed, *a, **k: seeds.append(seed) or play(env, seed, *a, **k)
    )
    specs = [EnvConfig(name="bandit"), EnvConfig(name="tests.unit.sft.lessons:Copy", weight=2.0)]
    one, two = (OracleSource(specs, [TraceMix()] * 2, num_held_out=4, seed=3) for _ in range(2))
    assert [one.train(i) for i in range(6)] == [two.train(i) for i in reversed(range(6))][::-1]
    assert {split_of_seed(seed) for seed in seeds} == {"train"}
    seeds.clear()
    one.held_out(0)
    assert {split_of_seed(seed) for seed in seeds} == {"validation"}
    heads = Counter(one.train(i)[0].text == "Copy." for i in range(30))
    assert heads[True] == pytest.approx(20, abs=2)


def test_an_environment_of_the_mix_may_have_its_own_kinds_of_replies():
    given = {"env": [{"name": "bandit"}, {"name": "sokoban", "demonstrations": {"grounded": 0}}]}
    source = open_source(load_sft_config(given))
    replies = [source.train(index)[2].text for index in range(40)]
    source.close()
    grounded = [" is risky" in reply or " is safe" in reply for reply in replies]
    places = ["box at (" in reply for reply in replies]
    assert sum(grounded) == pytest.approx(20, abs=2) and not any(places)


def test_an_environment_without_an_oracle_is_refused():
    with pytest.raises(ConfigError) as caught:
        OracleSource(
            [EnvConfig(name="tests.unit.sft.lessons:Mute")], [TraceMix()], num_held_out=0, seed=0
        )
    assert "lessons:Mute" in str(caught.value) and "dialogues=FILE" in str(caught.value)


@pytest.mark.parametrize(
    ("at", "why"),
    [("reset", r"SystemExit at lessons\.py"), ("oracle", r"KeyError at lessons\.py")],
)
def test_an_environment_that_fails_in_its_first_task_is_named(at, why):
    spec = EnvConfig(name="tests.unit.sft.lessons:Failing", options={"at": at})
    with pytest.raises(EnvError, match=rf"lessons:Failing raised {why}"):
        OracleSource([spec], [TraceMix()], num_held_out=0, seed=0)


def test_an_environment_that_fails_is_named_with_its_task():
    spec = EnvConfig(name="tests.unit.sft.lessons:Broken", options={"max_turns": 2})
    source = OracleSource([spec], [TraceMix()], num_held_out=0, seed=0)
    with pytest.raises(EnvError, match=r"lessons:Broken' .* task \d+: RuntimeError"):
        source.train(0)


def probe(name: str, traces: TraceMix = GROUNDED, **options) -> list[str]:
    spec = EnvConfig(name=name, options=options)
    source = OracleSource([spec], [traces], num_held_out=0, seed=0)
    try:
        return source.probe()
    finally:
        source.close()


@pytest.mark.parametrize(
    ("method", "traces"),
    [
        ("oracle", TraceMix()),
        ("reasoning", TraceMix()),
        ("guess", TraceMix(grounded=0.0)),
        ("spoil", TraceMix(noised=0.1)),
    ],
)
def test_a_method_that_returns_no_text_is_named(method, traces):
    with pytest.raises(MooredError, match=rf"{method}\(\) must return a text") as caught:
        probe("tests.unit.sft.lessons:Counting", traces, method=method)
    assert "environment 'tests.unit.sft.lessons:Counting'" in str(caught.value)


@pytest.mark.parametrize("name", [*BUILT_IN, "search", "webshop", "tests.unit.sft.lessons:Slow"])
def test_an_oracle_that_is_any_good_is_not_warned_of(name):
    assert probe(name, TraceMix(grounded=0.5, noised=0.5)) == []


def test_an_oracle_that_teaches_nothing_is_warned_of():
    name = "tests.unit.sft.lessons:Useless"
    (wrong,), (invalid,) = probe(name), probe(name, answer="E")
    assert name in wrong and "earned nothing in all 8 tasks" in wrong
    assert name in invalid and "invalid in all 8 tasks" in invalid
    # Without a guess, the oracle answers in plain replies too.
    assert probe(name, TraceMix(grounded=0.0)) == [wrong]


@pytest.mark.parametrize("name", ["search", "webshop"])
def test_environments_with_something_shared_are_played_too(name):
    source = OracleSource([EnvConfig(name=name)], [TraceMix()], num_held_out=0, seed=0)
    try:
        episodes = [source.episode(index) for index in range(3)]
    finally:
        source.close()
    assert all(episode.is_valid and episode.success for episode in episodes)
    assert max(len(replies(episode)) for episode in episodes) > 1


def test_boilerplate_is_varied_and_names_no_input():
    rng = random.Random(0)
    texts = [write_boilerplate(rng) for _ in range(500)]
    assert len(set(texts)) > 450
    assert not any(mark in text for text in texts for mark in "0123456789{}|()")
