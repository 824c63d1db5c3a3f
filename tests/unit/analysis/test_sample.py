"""The draw: uniform over prompts, even over reasonings, bounded, the same for the same seed."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest

from moored.analysis.sample import LowestKeys, draw
from moored.errors import MooredError
from moored.files.records import BadRow, Record


def record(prompt: str, number: int = 0, **fields) -> Record:
    response = f"<think>{number}</think>"
    fields = {"step": 0, "think": (7, len(response) - 8), **fields}
    return Record(prompt=prompt, response=response, **fields)


def texts(drawn, step: int = 0) -> dict[str, list[str]]:
    return {
        prompt.prompt: [r.content[r.start : r.stop] for _, r in prompt.reasonings]
        for prompt in drawn.steps[step].chosen(99)
    }


def test_lowest_keys_keeps_the_lowest_and_never_takes_one_back():
    kept: LowestKeys[int] = LowestKeys(2)
    for place, key in enumerate([b"m", b"z", b"a", b"b", b"z"]):
        kept.slot(key, lambda place=place: place)
    assert kept.values == {b"a": 2, b"b": 3}


def test_reasonings_are_spread_evenly_however_uneven_the_rows_are():
    rows = [record(f"p{k % 4}", k) for k in range(40)] + [record("p0", k) for k in range(500)]
    drawn = draw(rows, num_prompts=4, num_pairs=12)
    assert {name: len(found) for name, found in texts(drawn).items()} == {
        f"p{k}": 3 for k in range(4)
    }


def test_two_prompts_share_all_pairs():
    rows = [record(f"p{k % 2}", k) for k in range(100)]
    assert [len(x) for x in texts(draw(rows, num_prompts=16, num_pairs=10)).values()] == [5, 5]


def test_every_row_of_a_prompt_has_the_same_chance():
    counts: Counter[str] = Counter()
    rows = [record(prompt, k) for prompt in "ab" for k in range(10)]
    for seed in range(400):
        for found in texts(draw(rows, num_prompts=2, num_pairs=4, seed=seed)).values():
            counts.update(found)
    # 400 seeds x 2 prompts x 2 of 10 rows: 160 each, standard deviation 11.
    assert all(115 < counts[str(k)] < 205 for k in range(10)), counts


def test_the_draw_of_prompts_ignores_order_and_follows_the_seed():
    rows = [record(f"p{k}", 0, step=step) for step in (0, 1) for k in range(50)]
    mixed = random.Random(0).sample(rows, len(rows))
    first, second = (draw(r, num_prompts=8, num_pairs=8) for r in (rows, mixed))
    assert texts(first).keys() == texts(second).keys() == texts(first, 1).keys()
    assert texts(draw(rows, num_prompts=8, num_pairs=8, seed=1)).keys() != texts(first).keys()


def test_memory_does_not_grow_with_rows():
    def peak(num_rows: int) -> int:
        rows = (
            record(f"prompt {k % 5000} " + "x" * 2000, k, rewards={"reward": 1.0})
            for k in range(num_rows)
        )
        tracemalloc.start()
        draw(rows, num_prompts=16, num_pairs=64)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few, many = peak(5000), peak(20000)
    assert many < 1.2 * few and many < 4e6


def test_windows_pool_steps_and_steps_come_in_order():
    rows = [record("p", step=step) for step in (25, 3, 12, 19)]
    assert [
        (s.step, s.num_rows) for s in draw(rows, num_prompts=2, num_pairs=2, window=10).steps
    ] == [
        (0, 1),
        (10, 2),
        (20, 1),
    ]
    steps = [s.step or 0 for s in draw(rows, num_prompts=2, num_pairs=2).steps]
    assert all(a < b for a, b in pairwise(steps))


def test_rewards_are_compared_inside_groups_only():
    rewards = {"a": [0.0, 1.0], "b": [5.0, 5.0], "c": [7.0]}
    rows = [record(prompt, rewards={"reward": r}) for prompt, rs in rewards.items() for r in rs]
    found = draw(rows, num_prompts=4, num_pairs=4).steps[0].rewards()
    assert found is not None
    assert found.mean == pytest.approx(3.6)
    # Variances 0.25 and 0; the group of one says nothing.
    assert found.std_in_group == pytest.approx(0.125**0.5)
    assert (found.zero_spread_share, found.num_groups) == (0.5, 3)
    assert draw([record("a")], num_prompts=4, num_pairs=4).steps[0].rewards() is None


def test_replies_without_reasoning_are_counted_not_drawn():
    rows = [record("a"), record("a", think=None), record("a", think=(3, 3))]
    step = draw(rows, num_prompts=4, num_pairs=4).steps[0]
    assert (step.num_rows, step.num_without_reasoning, step.num_empty) == (3, 1, 1)
    assert len(step.chosen(4)[0].reasonings) == 1


def test_bad_rows_stop_the_draw_unless_they_are_torn_or_passed_over():
    torn, bad = BadRow("f, line 9", "is not JSON", is_torn=True), BadRow("f, line 2", "is bad")
    assert draw([record("a"), torn], num_prompts=2, num_pairs=2).num_torn == 1
    with pytest.raises(MooredError, match=r"line 2 is bad; .*--skip-bad"):
        draw([record("a"), bad], num_prompts=2, num_pairs=2)
    found = draw([bad, record("a"), torn], num_prompts=2, num_pairs=2, skip_bad=True)
    assert (found.num_bad, found.num_torn, found.steps[0].num_rows) == (1, 1, 1)
