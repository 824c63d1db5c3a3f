"""Pairs drawn from recorded groups, and their cross-scores under a toy model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moored.diagnostics import (
    cross_score,
    first_turn_pairs,
    information,
    trajectory_pairs,
    turn_pairs,
    turn_position_pairs,
)
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Content, Group, Prompt, StopReason, Trajectory, Turn, content_images

THINK, END = 1, 2


def make_turn(prompt: list[int], reasoning: list[int], observation: Content = "") -> Turn:
    """A reply `<think> reasoning </think>`; no reasoning means no tags."""
    ids = np.array([THINK, *reasoning, END] if reasoning else [END])
    return Turn(
        prompt=Prompt(np.array(prompt), content_images(observation)),
        completion_ids=ids,
        logprobs=np.zeros(len(ids)),
        think_span=(1, 1 + len(reasoning)) if reasoning else None,
        reply="",
        seen=observation,
    )


def make_group(group_id: int, turn_counts: list[int], *, silent: int = 0) -> Group:
    """Trajectories with the given numbers of turns; the first `silent` ones do not reason."""
    trajectories = []
    for index, num_turns in enumerate(turn_counts):
        turns, prompt = [], [100 + group_id]
        for t in range(num_turns):
            reasoning = [] if index < silent else [10 + group_id, 20 + index, 30 + t]
            turns.append(make_turn(prompt, reasoning))
            prompt = [*prompt, *turns[-1].completion_ids.tolist(), 50 + index]
        trajectories.append(
            Trajectory(
                env="toy",
                task_seed=group_id,
                episode_seed=index,
                turns=tuple(turns),
                stop=StopReason.DONE,
            )
        )
    return Group(group_id=group_id, env="toy", task_seed=group_id, trajectories=tuple(trajectories))


GROUPS = [make_group(i, [1, 2, 3, 5]) for i in range(4)]


def test_first_turn_pairs_spread_evenly_over_prompts():
    pairs = first_turn_pairs(GROUPS, num_pairs=8)
    assert len(pairs.prompts) == 4
    assert np.bincount(pairs.columns).tolist() == [2, 2, 2, 2]
    assert all(pair.turn == 0 for pair in pairs.pairs)
    for pair, column in zip(pairs.pairs, pairs.columns, strict=True):
        np.testing.assert_array_equal(pairs.prompts[column].ids, pair.prompt.ids)


def test_fixed_number_of_prompts_is_kept_or_refused():
    assert len(first_turn_pairs(GROUPS, num_prompts=3).prompts) == 3
    with pytest.raises(TooFewPromptsError, match="needs 5 distinct prompts"):
        first_turn_pairs(GROUPS, num_prompts=5)


def test_a_prompt_without_a_valid_reasoning_stays_as_a_column():
    silent = make_group(4, [1, 2], silent=2)
    pairs = first_turn_pairs([*GROUPS, silent], num_prompts=5)
    assert pairs.shape == (16, 5)
    assert pairs.prompts[-1].ids.tolist() == [104]
    assert sorted(set(pairs.columns.tolist())) == [0, 1, 2, 3]
    report = information(cross_score(pairs, toy_score), pairs.columns, pairs.lengths)
    assert (report.num_prompts, report.mi_upper_bound) == (5, pytest.approx(np.log(5)))
    # With enough others it is not needed, and never chosen.
    for seed in range(10):
        chosen = first_turn_pairs([*GROUPS, silent], num_prompts=4, seed=seed).prompts
        assert 104 not in [int(prompt.ids[0]) for prompt in chosen]


def test_half_of_the_prompts_must_have_a_reasoning():
    silent = [make_group(4 + i, [1], silent=1) for i in range(5)]
    assert first_turn_pairs([*GROUPS, *silent[:4]], num_prompts=8).shape == (16, 8)
    with pytest.raises(TooFewPromptsError, match=r"at least 5 of 9 .* got reasonings of 4"):
        first_turn_pairs([*GROUPS, *silent], num_prompts=9)


def test_every_wanted_prompt_gets_a_reasoning_or_the_draw_is_refused():
    for num_prompts in (2, 3, 4):
        for seed in range(20):
            pairs = first_turn_pairs(
                GROUPS, num_prompts=num_prompts, num_pairs=num_prompts, seed=seed
            )
            assert len(pairs.prompts) == num_prompts
    with pytest.raises(MooredError, match="3 pairs for 4 prompts"):
        first_turn_pairs(GROUPS, num_prompts=4, num_pairs=3)
    with pytest.raises(TooFewPromptsError, match="at least 2 to compare, got 1"):
        first_turn_pairs(GROUPS, num_prompts=1)


def test_fewer_pairs_than_prompts_draw_among_all_prompts_when_none_is_fixed():
    seen = {
        pair.group_id
        for seed in range(30)
        for pair in first_turn_pairs(GROUPS, num_pairs=2, seed=seed).pairs
    }
    assert seen == {0, 1, 2, 3}


def test_a_turn_position_counts_from_zero():
    with pytest.raises(MooredError, match="from 0, the first, got -1"):
        turn_position_pairs(GROUPS, -1)


def test_groups_that_share_an_id_stay_apart():
    # Two environments may number their groups alike: four trajectories, not two with two turns.
    twins = [replace(GROUPS[0], group_id=7), replace(GROUPS[1], group_id=7)]
    for seed in range(20):
        pairs = trajectory_pairs(twins, num_pairs=8, seed=seed).pairs
        visited = {(int(p.prompt.ids[0]), p.trajectory) for p in pairs}
        assert len(visited) == 8  # every trajectory once before any twice


def test_equal_first_prompts_of_two_groups_are_one_prompt():
    twin = make_group(0, [1, 1])
    assert len(first_turn_pairs([*GROUPS, twin]).prompts) == 4


def test_draws_are_seeded_and_without_replacement():
    for draw in (first_turn_pairs, trajectory_pairs, turn_pairs):
        once, again, other = (draw(GROUPS, num_pairs=10, seed=s) for s in (3, 3, 4))
        places = [[(p.group_id, p.trajectory, p.turn) for p in x.pairs] for x in (once, again)]
        assert places[0] == places[1]
        assert places[0] != [(p.group_id, p.trajectory, p.turn) for p in other.pairs]
        assert len(set(places[0])) == 10


def test_asking_for_more_than_there_is_gives_what_there_is():
    pairs = turn_pairs(GROUPS, num_pairs=1000)
    assert len(pairs.pairs) == pairs.num_available == 4 * 11


def test_trajectory_draw_visits_every_trajectory_before_any_twice():
    pairs = trajectory_pairs(GROUPS, num_pairs=16, seed=1)
    assert len({(p.group_id, p.trajectory) for p in pairs.pairs}) == 16


def test_trajectory_draw_takes_turns_uniformly_inside_a_trajectory():
    counts = np.zeros(5)
    for seed in range(400):
        for pair in trajectory_pairs(GROUPS, num_pairs=16, seed=seed).pairs:
            counts[pair.turn] += pair.trajectory == 3
    assert counts / counts.sum() == pytest.approx(np.full(5, 0.2), abs=0.03)


def test_turn_position_takes_one_position_only():
    pairs = turn_position_pairs(GROUPS, 2)
    assert {p.turn for p in pairs.pairs} == {2}
    assert len(pairs.pairs) == 8
    assert pairs.view == "turn_3"


def test_turns_without_reasoning_are_counted():
    groups = [make_group(0, [1, 1, 1, 1], silent=1), make_group(1, [1, 1, 1, 1], silent=2)]
    pairs = first_turn_pairs(groups)
    assert (pairs.num_available, pairs.num_empty) == (5, 3)


def test_too_few_prompts_say_what_was_found():
    silent = [make_group(i, [1, 1], silent=2) for i in range(3)]
    with pytest.raises(TooFewPromptsError, match="6 turns without one"):
        turn_pairs(silent)
    with pytest.raises(MooredError, match="num_pairs"):
        turn_pairs(GROUPS, num_pairs=0)


def test_images_tell_prompts_apart():
    def seen(colour: str, seed: int) -> Group:
        content: Content = [{"type": "image", "image": Image.new("RGB", (2, 2), colour)}]
        trajectory = Trajectory(
            env="toy",
            task_seed=seed,
            episode_seed=0,
            turns=(make_turn([7], [8, 9], content),),
            stop=StopReason.DONE,
        )
        return Group(group_id=seed, env="toy", task_seed=seed, trajectories=(trajectory,))

    assert len(first_turn_pairs([seen("red", 0), seen("blue", 1)]).prompts) == 2
    with pytest.raises(TooFewPromptsError):
        first_turn_pairs([seen("red", 0), seen("red", 1)])


def toy_score(requests):
    """Knows that a reasoning of group g begins with 10 + g; the opening tag must not count."""

    def score(right, ids):
        return np.array([-99.0 if t == THINK else (-0.1 if t == right else -2.0) for t in ids])

    return [[score(r.prompt.ids[0] - 100 + 10, ids) for ids in r.continuations] for r in requests]


def test_cross_scores_count_reasoning_tokens_only():
    pairs = first_turn_pairs(GROUPS, num_pairs=16)
    logp = cross_score(pairs, toy_score)
    assert logp.shape == (16, 4)
    for m, pair in enumerate(pairs.pairs):
        own = int(pairs.columns[m])
        assert logp[m, own] == pytest.approx(-4.1)
        assert np.delete(logp[m], own) == pytest.approx([-6.0] * 3)
        assert pairs.lengths[m] == 3 == len(pair.continuation) - pair.num_opening
    report = information(logp, pairs.columns, pairs.lengths)
    assert report.retrieval_accuracy == 1


def test_a_score_function_that_returns_too_little_is_named():
    pairs = first_turn_pairs(GROUPS, num_pairs=4)
    with pytest.raises(MooredError, match="one log-probability per continuation token"):
        cross_score(pairs, lambda requests: [[c[1:] for c in r.continuations] for r in requests])
    with pytest.raises(MooredError, match="one list for each request, got 1 for 4"):
        cross_score(pairs, lambda requests: [[]])
    with pytest.raises(MooredError, match="one list for each request, got NoneType for 4"):
        cross_score(pairs, lambda requests: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MooredError, match=r"it returned \[1, 1, 1, 1\] values for"):
        cross_score(pairs, sums)


def sums(requests) -> Any:
    return [[-1.0 for _ in request.continuations] for request in requests]


def toy_loss(requests):
    return [[-logp for logp in scores] for scores in toy_score(requests)]


def test_a_loss_is_not_taken_for_log_probabilities():
    pairs = first_turn_pairs(GROUPS, num_pairs=4)
    with pytest.raises(MooredError, match="at most 0, got 99 for request 0; is it a loss"):
        cross_score(pairs, toy_loss)
    almost = [[np.full(len(c), 1e-4) for c in ask.request.continuations] for ask in pairs.asks()]
    assert np.all(cross_score(pairs, lambda requests: almost) > 0)  # rounding


def test_tensors_will_do_for_scores_and_those_with_gradients_are_named():
    torch = pytest.importorskip("torch")
    pairs = first_turn_pairs(GROUPS, num_pairs=4)

    def tensors(requests, **options):
        return [[torch.tensor(x, **options) for x in scores] for scores in toy_score(requests)]

    np.testing.assert_array_equal(cross_score(pairs, tensors), cross_score(pairs, toy_score))
    with pytest.raises(MooredError, match=r"got Tensor for request 0 .* tensor\.detach\(\)"):
        cross_score(pairs, lambda requests: tensors(requests, requires_grad=True))


def recorded_groups(turn_counts: list[int], num_groups: int) -> list[Group]:
    """Groups whose prompts tell the group and all earlier turns."""

    def play(group: int, member: int, num_turns: int) -> Trajectory:
        turns = tuple(
            Turn(
                prompt=Prompt(np.array([group, *([100 + member] * t)])),
                completion_ids=np.array([1, 10 + t, 2]),
                logprobs=np.zeros(3),
                think_span=(1, 2),
                reply="",
            )
            for t in range(num_turns)
        )
        return Trajectory(
            env="toy", task_seed=group, episode_seed=member, turns=turns, stop=StopReason.DONE
        )

    return [
        Group(
            group_id=g,
            env="toy",
            task_seed=g,
            trajectories=tuple(play(g, i, n) for i, n in enumerate(turn_counts)),
        )
        for g in range(num_groups)
    ]


def test_every_pair_of_a_view_is_drawn_as_often_as_its_definition_says():
    counts = [1, 2, 4]
    groups = recorded_groups(counts, 4)
    places = [(g, i, t) for g in range(4) for i, n in enumerate(counts) for t in range(n)]
    views = {
        # 4 of 12 trajectories, then one of their turns.
        "trajectory": (trajectory_pairs, {p: 4 / 12 / counts[p[1]] for p in places}),
        "turn": (turn_pairs, dict.fromkeys(places, 4 / 28)),
        "first_turn": (first_turn_pairs, {p: 1 / 3 for p in places if p[2] == 0}),
        "turn_2": (
            lambda groups, **options: turn_position_pairs(groups, 1, **options),
            {p: 4 / 8 for p in places if p[2] == 1},
        ),
    }
    num_draws = 600
    for name, (draw, expected) in views.items():
        seen = dict.fromkeys(places, 0)
        for seed in range(num_draws):
            for pair in draw(groups, num_pairs=4, seed=seed).pairs:
                seen[pair.group_id, pair.trajectory, pair.turn] += 1
        rates = {place: seen[place] / num_draws for place in expected}
        assert rates == pytest.approx(expected, abs=0.085), name
        assert sum(seen.values()) == sum(seen[place] for place in expected)


def test_the_prompt_of_a_later_turn_holds_all_images_so_far():
    pictures = [Image.new("RGB", (2, 2), colour) for colour in ("red", "lime", "blue")]

    def shown(member: int, second: Image.Image) -> Trajectory:
        turns = tuple(
            Turn(
                prompt=Prompt(np.arange(t + 1), (pictures[0], second)[: t + 1]),
                completion_ids=np.array([1]),
                logprobs=np.zeros(1),
                think_span=(0, 1),
                reply="",
                seen=[{"type": "image", "image": image}],
            )
            for t, image in enumerate((pictures[0], second))
        )
        return Trajectory(
            env="toy", task_seed=0, episode_seed=member, turns=turns, stop=StopReason.DONE
        )

    both = tuple(shown(i, pictures[1 + i]) for i in range(2))
    group = Group(group_id=0, env="toy", task_seed=0, trajectories=both)
    prompts = turn_position_pairs([group], 1).prompts
    assert all(prompt.images[0] is pictures[0] for prompt in prompts)
    assert {id(prompt.images[1]) for prompt in prompts} == {id(p) for p in pictures[1:]}
