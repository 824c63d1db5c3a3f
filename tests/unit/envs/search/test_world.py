"""The fictional world: enough linked facts, and questions that need their hops."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from moored.envs.search.scoring import normalize_answer
from moored.envs.search.world import KINDS, make_question, make_world

NUM_QUESTIONS = 300


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Title -> title and text."""
    return {p.title: f"{p.title}. {p.text}" for p in make_world().passages}


def questions(num_hops: int):
    rng = random.Random(num_hops)
    return [make_question(make_world(), rng, (num_hops, num_hops)) for _ in range(NUM_QUESTIONS)]


def test_the_world_has_6000_passages_and_18600_facts():
    # The docstring of the environment gives these numbers.
    world = make_world()
    assert (len(world.passages), world.num_facts) == (6000, 18_600)
    linked = [value for t in world.things for value in t.facts.values() if value in world.by_name]
    assert len(linked) > 5000


def test_passages_and_questions_of_a_seed_are_those_of_every_release():
    asked = [question for num_hops in (1, 2, 3) for question in questions(num_hops)[:200]]
    text = repr((make_world().passages, asked)).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "6304256c7f74ebcc"


def test_no_two_names_are_equal_after_normalisation():
    names = Counter(normalize_answer(passage.title) for passage in make_world().passages)
    assert names.most_common(1)[0][1] == 1


def test_passages_fit_into_800_characters(texts):
    assert max(map(len, texts.values())) <= 800


def test_every_fact_is_stated_in_its_passage():
    assert all(
        value in thing.text for thing in make_world().things for value in thing.facts.values()
    )


def test_the_shares_of_the_kinds_add_up_to_one():
    assert sum(kind.share for kind in KINDS.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_a_question_names_its_first_passage_and_the_last_one_answers_it(num_hops, texts):
    for question in questions(num_hops):
        assert len(question.titles) == num_hops
        assert question.titles[0] in question.text
        assert question.answers[0] in texts[question.titles[-1]]
        assert not any(title in question.text for title in question.titles[1:])
        assert question.answers[0] not in question.text


@pytest.mark.parametrize("num_hops", [2, 3])
def test_the_answer_is_in_no_passage_that_tells_of_what_the_question_names(num_hops, texts):
    for question in questions(num_hops):
        start, answer = question.titles[0], question.answers[0]
        assert not [text for text in texts.values() if start in text and answer in text], question
        assert not any(answer in texts[title] for title in question.titles[:-1])


def test_each_hop_leads_to_the_next_passage(texts):
    for question in questions(3):
        first, second, third = question.titles
        assert second in texts[first] and third in texts[second]


def test_other_passages_share_words_with_the_one_that_is_wanted(texts):
    # Distractors: of 100 ships, most share their bird with at least four others.
    ships = [t.name for t in make_world().things if t.kind == "ship"][:100]
    shared = [sum(name.split()[-1] in title.split() for title in texts) - 1 for name in ships]
    assert sum(count >= 4 for count in shared) > 90


def test_questions_of_all_lengths_are_drawn():
    rng = random.Random(0)
    counts = Counter(len(make_question(make_world(), rng, (1, 3)).titles) for _ in range(300))
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 60
