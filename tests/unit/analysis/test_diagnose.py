"""From drawn looks to a verdict, with a score function whose dependence is known."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from moored.analysis.diagnose import LookOptions, Meter, diagnose, draw, plan
from moored.analysis.diagnosis import Diagnosis
from moored.analysis.findings import curve_table, headline, notes, step_table
from moored.analysis.scorers import Encoder, Scorer, Scorers
from moored.diagnostics.report import Regime, Verdict
from moored.errors import TooFewPromptsError
from moored.files.records import Exchange, Record
from moored.types import Prompt, ScoreRequest


def score_one(prompt: Prompt, continuations) -> list[np.ndarray]:
    """The first id of a continuation names its author, the second how much it shows, in %.

    Noise depends on both, as a model's would.
    """
    found = []
    for ids in continuations:
        noise = np.random.default_rng([*prompt.ids.tolist(), *ids.tolist()]).normal(
            0, 0.3, len(ids)
        )
        found.append(-3.0 + noise + (prompt.ids[0] == ids[0]) * ids[1] / 100)
    return found


def score(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
    return [score_one(request.prompt, request.continuations) for request in requests]


SCORER = Scorer(name="toy", score=score, encoder=Encoder(None), shares_prompt=True)


def record(
    prompt: int,
    author: int,
    strength: int,
    serial: int,
    step: int | None = 0,
    env: str | None = None,
) -> Record:
    ids = np.array([author, strength, serial, serial + 1, serial + 2])
    return Record(step=step, prompt=np.array([prompt]), response=ids, think=(0, 5), env=env)


def look_at(rows, num_prompts=None, window: int | None = 1, scorer=SCORER, **options) -> Diagnosis:
    sizes = {"num_prompts": num_prompts, "num_pairs": 32, "draws": 200, "window": window}
    made = LookOptions(**sizes | options)
    return diagnose(draw(rows, made), Scorers.single(scorer), made)


def test_p_values_are_uniform_on_shuffled_pairs_and_tiny_on_true_ones():
    null, true = [], []
    for case in range(40):
        authors = np.repeat(np.arange(6), 4)
        shuffled = np.random.default_rng(case).permutation(authors)
        for kept, prompts in ((null, shuffled), (true, authors)):
            rows = [
                record(int(p), int(a), 100, 1000 * case + 10 * k)
                for k, (p, a) in enumerate(zip(prompts, authors, strict=True))
            ]
            kept.append(look_at(rows, seed=case).worst.looks[0].report.p_values["mi_estimate"])
    ordered = np.sort(null)
    steps = np.arange(1, 41) / 40
    distance = max(np.abs(ordered - steps).max(), np.abs(ordered - steps + 1 / 40).max())
    # Kolmogorov-Smirnov at 1 %, n = 40.
    assert distance < 0.258
    assert max(true) < 0.01


def test_a_collapsed_model_is_at_chance_and_an_honest_one_is_not():
    def rows(strength: int) -> list[Record]:
        return [record(k % 16, k % 16, strength, 10 * k) for k in range(128)]

    collapsed, honest = (
        look_at(rows(strength), 16, num_pairs=128).worst.looks[0] for strength in (0, 200)
    )
    assert (collapsed.verdict, honest.verdict) == (Verdict.COLLAPSED, Verdict.HEALTHY)
    assert collapsed.regime is Regime.TEMPLATE_COLLAPSE and honest.regime is Regime.DIVERSE
    interval = collapsed.report.intervals["retrieval_accuracy"]
    assert interval.low <= 1 / 16 <= interval.high
    assert honest.report.retrieval_accuracy > 0.9


def test_an_alarm_names_the_step_after_which_prompts_no_longer_tell():
    rows = [
        record(k % 8, k % 8, 100 if step < 10 else 5, 100 * step + k, step)
        for step in range(20)
        for k in range(32)
    ]
    found = look_at(rows).worst
    assert [look.step for look in found.looks] == list(range(20))
    assert found.alarm is not None and 10 <= found.alarm.step <= 15
    assert found.alarm.kind is Regime.TEMPLATE_COLLAPSE
    healthy = look_at([r for r in rows if r.step is not None and r.step < 10]).worst
    assert healthy.alarm is None


def test_steps_with_fewer_prompts_than_the_median_are_skipped_and_named():
    rows = [record(k % 6, k % 6, 100, k, step) for step in range(3) for k in range(12)]
    rows += [record(k % 2, k % 2, 100, k, 9) for k in range(12)]
    found = look_at(rows).worst
    assert [look.report.num_prompts for look in found.looks] == [6, 6, 6]
    assert "needs 6 distinct prompts with a reasoning, got 2" in found.skipped["9"]


def test_one_prompt_only_and_no_tags_at_all_say_what_to_do():
    one = [record(1, 1, 100, k, step) for step in range(2) for k in range(9)]
    with pytest.raises(TooFewPromptsError, match=r"needs 2 .* got 1 in 9 rows; .*of several"):
        look_at(one)
    thin = [record(k, k, 100, k, step) for step, k in enumerate((1, 2))]
    with pytest.raises(TooFewPromptsError, match=r"needs 2 .* got 1 in 1 rows; .*--window"):
        look_at(thin)
    bare = [Record(step=None, prompt="a", response="b", think=None) for _ in range(3)]
    with pytest.raises(TooFewPromptsError, match=r"no response holds .*--tags .*--turn"):
        look_at(bare)
    empty = [Record(step=None, prompt=p, response="<think> </think>", think=(7, 8)) for p in "ab"]
    with pytest.raises(TooFewPromptsError, match=r"got 0 in 2 rows \(0 without tags, 2 empty\)"):
        look_at(empty)
    with pytest.raises(TooFewPromptsError, match="no rows"):
        look_at([])


def shown(item, width: int = 140) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(item)
    return console.export_text()


def test_everything_is_json_and_tables_show_intervals_chance_and_alarm():
    rows = [
        record(k % 8, k % 8, 100 if step < 8 else 0, 100 * step + k, step)
        for step in range(16)
        for k in range(32)
    ]
    found = look_at(rows)
    series = found.worst
    (stored,) = json.loads(json.dumps(found.to_dict()))["environments"]
    assert series.alarm is not None and stored["alarm"]["step"] == series.alarm.step
    first = stored["looks"][0]
    assert first["report"]["intervals"]["mi_estimate"]["low"] < first["report"]["mi_estimate"]
    assert set(first) >= {"step", "verdict", "why", "regime", "rewards"}
    wide, narrow = shown(curve_table(series, 140)), shown(curve_table(series, 80))
    assert wide.count("◀ ALARM") == 1 and "…" in wide and "…" not in narrow
    smallest = shown(curve_table(series, 40), width=40)
    assert "MI/token  retrieval  verdict" in smallest and "…" not in smallest
    assert "…" not in shown(step_table(series.looks[0], 40), width=40)
    one = shown(step_table(series.looks[0], 140))
    assert "retrieval among the best 4" in one and "0.125" in one
    assert any("ALARM at step" in note.text for note in notes(found))
    single = look_at([r for r in rows if r.step == 0])
    assert not any("alarm" in note.text.lower() for note in notes(single))


def test_environments_with_one_fixed_template_each_are_collapsed_and_not_pooled():
    """A template tells its environment and nothing else: pooled, its MI would be log 2."""

    def of_template(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        # Prompts 0 to 7 are of the environment that writes template 0, the others of the second.
        return [
            [
                np.full(len(ids), -1.0 - 9.0 * (r.prompt.ids[0] // 8 != ids[0]))
                for ids in r.continuations
            ]
            for r in requests
        ]

    scorer = replace(SCORER, score=of_template)
    rows = [record(k % 16, k % 16 // 8, 0, 0, env=f"e{k % 16 // 8}") for k in range(128)]
    apart = look_at(rows, num_pairs=64, scorer=scorer)
    assert [series.env for series in apart.series] == ["e0", "e1"]
    assert [series.looks[0].report.mi_seq_estimate for series in apart.series] == [0.0, 0.0]
    assert apart.verdict is Verdict.COLLAPSED
    pooled = look_at([replace(row, env=None) for row in rows], num_pairs=64, scorer=scorer)
    assert pooled.worst.looks[0].report.mi_seq_estimate == pytest.approx(np.log(2))


def test_one_collapsed_environment_makes_the_whole_collapsed_and_is_named():
    rows = [
        record(k % 8, k % 8, 200 if env == "maze" else 0, 10 * k + len(env), env=env)
        for env in ("maze", "sums")
        for k in range(64)
    ]
    found = look_at(rows, num_pairs=64)
    assert found.verdict is Verdict.COLLAPSED and found.worst.env == "sums"
    assert [series.verdict for series in found.series] == [Verdict.HEALTHY, Verdict.COLLAPSED]
    assert headline(found).text == "Collapsed since step 0 in sums; healthy in maze"


def test_an_environment_of_one_prompt_is_not_passed_over_in_silence():
    rows = [record(k % 8, k % 8, 200, k, env="maze") for k in range(64)]
    rows += [record(0, 0, 200, 100 + k, env="sums") for k in range(8)]
    found = look_at(rows, num_pairs=64)
    assert [series.verdict for series in found.series] == [Verdict.HEALTHY]
    assert found.verdict is Verdict.CANNOT_TELL
    assert headline(found).text == "Healthy in maze; not measured in sums"
    assert found.unmeasured["sums"].startswith("step 0 needs 2 distinct prompts with a reasoning")


def test_two_prompts_per_step_never_make_a_verdict_and_pooled_steps_do():
    rows = [
        record(2 * step + k % 2, 2 * step + k % 2, 100, 100 * step + k, step)
        for step in range(16)
        for k in range(8)
    ]
    alone, together = look_at(rows, draws=200), look_at(rows, window=None)
    assert {look.report.num_prompts for look in alone.worst.looks} == {2}
    assert Verdict.COLLAPSED not in {look.verdict for look in alone.worst.looks}
    assert [look.label for look in together.worst.looks] == ["0–3", "4–7", "8–11", "12–15"]
    assert together.verdict is Verdict.HEALTHY


def score_own_or_any(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
    """A reasoning that begins with 9 is as likely under any prompt, others under their own only."""

    def logp(prompt: Prompt, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), -1.0 if ids[0] in (9, prompt.ids[0]) else -100.0)

    return [[logp(r.prompt, ids) for ids in r.continuations] for r in requests]


def paid(prompt: int, author: int, reward: float, step: int | None = None) -> Record:
    row = record(prompt, author, 0, 0, step)
    return replace(row, rewards={"reward": reward})


def worth_notes(found: Diagnosis) -> list[str]:
    return [note.text for note in notes(found) if "earn more?" in note.text]


def test_what_dependence_earns_by_hand():
    # Gains are log 2 for authors 0 and 1, else 0. In units of log 2 and centred, prompt 0 has
    # -1/2, 1/2 and the same rewards; prompt 1 has 1/3, 1/3, -2/3 and rewards 2/3, -1/3, -1/3.
    rows = [paid(0, 9, 0), paid(0, 0, 1), paid(1, 1, 1), paid(1, 1, 0), paid(1, 9, 0)]
    scorer = replace(SCORER, score=score_own_or_any)
    found = look_at(rows, scorer=scorer)
    (look,) = found.to_dict()["environments"][0]["looks"]  # pyright: ignore
    # (1/2 + 1/3) / √((1/2 + 2/3)²) = 5/7. Without prompt 0: 1/2; without prompt 1: 1.
    assert look["worth"] == {
        "gain_reward_correlation": pytest.approx(5 / 7),
        "gain_reward_correlation_se": pytest.approx(1 / 4),
        "num_rewarded_prompts": 2.0,
    }
    assert worth_notes(found) == [
        "does reasoning that depends more on its prompt earn more? correlation inside prompts "
        "0.714 (2 prompts, standard error 0.250)"
    ]
    one = look_at([*rows[:2], paid(1, 1, 1)], scorer=scorer)
    assert worth_notes(one)[0].endswith(" 1.000 (1 prompt)")


def test_nothing_is_said_of_what_dependence_earns_where_rewards_are_equal_or_not_known():
    rows = [paid(k % 2, (9, k % 2)[k % 3 == 0], 1) for k in range(12)]
    for given in (rows, [replace(row, rewards={}) for row in rows]):
        found = look_at(given, scorer=replace(SCORER, score=score_own_or_any))
        assert found.worst.looks[0].worth is None and worth_notes(found) == []


def test_replies_to_a_prompt_in_two_pooled_steps_are_not_compared():
    """A policy that came to depend on prompts and to succeed would seem to be paid for it."""
    rows = [paid(p, (9, p)[step], step, step) for step in (0, 1) for p in (0, 1) for _ in range(3)]
    found = look_at(rows, window=2, scorer=replace(SCORER, score=score_own_or_any))
    assert found.worst.looks[0].label == "0–1" and worth_notes(found) == []


def test_a_look_knows_how_far_the_weights_are_that_scored_it():
    rows = [record(k % 8, k % 8, 200, 10 * k, step) for step in (1, 5, 30) for k in range(32)]
    options = LookOptions(num_prompts=8, num_pairs=32, window=1, draws=20)
    scorers = Scorers("toy", 1.0, lambda _: SCORER, (4, 10))
    found = diagnose(draw(rows, options), scorers, options)
    assert [look.steps_away for look in found.worst.looks] == [3, 1, 20]
    assert found.verdict is Verdict.CANNOT_TELL
    assert look_at(rows, 8).verdict is Verdict.HEALTHY


def dialogue(task: int, member: int, shown: tuple[int, ...]) -> Record:
    """An episode whose reasoning at turn t names `shown[t]`; each observation is the task."""
    prompt, turns = np.zeros(0, dtype=np.int64), []
    for t, answer in enumerate(shown):
        start, prompt = len(prompt), np.append(prompt, 100 * t + task)
        reply = np.array([answer, member, t])
        turns.append(Exchange(prompt=prompt, response=reply, think=(0, 3), observation_start=start))
        prompt = np.append(prompt, reply)
    first, *later = turns
    return Record(
        step=7,
        prompt=first.prompt,
        response=first.response,
        think=first.think,
        observation_start=0,
        later=tuple(later),
    )


def score_newest(requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
    """A reasoning is likelier by 2 nats a token after the task that it names."""

    def logp(prompt: Prompt, ids: np.ndarray) -> np.ndarray:
        before = [*prompt.ids.tolist(), *ids.tolist()]
        found = []
        for place in range(len(prompt.ids), len(before)):
            named = before[len(prompt.ids) + (len(ids) - 3)]
            newest = [x % 100 for x in before[: len(before) - 3]][-1]
            found.append(-1.0 - 2.0 * (named != newest) - 0.001 * place)
        return np.array(found)

    return [[logp(r.prompt, ids) for ids in r.continuations] for r in requests]


NEWEST = replace(SCORER, score=score_newest)
EPISODES = [dialogue(p, k, (p, p, p)) for p in range(8) for k in range(4)]


def test_episodes_of_several_turns_are_judged_by_swaps_as_in_training():
    found = look_at(EPISODES, num_pairs=32, scorer=NEWEST).worst
    assert found.view == "episode_swap" and set(found.others) == {"first_turn", "observation_swap"}
    assert found.verdict is Verdict.HEALTHY
    copied = [dialogue(p, k, (p, 99, 99)) for p in range(8) for k in range(4)]
    later = look_at(copied, num_pairs=32, scorer=NEWEST).worst
    first, then = (
        view[0].report.mi_seq_estimate
        for view in (later.others["first_turn"], later.others["observation_swap"])
    )
    assert first > 1.5 > then


def test_one_turn_alone_is_measured_under_the_prompts_of_that_turn():
    rows = [
        replace(r, **{name: getattr(r.later[0], name) for name in ("prompt", "response")})
        for r in EPISODES
    ]
    rows = [replace(row, later=()) for row in rows]
    options = LookOptions(num_pairs=32, draws=0)
    found = diagnose(draw(rows, options), Scorers.single(NEWEST), options, view="turn_2").worst
    assert found.view == "turn_2" and not found.others


def test_turns_of_the_last_look_are_measured_one_by_one_and_missing_ones_named():
    rows = [*EPISODES, dialogue(0, 9, (0, 0, 0, 0))]
    options = LookOptions(num_prompts=8, num_pairs=32, draws=0)
    drawn, asked = draw(rows, options), []
    meter = Meter(lambda: asked.append(1))
    found = diagnose(drawn, Scorers.single(NEWEST), options, meter=meter, by_turn=True).worst
    assert [look.turn for look in found.turns] == [1, 2, 3]
    assert "turn_4 view needs at least 2 distinct prompts" in found.skipped_turns[4]
    # What was planned without the model is what the model was asked.
    planned = plan(drawn, NEWEST, options, by_turn=True)
    assert len(asked) == planned.num_requests
    assert planned.token_forwards == meter.token_forwards


def test_a_step_below_zero_is_a_look_like_any_other():
    rows = [record(k % 4, k % 4, 100, k, -1) for k in range(16)]
    assert [look.step for look in look_at(rows, num_pairs=16, draws=0).worst.looks] == [-1]


def test_close_ups_show_what_was_scored():
    rows = [record(k % 4, k % 4, 100, 10 * k, step) for step in (1, 2) for k in range(16)]
    options = LookOptions(num_pairs=16, window=1, draws=0)
    found = diagnose(draw(rows, options), Scorers.single(SCORER), options, closeups=True)
    first, last = found.closeups
    assert (first.name, last.name) == ("Step 1", "Step 2")
    assert sorted(first.prompts) == list("0123") and len(first.reasonings) == 16
    assert first.reasonings[0].startswith(f"{first.prompts[0]} 100 ")
