"""The draw: uniform over prompts, even over reasonings, bounded, the same for the same seed."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from moored.analysis import diagnose
from moored.analysis.diagnose import Draw, LookOptions, LowestKeys
from moored.errors import MooredError
from moored.files.records import BadRow, Exchange, Record


def draw(rows, num_prompts: int, num_pairs: int, window: int | None = 1, **options) -> Draw:
    options = {"num_prompts": num_prompts, "num_pairs": num_pairs, "window": window, **options}
    return diagnose.draw(rows, LookOptions(**options))


def record(prompt: str, number: int = 0, **fields) -> Record:
    response = f"<think>{number}</think>"
    fields = {"step": 0, "think": (7, len(response) - 8), **fields}
    return Record(prompt=prompt, response=response, **fields)


def texts(drawn, step: int = 0) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for episode in drawn.looks[step].chosen(99):
        (turn,) = episode.turns
        found.setdefault(turn.prompt, []).append(turn.response[slice(*turn.think)])
    return found


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
    assert [len(x) for x in texts(draw(rows, num_prompts=8, num_pairs=10)).values()] == [5, 5]


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


def pooled(steps, window, prompts_per_step: int = 1):
    rows = [record(f"{step} {k}", step=step) for step in steps for k in range(prompts_per_step)]
    return draw(rows, num_prompts=16, num_pairs=16, window=window).looks


def test_a_window_pools_stored_steps_and_is_labelled_by_the_steps_it_holds():
    looks = pooled(range(32, 0, -1), 8)
    assert [look.label for look in looks] == ["1–8", "9–16", "17–24", "25–32"]
    assert [(look.num_rows, look.step) for look in looks] == [(8, 8), (8, 16), (8, 24), (8, 32)]


def test_steps_that_were_stored_with_gaps_are_pooled_too():
    looks = pooled(range(10, 80, 10), 3)
    assert [look.label for look in looks] == ["10–30", "40–60", "70"]
    assert [look.num_rows for look in looks] == [3, 3, 1]


def test_without_a_window_steps_with_few_prompts_are_pooled_until_there_are_eight():
    assert [look.label for look in pooled(range(1, 9), None, 2)] == ["1–4", "5–8"]
    assert [look.label for look in pooled(range(1, 4), None, 8)] == ["1", "2", "3"]
    # All steps together have six: more cannot be had.
    assert [look.label for look in pooled(range(1, 4), None, 2)] == ["1–3"]


def test_thousands_of_steps_of_few_prompts_are_pooled_once(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(diagnose, "_pool", lambda looks: calls.append(len(looks)) or looks[0])
    rows = [record(f"prompt {step % 3}", step=step) for step in range(1000)]
    # Three prompts are all there are, and three steps have them.
    assert len(draw(rows, num_prompts=16, num_pairs=16, window=None).looks) == 334
    assert calls == [3] * 333 + [1]


def test_pooled_steps_are_what_one_draw_of_all_rows_would_be():
    rows = [record(f"p{k % 12}", k, step=k // 40) for k in range(120)]
    together = [replace(row, step=None) for row in rows]
    pooled_rows = texts(draw(rows, num_prompts=8, num_pairs=24, window=3))
    assert pooled_rows == texts(draw(together, num_prompts=8, num_pairs=24))
    assert [len(found) for found in pooled_rows.values()] == [3] * 8


def test_environments_are_drawn_apart():
    rows = [record("p", step=step, env=env) for step in (2, 1) for env in ("maze", "sums")]
    found = draw(rows, num_prompts=2, num_pairs=2)
    assert {env: [look.step for look in looks] for env, looks in found.series.items()} == {
        "maze": [1, 2],
        "sums": [1, 2],
    }


def test_rewards_are_compared_inside_groups_only():
    rewards = {"a": [0.0, 1.0], "b": [5.0, 5.0], "c": [7.0]}
    rows = [record(prompt, rewards={"reward": r}) for prompt, rs in rewards.items() for r in rs]
    found = draw(rows, num_prompts=4, num_pairs=4).looks[0].rewards()
    assert found is not None
    assert found.mean == pytest.approx(3.6)
    # Variances 0.25 and 0; the group of one says nothing.
    assert found.std_in_group == pytest.approx(0.125**0.5)
    assert (found.zero_spread_share, found.num_compared, found.num_groups) == (0.5, 2, 3)
    assert draw([record("a")], num_prompts=4, num_pairs=4).looks[0].rewards() is None


def test_rewards_that_were_summed_in_float32_have_no_spread():
    other = float(np.cumsum(np.full(10, -0.1, np.float32))[-1])
    assert other != -1.0
    rewards = {"a": [-1.0, other], "b": [1.0, 1.001], "c": [0.0, 1e-6]}
    rows = [record(prompt, rewards={"reward": r}) for prompt, rs in rewards.items() for r in rs]
    found = draw(rows, num_prompts=4, num_pairs=4).looks[0].rewards()
    assert found is not None and found.zero_spread_share == pytest.approx(1 / 3)


def test_replies_without_reasoning_are_counted_not_drawn():
    rows = [record("a"), record("a", think=None), record("a", think=(3, 3))]
    step = draw(rows, num_prompts=4, num_pairs=4).looks[0]
    assert (step.num_rows, step.num_without_reasoning, step.num_empty) == (3, 1, 1)
    assert len(step.chosen(4)) == 1


def test_bad_rows_stop_the_draw_unless_they_are_torn_or_passed_over():
    torn, bad = BadRow("f, line 9", "is not JSON", is_torn=True), BadRow("f, line 2", "is bad")
    assert draw([record("a"), torn], num_prompts=2, num_pairs=2).num_torn == 1
    with pytest.raises(MooredError, match=r"line 2 is bad; .*--skip-bad"):
        draw([record("a"), bad], num_prompts=2, num_pairs=2)
    found = draw([bad, record("a"), torn], num_prompts=2, num_pairs=2, skip_bad=True)
    assert (found.num_bad, found.num_torn, found.looks[0].num_rows) == (1, 1, 1)


def test_an_episode_is_kept_with_all_turns_where_any_holds_a_reasoning():
    silent = Exchange(prompt="later", response="no tags")
    rows = [record("a", later=(silent,)), record("b", think=None, later=(silent,))]
    step = draw(rows, num_prompts=2, num_pairs=2).looks[0]
    assert [len(episode.turns) for episode in step.chosen(2)] == [2]
    assert (step.num_rows, step.num_without_reasoning) == (4, 3)
    assert step.valid_thinking_rate == 0.25


def test_ids_of_an_episode_are_kept_once():
    prompts = [np.arange(1, length) for length in (1000, 2000, 3000)]
    first, *later = [Exchange(prompt=ids, response=np.arange(9), think=(0, 1)) for ids in prompts]
    row = Record(
        step=0, prompt=first.prompt, response=first.response, think=(0, 1), later=tuple(later)
    )
    (episode,) = draw([row], num_prompts=2, num_pairs=2).looks[0].chosen(2)
    kept = [turn.prompt for turn in episode.turns]
    assert [len(ids) for ids in kept] == [999, 1999, 2999]
    assert all(np.shares_memory(ids, kept[-1]) for ids in kept)
