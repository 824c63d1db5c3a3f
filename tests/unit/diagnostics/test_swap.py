"""Observation swap on policies with known likelihoods: two that fool dialogues, and a reader."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from moored.diagnostics import (
    cross_score,
    first_turn_pairs,
    information,
    observation_swap_pairs,
    trajectory_pairs,
)
from moored.diagnostics.monitor import CollapseMonitor
from moored.diagnostics.swap import SwapSet
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group, ImagePart, Prompt, ScoreRequest, StopReason, Trajectory, Turn

SYSTEM, LOOK, THINK, END = 1, 2, 3, 4
TURN, WORD, FILLER, BOARD = 10, 100, 200, 1000
NUM_WORDS, NEVER = 8, -50.0
NUM_GROUPS, NUM_TURNS = 8, 4

Word = Callable[[Sequence[int], int], float]
"""Log-probability of a word, given the tokens before the reply."""


def copies_itself(context: Sequence[int], word: int) -> float:
    """Ignores every observation: a random first word, then always the word before."""
    words = [token for token in context if WORD <= token < FILLER]
    if not words:
        return -math.log(NUM_WORDS)
    return 0.0 if word == words[-1] else NEVER


def repeats_a_template(context: Sequence[int], word: int) -> float:
    """One text for each turn number."""
    return 0.0 if word == WORD else NEVER


def reads_the_board(context: Sequence[int], word: int) -> float:
    """The word of the newest board, whatever was before."""
    board = [token for token in context if token >= BOARD][-1]
    return 0.0 if word - WORD == board % NUM_WORDS else NEVER


def score_with(word: Word):
    """A reasoning is its turn's number, a word, and one of eight fillers at random."""

    def logp(before: list[int], token: int) -> float:
        if token < TURN or token >= BOARD:
            return -99.0  # tags and observations are context and must not count
        if token < WORD:
            return 0.0 if token - TURN == before.count(THINK) else NEVER
        reply = len(before) - before[::-1].index(THINK) - 1
        return word(before[:reply], token) if token < FILLER else -math.log(8)

    def logps(prompt: list[int], ids: list[int]) -> np.ndarray:
        return np.array([logp(prompt + ids[:k], token) for k, token in enumerate(ids)])

    def score(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [
            [logps(request.prompt.ids.tolist(), ids.tolist()) for ids in request.continuations]
            for request in requests
        ]

    return score


def play(task: int, member: int, words: Sequence[int]) -> Trajectory:
    """Boards differ between tasks at turn 1, between all trajectories later. No words: no tags."""
    stream, turns = [SYSTEM], []
    for t in range(NUM_TURNS):
        board = BOARD + 100 * t + task + (8 * member if t else 0)
        start = len(stream)
        stream += [LOOK, board]
        filler = FILLER + (task + 3 * t) % 8
        reply = [THINK, TURN + t + 1, words[t], filler, END] if words else [END]
        turns.append(
            Turn(
                prompt=Prompt(np.array(stream)),
                completion_ids=np.array(reply),
                logprobs=np.zeros(len(reply)),
                think_span=(1, 4) if words else None,
                reply="",
                observation_start=start,
            )
        )
        stream = [*stream, *reply]
    return Trajectory(
        env="toy", task_seed=task, episode_seed=member, turns=tuple(turns), stop=StopReason.DONE
    )


def make_groups(words: Callable[[int], list[int]], *, group_size: int = 1) -> list[Group]:
    return [
        Group(
            group_id=task,
            env="toy",
            task_seed=task,
            trajectories=tuple(play(task, i, words(task)) for i in range(group_size)),
        )
        for task in range(NUM_GROUPS)
    ]


COPIES = make_groups(lambda task: [WORD + task] * NUM_TURNS)
TEMPLATES = make_groups(lambda task: [WORD] * NUM_TURNS)
READS = make_groups(lambda task: [WORD + (100 * t + task) % 8 for t in range(NUM_TURNS)])
FOUR_EACH = make_groups(lambda task: [WORD] * NUM_TURNS, group_size=4)


def silenced(groups: Sequence[Group]) -> list[Group]:
    return [replace(g, trajectories=(play(g.task_seed, 0, []),)) for g in groups]


def with_turns(groups: Sequence[Group], change: Callable[[tuple[Turn, ...]], tuple[Turn, ...]]):
    """The groups with the turns of every trajectory changed."""
    return [
        replace(g, trajectories=tuple(replace(t, turns=change(t.turns)) for t in g.trajectories))
        for g in groups
    ]


def swap_report(groups: Sequence[Group], word: Word):
    pairs = observation_swap_pairs(groups, num_prompts=NUM_GROUPS)
    logp, _ = pairs.split(cross_score(pairs, score_with(word)))
    return information(logp, pairs.columns, pairs.lengths, blocks=pairs.blocks)


def dialogue_report(groups: Sequence[Group], word: Word):
    pairs = trajectory_pairs(groups)
    return information(cross_score(pairs, score_with(word)), pairs.columns, pairs.lengths)


def test_a_policy_that_copies_its_earlier_reasoning_fools_dialogues_and_not_observation_swap():
    # 32 dialogues. A word of turn 1 is as likely after the 8 first prompts and impossible after
    # the others: log(32 / 8). A later one fits its own dialogue alone: log 32.
    fooled = dialogue_report(COPIES, copies_itself)
    assert fooled.mi_seq_estimate == pytest.approx((math.log(4) + 3 * math.log(32)) / 4)
    assert fooled.mi_estimate == pytest.approx(2.946, abs=1e-3)
    assert fooled.retrieval_accuracy == pytest.approx((1 / 8 + 3) / 4)
    assert fooled.regime == "diverse"
    honest = swap_report(COPIES, copies_itself)
    assert (honest.mi_estimate, honest.mi_seq_estimate) == (0.0, 0.0)
    assert honest.retrieval_accuracy == 1 / 8
    assert honest.regime == "template_collapse"


def test_a_template_for_each_turn_number_fools_dialogues_and_not_observation_swap():
    # A text fits the 8 of 32 dialogues that have its turn number.
    fooled = dialogue_report(TEMPLATES, repeats_a_template)
    assert fooled.mi_seq_estimate == pytest.approx(math.log(4))  # 1.386
    assert fooled.retrieval_accuracy == pytest.approx(1 / 8)  # four times chance
    honest = swap_report(TEMPLATES, repeats_a_template)
    assert (honest.mi_estimate, honest.mi_seq_estimate) == (0.0, 0.0)
    assert honest.regime == "template_collapse"


def test_a_policy_that_reads_the_board_each_turn_has_all_the_information_there_is():
    report = swap_report(READS, reads_the_board)
    assert report.mi_upper_bound == pytest.approx(math.log(8))
    assert report.mi_seq_estimate == pytest.approx(math.log(8))
    assert report.mi_estimate == pytest.approx(math.log(8), abs=1e-5)
    assert (report.retrieval_accuracy, report.num_reasonings) == (1, 32)
    assert report.regime == "diverse"


def test_turn_one_is_the_first_turn_view():
    firsts = with_turns(READS, lambda turns: turns[:1])
    pairs = first_turn_pairs(firsts, num_prompts=8)
    score = score_with(reads_the_board)
    first = information(cross_score(pairs, score), pairs.columns, pairs.lengths)
    swapped = swap_report(firsts, reads_the_board)
    assert swapped.mi_seq_estimate == pytest.approx(first.mi_seq_estimate)
    assert swapped.conditional_entropy_est == pytest.approx(first.conditional_entropy_est)


def own_prompt(pairs: SwapSet, m: int) -> list[int]:
    return pairs.context(m, int(pairs.columns[m])).ids.tolist()


def test_history_and_own_observation_are_exactly_the_prompt():
    pairs = observation_swap_pairs(READS, num_prompts=8)
    for m, pair in enumerate(pairs.pairs):
        assert own_prompt(pairs, m) == pair.prompt.ids.tolist()


def test_a_block_has_distinct_observations_of_one_turn_number():
    pairs = observation_swap_pairs(FOUR_EACH, num_prompts=8, num_pairs=64, seed=3)
    assert all(len({o.key for (o,) in block}) == 8 for block in pairs.observations)
    turns = [{int(o.ids[-1] - BOARD) // 100 for (o,) in block} for block in pairs.observations]
    for m, pair in enumerate(pairs.pairs):
        assert turns[pairs.blocks[m]] == {pair.turn}
        assert own_prompt(pairs, m) == pair.prompt.ids.tolist()


def test_rows_are_spread_over_trajectories_and_turns_without_repeats():
    # 32 trajectories give two turns each; a turn number gets its share of 64, less one row where
    # a last block would have had only one.
    pairs = observation_swap_pairs(FOUR_EACH, num_prompts=8, num_pairs=64, seed=3)
    counts = np.bincount([pair.turn for pair in pairs.pairs])
    assert 60 <= counts.sum() <= 64
    assert counts.min() >= 8
    assert len({(p.group_id, p.trajectory, p.turn) for p in pairs.pairs}) == len(pairs.pairs)


def test_members_of_a_group_share_one_observation_at_turn_one_and_it_is_merged():
    pairs = observation_swap_pairs(FOUR_EACH, num_prompts=9)
    # Turn 1 has 8 distinct observations for 32 reasonings: too few for N = 9.
    assert {pair.turn for pair in pairs.pairs} == {1, 2, 3}
    assert (pairs.num_available, pairs.num_left_out) == (96, 32)
    assert pairs.share_left_out == 1 / 4
    with pytest.raises(TooFewPromptsError, match=r"33 distinct observations.*at most 32"):
        observation_swap_pairs(FOUR_EACH, num_prompts=33)


def test_draws_are_seeded():
    def places(seed: int) -> list[tuple[int, int, int]]:
        pairs = observation_swap_pairs(FOUR_EACH, num_prompts=8, num_pairs=20, seed=seed).pairs
        return [(p.group_id, p.trajectory, p.turn) for p in pairs]

    assert places(1) == places(1)
    assert places(1) != places(2)


def test_a_history_is_one_prefix_for_all_its_observations():
    pairs = observation_swap_pairs(READS, num_prompts=8)
    asks = pairs.asks()
    # At turn 1 all rows have one history of one token, and it is cheaper to write the 8 prompts
    # out. Later there is one request per row, its own history, with 8 observations for the
    # reasoning and 8 for its control.
    assert len(asks) == 8 + 24
    assert sum(len(ask.cells) for ask in asks) == 2 * 32 * 8
    later = [ask.request for ask in asks if len(ask.request.prompt.ids) > 3]
    assert {len(request.continuations) for request in later} == {16}
    histories = [h for (h,), p in zip(pairs.kept, pairs.pairs, strict=True) if p.turn]
    assert {request.prompt for request in later} == set(histories)


def test_turns_whose_observation_is_unknown_are_left_out_with_a_reason():
    unknown = with_turns(
        READS, lambda turns: tuple(replace(turn, observation_start=None) for turn in turns)
    )
    with pytest.raises(TooFewPromptsError, match=r"did not say; set Turn\.observation_start"):
        observation_swap_pairs(unknown, num_prompts=8)
    assert observation_swap_pairs([*READS, *unknown], num_prompts=8).share_left_out == 1 / 2


def test_an_observation_without_a_valid_reasoning_is_still_a_column():
    mixed = [*READS[3:], *silenced(READS[:3])]
    assert observation_swap_pairs(mixed, num_prompts=8).shape == (2 * 20, 8)
    assert swap_report(mixed, reads_the_board).mi_seq_estimate == pytest.approx(math.log(8))
    with pytest.raises(TooFewPromptsError, match="at least 4 of them with a reasoning"):
        observation_swap_pairs([*READS[5:], *silenced(READS[:5])], num_prompts=8)


def test_counts_that_cannot_work_are_refused():
    with pytest.raises(MooredError, match="7 pairs for 8 prompts"):
        observation_swap_pairs(READS, num_prompts=8, num_pairs=7)
    with pytest.raises(TooFewPromptsError, match="at most 0 distinct"):
        observation_swap_pairs([])


def test_an_image_of_the_newest_observation_stands_in_the_prompt():
    """Two pictures after equal ids are two observations; a continuation has no place for them."""

    def seen(colour: str, task: int) -> Group:
        picture = Image.new("RGB", (2, 2), colour)
        turn = Turn(
            prompt=Prompt(np.array([SYSTEM, LOOK]), (picture,)),
            completion_ids=np.array([THINK, WORD, END]),
            logprobs=np.zeros(3),
            think_span=(1, 2),
            reply="",
            seen=[ImagePart(type="image", image=picture)],
            observation_start=1,
        )
        trajectory = Trajectory(
            env="toy", task_seed=task, episode_seed=0, turns=(turn,), stop=StopReason.DONE
        )
        return Group(group_id=task, env="toy", task_seed=task, trajectories=(trajectory,))

    pairs = observation_swap_pairs([seen("red", 0), seen("blue", 1)], num_prompts=2)
    assert all(history.images == () for (history,) in pairs.kept)
    requests = [ask.request for ask in pairs.asks()]
    assert len(requests) == 2
    assert {len(request.prompt.images) for request in requests} == {1}


def look(groups: Sequence[Group], word: Word, **options):
    return CollapseMonitor(score=score_with(word), num_prompts=8, **options).measure(1, groups)


def test_regime_of_several_turns_follows_episode_swap():
    for groups, word, regime in (
        (COPIES, copies_itself, "template_collapse"),
        (TEMPLATES, repeats_a_template, "template_collapse"),
        (READS, reads_the_board, "diverse"),
    ):
        found = look(groups, word)
        assert list(found.reports) == [
            "first_turn",
            "observation_swap",
            "episode_swap",
            "trajectory",
        ]
        assert found.environments["toy"].view == "episode_swap"
        assert found.regime == regime
    assert found.metrics["collapse_observation_swap_sample/mi_seq_estimate"] == pytest.approx(
        math.log(8)
    )
    assert found.metrics["collapse_observation_swap_sample/share_left_out"] == 0


def test_a_policy_that_reads_only_the_first_board_is_caught_by_observation_swap():
    """The first-turn view cannot see it: collapse may begin after the first turn."""

    def reads_once(context: Sequence[int], word: int) -> float:
        board = next(token for token in context if token >= BOARD)
        return 0.0 if word - WORD == board % NUM_WORDS else NEVER

    found = look(COPIES, reads_once)
    assert found.reports["first_turn"].mi_seq_estimate == pytest.approx(math.log(8))
    # Turn 1 has log 8, the three later turns 0.
    assert found.reports["observation_swap"].mi_seq_estimate == pytest.approx(math.log(8) / 4)


def test_single_turns_follow_the_first_turn_and_cost_no_second_scoring():
    found = look(with_turns(READS, lambda turns: turns[:1]), reads_the_board)
    assert list(found.reports) == ["first_turn", "trajectory"]
    assert found.environments["toy"].view == "first_turn"
    assert found.skipped == {}
    alone = look(
        with_turns(READS, lambda turns: turns[:1]), reads_the_board, views=("observation_swap",)
    )
    assert alone.environments["toy"].view == "observation_swap"


def test_a_recorder_that_does_not_know_observations_is_told_so():
    unknown = with_turns(
        READS, lambda turns: tuple(replace(turn, observation_start=None) for turn in turns)
    )
    found = look(unknown, reads_the_board)
    assert "set Turn.observation_start" in found.skipped["observation_swap"]
    assert found.environments["toy"].view == "first_turn"


def test_every_observation_has_the_group_that_saw_it():
    groups = make_groups(lambda task: [WORD] * NUM_TURNS, group_size=2)
    pairs = observation_swap_pairs(groups, num_prompts=8, num_pairs=32)
    for observed, owners in zip(pairs.observations, pairs.owners, strict=True):
        assert [int(each.ids[-1]) % 100 % 8 for (each,) in observed] == list(owners)
    of_rows = [pairs.owners[b][j] for b, j in zip(pairs.blocks, pairs.columns, strict=True)]
    assert of_rows == [pair.group_id for pair in pairs.pairs]


def test_tasks_of_columns_that_do_not_fit_are_refused():
    logp, lengths = [[-1.0, -2.0], [-2.0, -1.0]], [1, 1]
    with pytest.raises(MooredError, match=r"column of each block, \(1, 2\), got \(1, 3\)"):
        information(logp, [0, 1], lengths, tasks=[0, 1], column_tasks=[[0, 1, 2]])
    known = information(logp, [0, 1], lengths, tasks=[0, 1], column_tasks=[[0, 1]])
    assert known == information(logp, [0, 1], lengths, tasks=[0, 1])
