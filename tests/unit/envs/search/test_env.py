"""Turns, rewards, oracle and options of the search environment."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator

import pytest

from moored.envs import format_reply
from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import make_env, open_env
from moored.envs.resources import SharedResources
from moored.envs.search.corpus import Passage
from moored.envs.search.env import Search
from moored.envs.search.retriever import Hit, Retriever
from moored.errors import EnvError

PASSAGES = [
    {"title": "Amber Door", "text": "The Amber Door was written by Edda Calbach."},
    {"title": "Edda Calbach", "text": "Edda Calbach was born in Kirham. " + "x" * 2000},
    {"title": "Kirham", "text": "Kirham is a town."},
]
QUESTION = {
    "question": "Where was the author of the Amber Door born?",
    "answer": "Kirham",
    "supporting_facts": [["Amber Door", 0], ["Edda Calbach", 0]],
}


@pytest.fixture
def env(tmp_path) -> Iterator[Search]:
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    questions.write_text(json.dumps(QUESTION) + "\n")
    with open_env("search", corpus=str(corpus), questions=str(questions)) as opened:
        assert isinstance(opened, Search)
        opened.reset(first_seed(opened))
        yield opened


def first_seed(env: Search) -> int:
    """A task seed of the split that the only question belongs to."""
    for seeds in SPLIT_SEEDS.values():
        try:
            env.reset(seeds.start)
        except EnvError:
            continue
        return seeds.start
    raise AssertionError


def act(env: Search, answer: str):
    return env.step(format_reply("", answer))


def test_a_search_shows_passages_and_earns_nothing(env):
    result = act(env, "search[Amber Door]")
    assert (result.reward, result.is_over, result.is_valid) == (0.0, False, True)
    assert "[1] Amber Door\nThe Amber Door was written by Edda Calbach." in result.observation
    assert "Turn 2 of 5." in result.observation


def test_a_passage_is_cut_at_800_characters(env):
    observation = act(env, "search[Edda Calbach]").observation
    assert isinstance(observation, str)
    (text,) = [line for line in observation.splitlines() if "xxx" in line]
    assert len(text) == 800 and text.endswith("x…")


def test_at_most_five_passages_are_shown():
    with open_env("search") as env:
        env.reset(0)
        observation = env.step(format_reply("", "search[ship guild town]")).observation
        assert isinstance(observation, str)
        assert "[5]" in observation and "[6]" not in observation


def test_a_search_without_hits_says_so(env):
    assert "No passage fits." in act(env, "search[zzzz]").observation
    assert "No passage fits." in act(env, "search[?!]").observation


@pytest.mark.parametrize(
    ("answer", "reward", "is_success"),
    [
        ("finish[the kirham.]", 1.0, True),
        ("finish[Kirham town]", 2 / 3, False),
        ("finish[Paris]", 0.0, False),
        (" FINISH [Kirham] ", 1.0, True),
    ],
)
def test_finish_terminates_with_the_reward_of_the_answer(env, answer, reward, is_success):
    result = act(env, answer)
    assert result.reward == pytest.approx(reward)
    assert (result.terminated, result.truncated, result.success) == (True, False, is_success)


@pytest.mark.parametrize(
    "answer",
    [
        *("Kirham", "search[]", "finish[ ]", "search[a", "look[a]", "search[a] || search[b]x"),
        *("search[a] || search[b]", "finish[a]\nfinish[b]", "search[a], then FINISH [b [c]]"),
        *(
            "search[a] || look[b]",
            "search[a]_finish[b]",
            "search[a]_click[b]",
            "search[a [b] finish[c]",
        ),
        *("", "search" + "[" * 400, f"search[{'a' * 1000}]", "please search[a]"),
    ],
)
def test_what_is_not_one_action_is_malformed_and_uses_up_the_turn(env, answer):
    result = act(env, answer)
    assert (result.reward, result.penalty, result.is_valid) == (-0.1, -0.1, False)
    assert not result.is_over and "Turn 2 of 5." in result.observation


def test_brackets_inside_an_action_belong_to_its_text(env):
    assert act(env, "search[[1] research[ing] search]").is_valid
    assert act(env, "search[[1] word search [2], 2 || 3]").is_valid
    assert act(env, "search[interval [0,1) or ]0,1[ and [2]]").is_valid
    assert act(env, "finish[Kirham [town]]").metrics["f1"] == pytest.approx(2 / 3)


def test_an_episode_that_runs_out_of_turns_is_truncated_and_shows_no_more_passages(env):
    for _ in range(4):
        assert not act(env, "search[Kirham]").is_over
    result = act(env, "search[Kirham]")
    assert (result.terminated, result.truncated, result.reward) == (False, True, 0.0)
    assert result.observation == "Reward: 0. No turns left."
    with pytest.raises(EnvError, match="call reset"):
        act(env, "search[Kirham]")


def test_the_oracle_searches_hop_by_hop_and_then_finishes(env):
    answers = [env.oracle()]
    while not act(env, answers[-1]).is_over:
        answers.append(env.oracle())
    # "Amber Door" brings the passage about its author along: they share words.
    assert answers in (
        ["search[Amber Door]", "search[Edda Calbach]", "finish[Kirham]"],
        ["search[Amber Door]", "finish[Kirham]"],
    )


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_the_oracle_solves_every_made_question_and_needs_a_search(split):
    with open_env("search") as env:
        for seed in SPLIT_SEEDS[split][:100]:
            env.reset(seed)
            result, num_turns = None, 0
            while result is None or not result.is_over:
                result, num_turns = env.step(format_reply("", env.oracle())), num_turns + 1
            assert result.success and num_turns >= 2


def test_environments_with_equal_options_share_one_index():
    resources = SharedResources()
    first, second, third = make_env("search"), make_env("search"), make_env("search", world_seed=1)
    for env in (first, second, third):
        resources.attach(env)
    assert isinstance(first, Search) and isinstance(second, Search) and isinstance(third, Search)
    assert first.retriever is second.retriever
    assert first.retriever is not third.retriever
    resources.close()


def test_a_pickled_environment_leaves_the_world_behind():
    env = make_env("search")
    env.reset(0)
    assert len(pickle.dumps(env)) < 2000


def test_reasoning_quotes_the_sentence_that_leads_to_the_answer(env):
    rng = random.Random(0)
    assert env.reasoning("search[Amber Door]", rng) in {
        f"The question {verb} Amber Door. I {what} Amber Door."
        for verb in ("names", "is about")
        for what in ("search for", "look up")
    }
    act(env, "search[Amber Door]")
    written = "The Amber Door was written by Edda Calbach."
    assert env.reasoning("search[Edda Calbach]", rng).startswith(f"{written} I ")
    act(env, "search[Edda Calbach]")
    assert env.reasoning("finish[Kirham]", rng) in {
        f"Edda Calbach was born in Kirham. {so} Kirham." for so in ("So the answer is", "That is")
    }


def test_a_search_without_an_open_retriever_says_how_to_get_one():
    unopened = make_env("search")
    unopened.reset(0)
    with pytest.raises(EnvError, match=r"no retriever is open; use moored.envs.mix.open_env"):
        unopened.step(format_reply("", "search[Kirham]"))


class Broken(Retriever):
    def search(self, queries, num_passages):
        raise EnvError("the server is gone")


def test_a_retriever_that_fails_raises_and_shows_the_model_nothing(env):
    env.retriever = Broken()
    with pytest.raises(EnvError, match="the server is gone"):
        act(env, "search[Kirham]")


class Surplus(Retriever):
    def search(self, queries, num_passages):
        return [[Hit(Passage("t" * 5000, "x"), 1.0)] * 99]


def test_long_titles_and_surplus_passages_are_cut(env):
    env.retriever = Surplus()
    assert len(act(env, "search[Kirham]").observation) < 5 * 210 + 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hops": 4}, "num_hops must be one number or a .* within 1 and 3, got 4"),
        ({"num_hops": [3, 1]}, "got"),
        ({"max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"num_passages": 0}, "num_passages must be at least 1"),
        ({"corpus": "c.jsonl"}, "set questions too"),
        ({"questions": "q.jsonl"}, "questions need passages to search; set corpus"),
        ({"retriever": "bm26"}, "retriever must be bm25, dense or a server's address .* 'bm26'"),
        ({"retriever": "http://a", "corpus": "c.jsonl"}, "a server has its own corpus"),
        ({"retriever": "dense"}, "set embedding_model"),
        ({"embedding_model": "m"}, "is for retriever=dense"),
        ({"retriever": "http://a", "timeout_s": 0}, "timeout_s must be positive, got 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(EnvError, match=message):
        make_env("search", **options)
