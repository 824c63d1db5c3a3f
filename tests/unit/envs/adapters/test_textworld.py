"""The TextWorld adapter against the real package, with games it makes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

pytest.importorskip("textworld")

import textworld  # pyright: ignore[reportMissingImports]

from moored.envs import format_reply
from moored.envs.adapters.textworld import clean, find_games
from moored.envs.base import SPLIT_SEEDS, split_of_content
from moored.envs.check.nasty import NASTY_REPLIES
from moored.envs.mix import make_env
from moored.errors import EnvError, MooredError
from moored.types import messages_digest


def answer(text: str) -> str:
    return format_reply("", text)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small game."""
    folder = tmp_path_factory.mktemp("games")
    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = 7, 2, 3, 2
    options.path = str(folder / "a.z8")
    textworld.generator.compile_game(textworld.generator.make_game(options), options)
    return folder


def seed_of(games: Path) -> int:
    """A task seed of the split that the game belongs to."""
    ((_, digest),) = find_games(str(games))
    return SPLIT_SEEDS[split_of_content(digest)].start


def test_the_games_own_solution_wins_and_earns_1(games: Path) -> None:
    env = make_env("textworld", games=str(games))
    system, user = env.reset(seed_of(games))
    assert "Commands: " in user.text and "at most 30 turns" in system.text
    rewards = []
    result = None
    while result is None or not result.is_over:
        result = env.step(answer(env.oracle()))
        rewards.append(result.reward)
    assert (sum(rewards), result.terminated, result.success) == (1.0, True, True)
    assert "RESTART" not in str(result.observation)
    with pytest.raises(EnvError, match="call reset"):
        env.step(answer("look"))
    assert messages_digest(env.reset(seed_of(games))) == messages_digest([system, user])
    env.close()


def test_a_pickled_copy_plays_the_same_commands_again(games: Path) -> None:
    env = make_env(f"textworld:{games}")
    env.reset(seed_of(games))
    env.step(answer("look"))
    copy = pickle.loads(pickle.dumps(env))
    assert copy.oracle() == env.oracle()
    assert copy.step(answer(copy.oracle())) == env.step(answer(env.oracle()))
    env.close()
    copy.close()


def test_commands_to_the_interpreter_do_not_reach_it(games: Path) -> None:
    env = make_env("textworld", games=str(games), max_turns=6)
    env.reset(seed_of(games))
    for command in ("save", "quit", "RESTART", "look. save"):
        result = env.step(answer(command))
        assert (result.is_valid, result.is_over) == (True, False)
        assert "That is not possible here." in str(result.observation)
    malformed = env.step(answer("look\nquit"))
    assert (malformed.is_valid, malformed.reward) == (False, -0.1)
    last = env.step(answer("look"))
    assert (last.terminated, last.truncated) == (False, True)
    env.close()


def test_hostile_replies_are_scored(games: Path) -> None:
    env = make_env("textworld", games=str(games), max_turns=1)
    for reply in NASTY_REPLIES:
        env.reset(seed_of(games))
        assert env.step(reply).is_over
    env.close()


def test_the_prompt_and_the_status_line_are_not_shown() -> None:
    assert clean("\n\nYou see a key.\n\n>      -= Attic =-0/3") == "You see a key."
    assert clean(None) == ""


def test_a_game_belongs_to_one_split(games: Path) -> None:
    env = make_env("textworld", games=str(games))
    others = {seeds.start for seeds in SPLIT_SEEDS.values()} - {seed_of(games)}
    for seed in others:
        with pytest.raises(EnvError, match="task found in"):
            env.reset(seed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs the option 'games'"),
        ({"games": "no/such/folder"}, "there is no file or folder"),
        ({"games": "."}, "max_turns must be at least 1"),
    ],
)
def test_games_that_cannot_be_played_are_refused(options: dict[str, object], said: str) -> None:
    if "max_turns" in said:
        options = {**options, "max_turns": 0}
    with pytest.raises(MooredError, match=said):
        make_env("textworld", **options)


def test_a_folder_without_games_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no game", encoding="utf-8")
    with pytest.raises(EnvError, match="holds no games"):
        make_env("textworld", games=str(tmp_path))
    bad = tmp_path / "bad.z8"
    bad.write_text("no game", encoding="utf-8")
    with pytest.raises(EnvError, match="is not a game of the Z-machine"):
        make_env("textworld", games=str(bad))
