"""The TextArena adapter against the real package: games for one and for two, seeds, failures."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moored.envs import format_reply
from moored.envs.adapters import TextArena
from moored.envs.adapters.textarena_oracles import place_mark
from moored.envs.adapters.textarena_worker import choose_move
from moored.envs.base import SPLIT_SEEDS
from moored.envs.check.rules import RULES
from moored.envs.check.runner import check_env
from moored.envs.mix import make_env
from moored.errors import EnvError, MooredError
from moored.types import messages_digest

# Not imported: the environments do that, each in a process of its own.
if find_spec("textarena") is None:
    pytest.skip("needs moored[textarena]", allow_module_level=True)

SINGLE = ("2048-v0-ultra-easy", "GuessTheNumber-v0", "LightsOut-v0", "Mastermind-v0")
DOUBLE = ("ConnectFour-v0", "KuhnPoker-v0", "Nim-v0", "TicTacToe-v0")


def answer(text: str) -> str:
    return format_reply("", text)


@pytest.mark.parametrize("game", [*SINGLE, *DOUBLE])
def test_a_task_seed_gives_the_same_first_messages_whatever_was_played_before(game: str) -> None:
    env = TextArena(id=game)
    first = [messages_digest(env.reset(seed)) for seed in range(3)]
    env.step(answer("[1]"))
    random.seed(5)
    assert [messages_digest(TextArena(id=game).reset(seed)) for seed in range(3)] == first


def test_hidden_numbers_differ_by_task_and_are_found_by_their_oracle() -> None:
    env = TextArena(id="GuessTheNumber-v0")
    numbers = []
    for seed in range(8):
        env.reset(seed)
        numbers.append(env.oracle())
        result = env.step(answer(numbers[-1]))
        assert (result.reward, result.terminated, result.success) == (1.0, True, True)
    assert len(set(numbers)) > 3


def test_a_wrong_guess_goes_on_and_says_where_the_number_lies() -> None:
    env = TextArena(id="GuessTheNumber-v0", max_turns=2)
    env.reset(0)
    number = int(env.oracle().strip("[]"))
    result = env.step(answer(f"[{number % 20 + 1}]"))
    assert (result.reward, result.is_over) == (0.0, False)
    assert f"The target number is {'lower' if number % 20 + 1 > number else 'higher'}" in str(
        result.observation
    )
    last = env.step(answer(f"[{(number + 1) % 20 + 1}]"))
    assert (last.reward, last.terminated, last.truncated) == (0.0, False, True)
    with pytest.raises(EnvError, match="call reset"):
        env.step(answer("[1]"))


def test_a_second_illegal_move_in_a_row_loses_the_game() -> None:
    env = TextArena(id="TicTacToe-v0")
    env.reset(0)
    first = env.step(answer("[99]"))
    assert (first.is_valid, first.reward, first.is_over) == (True, 0.0, False)
    assert first.metrics["invalid_moves"] == 1.0
    assert "Must be between 0 and 8" in str(first.observation)
    second = env.step(answer("nowhere"))
    assert (second.reward, second.terminated, second.success) == (-1.0, True, False)


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({"id": "GuessTheNumber-v0"}, -0.1),
        ({"id": "TicTacToe-v0"}, -1),
        ({"id": "TicTacToe-v0", "format_penalty": -0.1}, -0.1),
    ],
)
def test_a_malformed_reply_costs_what_a_lost_game_does(options, reward) -> None:
    env = TextArena(**options)
    system, _ = env.reset(0)
    assert f"A malformed reply earns {reward:g}, changes nothing" in system.text
    result = env.step("no tags")
    assert (result.reward, result.penalty, result.is_over) == (reward, reward, False)


def test_an_opponent_may_be_a_function_of_what_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def last(seen, rng):\n    return seen[-3:]\n"
    (tmp_path / "textarena_rival.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    seen = [(-1, "Moves: [3]", None), (-1, "or [7]", None)]
    assert choose_move(None, "textarena_rival:last", seen, random.Random(0)) == "[7]"


def test_an_opponent_given_as_moves_plays_them() -> None:
    env = TextArena(id="IteratedPrisonersDilemma-v0", opponent="[Cooperate]", max_turns=40)
    env.reset(0)
    results = [env.step(answer("[Defect]"))]
    while not results[-1].is_over:
        results.append(env.step(answer("[Defect]")))
    assert (results[-1].reward, results[-1].success) == (1.0, True)


def test_the_random_opponent_makes_only_legal_moves_and_loses_to_perfect_play() -> None:
    env = TextArena(id="TicTacToe-v0", is_stochastic=True)
    rewards = []
    for episode in range(6):
        env.reset(0, episode)
        result = env.step(answer(env.oracle()))
        while not result.is_over:
            result = env.step(answer(env.oracle()))
        rewards.append(result.reward)
    assert -1.0 not in rewards
    assert rewards.count(1.0) >= 4


def test_the_random_opponent_follows_the_episode_seed_only_where_there_is_noise() -> None:
    def replies(is_stochastic: bool) -> set[str]:
        env = TextArena(id="TicTacToe-v0", is_stochastic=is_stochastic)
        seen = set()
        for episode in range(8):
            env.reset(0, episode)
            seen.add(str(env.step(answer("[4]")).observation))
        return seen

    assert len(replies(False)) == 1
    assert len(replies(True)) > 2


def test_the_opponent_moves_first_where_the_model_is_the_second_player() -> None:
    env = TextArena(id="TicTacToe-v0", player=1)
    user = env.reset(0)[1].text
    assert "You are Player 1" in user and "placed their symbol (O)" in user


def test_the_best_tic_tac_toe_move_wins_at_once_or_else_blocks() -> None:
    board = [["O", "O", ""], ["X", "X", ""], ["", "", ""]]
    assert place_mark({"board": board}, 0) == "[2]"
    assert place_mark({"board": board}, 1) == "[5]"
    assert place_mark({"board": [["O", "O", ""], ["X", "", ""], ["", "", "X"]]}, 1) == "[2]"


def test_a_copy_pickled_in_mid_game_goes_on_like_the_original() -> None:
    env = TextArena(id="TicTacToe-v0", is_stochastic=True)
    env.reset(3, 5)
    env.step(answer("[4]"))
    copy = pickle.loads(pickle.dumps(env))
    move = env.oracle()
    assert copy.step(answer(move)) == env.step(answer(move))


def test_what_the_model_wrote_is_not_shown_to_it_again() -> None:
    env = TextArena(id="Mastermind-v0")
    env.reset(0)
    assert "SECRET MARK" not in str(env.step(answer("SECRET MARK")).observation)


def test_games_for_two_keep_the_rules() -> None:
    options = {"id": "TicTacToe-v0", "is_stochastic": True}
    # Fresh processes are tried with the default game in tests/contract; each imports for seconds.
    rules = [name for name in RULES if name != "processes"]
    report = check_env(
        "textarena",
        options=options,
        num_tasks=1,
        num_episodes=8,
        num_split_seeds=10,
        in_child=False,
        only=rules,
    )
    report.raise_if_failed()


def test_a_game_is_named_behind_a_colon() -> None:
    env = make_env("textarena:GuessTheNumber-v0", max_turns=3)
    assert "GuessTheNumber-v0" in env.reset(0)[0].text
    with pytest.raises(MooredError, match="give it once"):
        make_env("textarena:GuessTheNumber-v0", id="TicTacToe-v0")
    with pytest.raises(MooredError, match="sokoban takes nothing after its name"):
        make_env("sokoban:big")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "TicTacTo-v0"}, "did you mean 'TicTacToe-v0'"),
        ({"id": "Wordle-v0"}, "python -m nltk.downloader words"),
        ({"id": "GuessWho-v0"}, "OPENROUTER_API_KEY"),
        ({"id": "SecretMafia-v0"}, "neither for one player nor for two"),
        ({"id": "TicTacToe-v0", "player": 2}, "has players 0 and 1, got player 2"),
        ({"id": "FrozenLake-v0", "config": {"size": "big"}}, "FrozenLake-v0 cannot be started"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_in_one_sentence(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(EnvError, match=said) as refusal:
        make_env("textarena", **options).reset(SPLIT_SEEDS["validation"].start)
    assert "\n" not in str(refusal.value)


def test_an_unknown_oracle_is_said() -> None:
    env = TextArena(id="Nim-v0")
    env.reset(0)
    with pytest.raises(EnvError, match="no good answer is known for Nim-v0"):
        env.oracle()


def test_games_start_without_packages_that_none_of_them_needs() -> None:
    script = (
        "import sys; from moored.envs.adapters.textarena_worker import import_package;"
        "import_package(); print({'scipy', 'sklearn'} & set(sys.modules), 'nltk' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout == b"set() True\n"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MooredError, match=r"pip install 'moored\[textarena\]'"):
        TextArena()
