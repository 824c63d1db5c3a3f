"""Seven policies whose likelihoods are known, three of which fool the swap of one observation.

A world of 8 boards: the board of turn t is the first one plus t, modulo 8. A board *contradicts*
the dialogue when it does not follow the one before, as after exchanging the newest alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from moored.diagnostics import (
    cross_score,
    episode_swap_pairs,
    information,
    observation_swap_pairs,
)
from moored.diagnostics.monitor import CollapseMonitor
from moored.diagnostics.swap import EPISODE_PROMPTS, SwapSet
from moored.types import Group, ImagePart, Prompt, ScoreRequest, StopReason, Trajectory, Turn

SYSTEM, LOOK, THINK, END, WORD, BOARD = 1, 2, 3, 4, 100, 1000
NUM_BOARDS, NUM_TURNS, NEVER = 8, 4, 1e-20
LOG_8 = math.log(8)
SURE, UNSURE = 0.99, 0.3
# A text of probability 0.99 in its own column and 0.3 in the 7 others: 0.94 nats, by hand.
FOOLED = math.log(SURE) - math.log((SURE + 7 * UNSURE) / 8)

Policy = Callable[[list[int], list[int]], list[float]]
"""Probability of each of the 8 words, given the boards so far and the agent's own words."""


def certain(word: int, probability: float = 1.0 - 7 * NEVER) -> list[float]:
    """One word with a probability, the others alike."""
    rest = (1.0 - probability) / 7 if probability < 1.0 - 7 * NEVER else NEVER
    return [probability if each == word else rest for each in range(8)]


def sureness(boards: Sequence[int]) -> float:
    fits = all((a + 1) % 8 == b for a, b in pairwise(boards))
    return SURE if fits else UNSURE


def copies_its_first_word(boards, words):
    return certain(words[0]) if words else [1 / 8] * 8


def names_the_newest_board_mostly(boards, words):
    return certain(boards[-1], 0.7 + 0.3 / 8)


def names_the_first_board_for_ever(boards, words):
    return certain(boards[0])


def one_text_per_turn_number(boards, words):
    return certain(len(boards))


def one_text_less_likely_if_contradicted(boards, words):
    return certain(0, sureness(boards))


def copies_less_likely_if_contradicted(boards, words):
    return certain(words[0], sureness(boards)) if words else [1 / 8] * 8


def names_the_newest_less_sure_if_contradicted(boards, words):
    return certain(boards[-1], sureness(boards))


def score_with(policy: Policy):
    def logp(before: list[int], token: int) -> float:
        if not WORD <= token < BOARD:
            return -99.0  # observations and tags are context and must not count
        boards = [t - BOARD for t in before if t >= BOARD]
        words = [t - WORD for t in before if WORD <= t < BOARD]
        return math.log(policy([b % 10 for b in boards], words)[token - WORD])

    def logps(prompt: list[int], ids: list[int]) -> np.ndarray:
        return np.array([logp(prompt + ids[:k], token) for k, token in enumerate(ids)])

    def score(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [
            [logps(r.prompt.ids.tolist(), ids.tolist()) for ids in r.continuations]
            for r in requests
        ]

    return score


def play(task: int, member: int, words: Sequence[int], *, copy: int = 0) -> Trajectory:
    """A board with another `copy` number shows the same in other tokens, from turn 2 on."""
    stream, turns = [SYSTEM], []
    for t, word in enumerate(words):
        start = len(stream)
        stream += [LOOK, BOARD + (10 * copy if t else 0) + (task + t) % 8]
        reply = [THINK, WORD + word, END]
        turns.append(
            Turn(
                prompt=Prompt(np.array(stream)),
                completion_ids=np.array(reply),
                logprobs=np.zeros(3),
                think_span=(1, 2),
                reply="",
                observation_start=start,
            )
        )
        stream = [*stream, *reply]
    return Trajectory(
        env="toy", task_seed=task, episode_seed=member, turns=tuple(turns), stop=StopReason.DONE
    )


def make_groups(
    words: Callable[[int, int], list[int]], group_size: int = 1, *, copies: bool = True
) -> list[Group]:
    return [
        Group(
            group_id=task,
            env="toy",
            task_seed=task,
            trajectories=tuple(
                play(task, i, words(task, i), copy=copies * i) for i in range(group_size)
            ),
        )
        for task in range(NUM_BOARDS)
    ]


def likeliest(policy: Policy) -> list[Group]:
    """Each trajectory writes the likeliest words; task numbers stand for random ones."""

    def words(task: int, member: int) -> list[int]:
        written: list[int] = []
        for t in range(NUM_TURNS):
            p = policy([(task + s) % 8 for s in range(t + 1)], written)
            written.append(task if min(p) == max(p) else int(np.argmax(p)))
        return written

    return make_groups(words)


def by_turn(pairs: SwapSet, policy: Policy, *, control: bool) -> list[float]:
    """MI of each turn number."""
    own, other = pairs.split(cross_score(pairs, score_with(policy)))
    found = []
    for turn in range(NUM_TURNS):
        rows = pairs.turns == turn
        report = information(
            own[rows],
            pairs.columns[rows],
            pairs.lengths[rows],
            blocks=pairs.blocks[rows],
            control=other.rows(rows) if control else None,
            permutations=0,
        )
        found.append(report.mi_estimate)
    return found


NEWEST_IF_UNSURE = math.log(SURE) - math.log((SURE + 7 * (1 - UNSURE) / 7) / 8)
SEVEN = {
    # policy: newest observation alone, the same controlled, all observations controlled
    copies_its_first_word: ([0.0] * 4, [0.0] * 4, [0.0] * 4),
    names_the_first_board_for_ever: ([LOG_8, 0, 0, 0], [LOG_8, 0, 0, 0], [LOG_8] * 4),
    one_text_per_turn_number: ([0.0] * 4, [0.0] * 4, [0.0] * 4),
    one_text_less_likely_if_contradicted: ([0.0] + [FOOLED] * 3, [0.0] * 4, [0.0] * 4),
    copies_less_likely_if_contradicted: (
        [0.0] + [FOOLED] * 3,
        [0.0] + [FOOLED] * 3,
        [0.0] * 4,
    ),
    names_the_newest_less_sure_if_contradicted: (
        [LOG_8 + math.log(SURE)] + [NEWEST_IF_UNSURE] * 3,
        [LOG_8 + math.log(SURE)] + [NEWEST_IF_UNSURE] * 3,
        [LOG_8 + math.log(SURE)] * 4,
    ),
}


@pytest.mark.parametrize("policy", SEVEN, ids=lambda policy: policy.__name__)
def test_policies_get_what_they_use_of_the_observations(policy):
    groups, (newest, controlled, episode) = likeliest(policy), SEVEN[policy]
    pairs = observation_swap_pairs(groups, num_prompts=8)
    assert by_turn(pairs, policy, control=False) == pytest.approx(newest, abs=1e-9)
    assert by_turn(pairs, policy, control=True) == pytest.approx(controlled, abs=1e-9)
    pairs = episode_swap_pairs(groups, num_prompts=8)
    assert by_turn(pairs, policy, control=True) == pytest.approx(episode, abs=1e-9)


def test_a_noisy_reader_has_the_information_of_its_channel():
    """80 members write what has probability 0.7375 in 59 cases and each other word in 3."""
    drawn = np.repeat(np.arange(8), [59] + [3] * 7)
    p = np.array([0.7375] + [0.0375] * 7)
    channel = LOG_8 + float((p * np.log(p)).sum())
    assert channel == pytest.approx(0.99, abs=0.005)
    for draw, copies in ((observation_swap_pairs, False), (episode_swap_pairs, True)):
        groups = make_groups(
            lambda task, i: [int(task + t + drawn[i]) % 8 for t in range(4)], 80, copies=copies
        )
        pairs = draw(groups, num_prompts=8, num_pairs=4 * 640)
        found = by_turn(pairs, names_the_newest_board_mostly, control=True)
        assert found[1:] == pytest.approx([channel] * 3, abs=1e-9), draw


def test_the_monitor_is_not_fooled_by_a_text_that_hesitates_where_boards_contradict():
    policy = one_text_less_likely_if_contradicted
    found = CollapseMonitor(score=score_with(policy), num_prompts=8).measure(1, likeliest(policy))
    assert found.environments["toy"].view == "episode_swap"
    assert found.verdict == "collapsed"
    prefix = "collapse_observation_swap_sample"
    assert found.metrics[f"{prefix}/mi_control"] == pytest.approx(0.75 * FOOLED)
    assert found.metrics[f"{prefix}/mi_estimate"] == pytest.approx(0.0, abs=1e-9)
    assert found.metrics[f"{prefix}/retrieval_accuracy"] == pytest.approx(1 / 8)


def test_each_turn_number_is_logged():
    policy = names_the_first_board_for_ever
    found = CollapseMonitor(score=score_with(policy), num_prompts=8).measure(1, likeliest(policy))
    for view, later in (("observation", 0.0), ("episode", LOG_8)):
        name = f"collapse_{view}_swap_sample/turn_{{}}/mi_estimate"
        by_number = [found.metrics[name.format(t)] for t in (1, 2, 3, 4)]
        assert by_number == pytest.approx([LOG_8, later, later, later], abs=1e-9)


def test_health_that_rests_on_the_first_observation_says_so():
    for policy, rests in (
        (names_the_first_board_for_ever, True),
        (names_the_newest_less_sure_if_contradicted, False),
    ):
        monitor = CollapseMonitor(score=score_with(policy), num_prompts=8)
        look = monitor.measure(1, likeliest(policy)).environments["toy"]
        assert look.verdict == "healthy"
        assert ("from turn 2 on it does not follow the newest" in look.why) is rests


def test_views_that_disagree_in_kind_cannot_tell():
    """A text that fits its own dialogue only from turn 2 on, in whatever way, is not at turn 1."""

    def late(boards, words):
        return certain(0) if len(boards) == 1 else certain(boards[-1])

    found = CollapseMonitor(score=score_with(late), num_prompts=8).measure(1, likeliest(late))
    look = found.environments["toy"]
    assert (look.verdict, look.regime) == ("cannot_tell", None)
    assert "The views disagree: episode swap says healthy (MI 1.56 nats a token" in look.why
    assert "first turn says collapsed (MI 0.00" in look.why


def test_copying_its_own_history_is_no_disagreement():
    policy = copies_its_first_word
    found = CollapseMonitor(score=score_with(policy), num_prompts=8).measure(1, likeliest(policy))
    assert found.reports["trajectory"].verdict == "healthy"
    assert found.verdict == "collapsed"


def test_own_contexts_are_the_prompts_and_others_keep_the_agents_own_replies():
    groups = make_groups(lambda task, i: [(task + i) % 8] * NUM_TURNS, 2)
    pairs = episode_swap_pairs(groups, num_prompts=8)
    for m, pair in enumerate(pairs.pairs):
        own = int(pairs.columns[m])
        assert pairs.context(m, own).ids.tolist() == pair.prompt.ids.tolist()
        other = pairs.context(m, (own + 1) % 8).ids.tolist()
        written = [t for t in pair.prompt.ids.tolist() if WORD <= t < BOARD]
        assert [t for t in other if WORD <= t < BOARD] == written
        boards = [(t - BOARD) % 10 for t in other if t >= BOARD]
        assert sureness(boards) == SURE  # the boards of one other episode
        assert boards[0] != pair.group_id


def test_a_block_has_one_episode_of_each_task_and_its_control_is_of_another_task():
    groups = make_groups(lambda task, i: [task] * NUM_TURNS, 3)
    pairs = episode_swap_pairs(groups, num_prompts=8, num_pairs=64)
    assert all(sorted(row) == list(range(8)) for row in pairs.owners)
    controls = [control.group_id for control in pairs.controls if control is not None]
    assert len(controls) == len(pairs.pairs)
    assert all(c != p.group_id for c, p in zip(controls, pairs.pairs, strict=True))
    assert [c.turn for c in pairs.controls if c] == pairs.turns.tolist()


def test_cost_is_bounded_whatever_the_batch():
    """At most 8 columns and 40 rows, spread evenly over turn numbers."""
    groups = make_groups(lambda task, i: [task] * 9, 4)
    pairs = episode_swap_pairs(groups, num_prompts=8)
    assert pairs.shape == (80, EPISODE_PROMPTS)
    assert np.unique(pairs.turns).tolist() == [0, 2, 4, 6, 8]
    contexts = {ask.request.prompt.key for ask in pairs.asks()}
    assert len(contexts) == 8 + 4 * 64  # at turn 1 rows share the contexts of their columns


def test_a_prompt_that_does_not_go_on_from_the_turn_before_ends_the_episode():
    groups = make_groups(lambda task, i: [task] * NUM_TURNS)

    def cut(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        shorter = replace(turns[2], prompt=Prompt(turns[2].prompt.ids[3:]), observation_start=4)
        return (*turns[:2], shorter, turns[3])

    groups = [
        replace(g, trajectories=tuple(replace(t, turns=cut(t.turns)) for t in g.trajectories))
        for g in groups
    ]
    pairs = episode_swap_pairs(groups, num_prompts=8)
    assert set(pairs.turns.tolist()) == {0, 1}
    assert pairs.share_left_out == 1 / 2


def test_pictures_are_exchanged_with_the_observations_they_belong_to():
    def seen(task: int) -> Group:
        turns, stream, pictures = [], [SYSTEM], []
        for t in range(2):
            picture = Image.new("RGB", (2, 2), (20 * task, 100 * t, 0))
            start, pictures = len(stream), [*pictures, picture]
            stream = [*stream, LOOK]
            turns.append(
                Turn(
                    prompt=Prompt(np.array(stream), tuple(pictures)),
                    completion_ids=np.array([THINK, WORD, END]),
                    logprobs=np.zeros(3),
                    think_span=(1, 2),
                    reply="",
                    seen=[ImagePart(type="image", image=picture)],
                    observation_start=start,
                )
            )
            stream = [*stream, THINK, WORD, END]
        return Group(
            group_id=task,
            env="toy",
            task_seed=task,
            trajectories=(
                Trajectory(
                    env="toy",
                    task_seed=task,
                    episode_seed=0,
                    turns=tuple(turns),
                    stop=StopReason.DONE,
                ),
            ),
        )

    pairs = episode_swap_pairs([seen(0), seen(1)], num_prompts=2)
    later = np.flatnonzero(pairs.turns == 1)
    assert len(later) == 2
    for m in later:
        other = pairs.context(int(m), 1 - int(pairs.columns[m]))
        task = 1 - pairs.pairs[m].group_id
        colours = [image.getpixel((0, 0)) for image in other.images]  # pyright: ignore
        assert colours == [(20 * task, 0, 0), (20 * task, 100, 0)]
