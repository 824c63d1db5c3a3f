"""The monitor on recorded groups and a toy model whose likelihoods are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest
from PIL import Image

from moored.diagnostics import Regime
from moored.diagnostics.monitor import CollapseMonitor, View
from moored.errors import MooredError
from moored.types import Content, Group, Prompt, ScoreRequest, StopReason, Trajectory, Turn

THINK, END, ANSWER = 1, 2, 3
NEVER = -1e3


@dataclass
class ToyModel:
    """Knows the likelihood of every token; `gap` is what a wrong prompt costs a reasoning.

    Prompts begin with 100 + task. A reasoning holds 10 + task, -1 after the right prompt and
    -1 - gap after any other, and 20 + thought, always -1 - thought / 2. Action 40 + thought is
    certain after its thought and impossible otherwise; after thought 9 every action is as likely
    as not.
    """

    gap: float = 2.0
    seen: list[Prompt] = field(default_factory=list)
    num_calls: int = 0

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        self.num_calls += 1
        self.seen += [request.prompt for request in requests]
        return [[self._logps(r.prompt, ids) for ids in r.continuations] for r in requests]

    def _logps(self, prompt: Prompt, ids: np.ndarray) -> np.ndarray:
        tokens = [*prompt.ids.tolist(), *ids.tolist()]
        start = len(prompt.ids)
        return np.array([self._logp(tokens[:k], tokens[k]) for k in range(start, len(tokens))])

    def _logp(self, before: list[int], token: int) -> float:
        if token >= 40 and 29 in before:
            return math.log(0.5)
        if token >= 40:
            return 0.0 if token - 20 in before else NEVER
        if 10 <= token < 20:
            return -1.0 if token - 10 == before[0] - 100 else -1.0 - self.gap
        if token >= 20:
            return -1.0 - (token - 20) / 2
        return -99.0  # tags are context and must not count


def play(
    task: int, member: int, thoughts: list[int], images: list[Image.Image] | None
) -> Trajectory:
    """One turn per thought; a negative thought is a reply without tags."""
    turns, prompt = [], [100 + task]
    for t, thought in enumerate(thoughts):
        reply = [THINK, 10 + task, 20 + thought, END, ANSWER, 40 + thought, END]
        is_silent = thought < 0
        observation: Content = [{"type": "image", "image": images[t]}] if images else ""
        turns.append(
            Turn(
                prompt=Prompt(np.array(prompt), tuple(images[: t + 1]) if images else ()),
                completion_ids=np.array([END] if is_silent else reply),
                logprobs=np.zeros(1 if is_silent else len(reply)),
                think_span=None if is_silent else (1, 3),
                answer_span=None if is_silent else (5, 6),
                reply="",
                seen=observation,
            )
        )
        prompt = [*prompt, 60 + member, 70 + t]
    return Trajectory(
        env="toy", task_seed=task, episode_seed=member, turns=tuple(turns), stop=StopReason.DONE
    )


def make_group(task: int, *members: list[int], images: list[Image.Image] | None = None) -> Group:
    trajectories = tuple(play(task, i, thoughts, images) for i, thoughts in enumerate(members))
    return Group(group_id=task, env="toy", task_seed=task, trajectories=trajectories)


GROUPS = [make_group(task, [0, 1], [1], [0, 0], [1]) for task in range(4)]
"""Four prompts; every group thinks 0, 1, 0, 1 in its first turns."""
MI_SEQ = math.log(4 / (1 + 3 * math.exp(-2.0)))
MI_TOKEN = math.log(4 / (1 + 3 * math.exp(-1.0)))


def monitor(*views: str, **options) -> CollapseMonitor:
    options.setdefault("score", ToyModel())
    return CollapseMonitor(views=cast(list[View], views), **options)


def test_first_turns_have_the_information_worked_out_by_hand():
    found = monitor("first_turn", num_prompts=4).measure(1, GROUPS)
    prefix = "collapse_first_turn_sample"
    assert found.metrics[f"{prefix}/mi_seq_estimate"] == pytest.approx(MI_SEQ)
    assert found.metrics[f"{prefix}/mi_estimate"] == pytest.approx(MI_TOKEN)
    assert found.metrics[f"{prefix}/conditional_entropy_est"] == pytest.approx(1.125)
    assert found.metrics[f"{prefix}/retrieval_accuracy"] == 1
    assert found.metrics["collapse/valid_thinking_rate"] == 1
    assert (found.step, found.regime, found.alarm) == (1, Regime.DIVERSE, None)
    assert (dict(found.skipped), found.metrics["collapse/num_skipped_views"]) == ({}, 0)


def test_the_scores_that_mi_is_made_of_are_handed_out_per_token():
    found = monitor("first_turn", "trajectory", num_prompts=4).measure(1, GROUPS)
    assert list(found.scores) == ["first_turn"]
    matrix = found.scores["first_turn"]
    own_M = matrix.logp_MN[np.arange(16), matrix.columns_M]
    # Two tokens: -1 for the task, -1 or -1.5 for the thought; a wrong prompt costs 2.
    assert sorted(set(own_M.tolist())) == [-1.25, -1.0]
    others_MN = np.delete(matrix.logp_MN - own_M[:, None], 0, axis=1)
    assert set(others_MN.ravel().tolist()) == {-1.0, 0.0}
    assert not matrix.blocks_M.any()
    gain_M = own_M - np.log(np.exp(matrix.logp_MN).mean(axis=1))
    assert gain_M.mean() == pytest.approx(found.reports["first_turn"].mi_estimate)


def test_every_view_is_measured_under_its_own_name():
    found = monitor("first_turn", "trajectory", "positions").measure(1, GROUPS)
    assert list(found.reports) == ["first_turn", "trajectory", "turn_1", "turn_2"]
    prefixes = {name.split("/")[0] for name in found.metrics}
    assert prefixes == {
        "collapse",
        "collapse_first_turn_sample",
        "collapse_trajectory_sample",
        "collapse_turn_1",
        "collapse_turn_2",
    }
    # Two of four members have a second turn, each after a dialogue of its own.
    assert found.reports["turn_2"].num_prompts == 8
    assert found.reports["turn_1"].num_reasonings == 16


def test_unmeasured_views_take_no_model_calls():
    model = ToyModel()
    monitor("first_turn", score=model).measure(1, GROUPS)
    assert len(model.seen) == 4
    assert monitor(score=model).measure(1, GROUPS).reports == {}
    assert len(model.seen) == 4


def test_a_misspelt_view_is_named():
    with pytest.raises(MooredError, match="did you mean 'first_turn'"):
        monitor("first_trun")


def test_views_that_cannot_be_measured_are_named_and_counted():
    alone = [make_group(0, [0, 1], [1])]
    found = monitor("first_turn", "trajectory", "positions", "chain").measure(3, alone)
    assert set(found.skipped) == {"first_turn", "turn_1", "turn_2", "state_action"}
    assert found.metrics["collapse/num_skipped_views"] == 4
    assert "needs 2 distinct prompts" in found.skipped["first_turn"]
    # A second turn stands after another dialogue, so two prompts remain for this view.
    assert list(found.reports) == ["trajectory"]
    assert not any(name.startswith("collapse_first_turn") for name in found.metrics)


def test_one_view_that_is_skipped_leaves_the_others_alone():
    groups = [*GROUPS, make_group(4, [0, 1, 0])]  # one third turn only
    found = monitor("first_turn", "positions", num_prompts=6).measure(1, groups)
    assert list(found.skipped) == ["first_turn", "turn_3"]
    assert "needs 6 distinct prompts" in found.skipped["first_turn"]
    assert set(found.reports) == {"turn_1", "turn_2"}


def test_the_thinking_rate_is_of_all_turns_as_in_ragen():
    # The first turns all hold a reasoning, one of two second turns and no third one do.
    groups = [make_group(task, [0, -1], [0, 1, -1]) for task in range(3)]
    found = monitor("first_turn").measure(1, groups)
    assert found.metrics["collapse/valid_thinking_rate"] == 3 / 5
    assert found.metrics["collapse/share_unmeasured"] == pytest.approx(2 / 5)


def test_silent_replies_lower_the_thinking_rate_even_when_nothing_can_be_measured():
    groups = [make_group(task, [0], [-1], [-1], [1]) for task in range(3)]
    found = monitor("first_turn").measure(1, groups)
    assert found.metrics["collapse/valid_thinking_rate"] == 0.5
    assert found.reports["first_turn"].num_reasonings == 6
    silent = monitor("first_turn", "chain").measure(1, [make_group(t, [-1]) for t in range(3)])
    assert silent.metrics["collapse/valid_thinking_rate"] == 0
    assert set(silent.skipped) == {"first_turn", "state_action", "reasoning_action"}
    assert (silent.regime, silent.alarm) == (None, None)


def test_the_number_of_prompts_is_fixed_over_a_run():
    watch = monitor("first_turn", num_prompts=3, num_pairs=7)
    for step in range(1, 10):
        report = watch.measure(step, GROUPS).reports["first_turn"]
        assert (report.num_prompts, report.num_reasonings) == (3, 7)


def test_chain_metrics_by_hand():
    # Reasoning: thoughts 0, 1, 0, 1 and, at the second turn, 1, 0 fix their actions: log 2.
    # State: every prompt sees both actions equally often, which chance does less evenly. Of 16
    # first turns 8 have action 0; how many n of a prompt's 4 do is hypergeometric, and its mean of
    # n log n 1.79 instead of 2 log 2 = 1.39; of 8 second turns, 2 each, 0.30 instead of 0.
    metrics = monitor("chain").measure(1, GROUPS).metrics
    assert metrics["collapse_chain/reasoning_action_mi"] == pytest.approx(math.log(2))
    log2, log3 = math.log(2), math.log(3)
    first = (784 * 2 * log2 + 448 * 3 * log3 + 70 * 8 * log2) / 1820
    second = 6 / 28 * 2 * log2
    expected = (8 * (2 * log2 - first) - 8 * second) / 24
    assert metrics["collapse_chain/state_action_mi"] == pytest.approx(expected)
    assert metrics["collapse_chain/state_action_mi_p"] == 1
    assert metrics["collapse_chain/state_action_mi_high"] == 0
    assert metrics["collapse_chain/state_action_share_left_out"] == 0
    assert metrics["collapse_chain/reasoning_action_mi_low"] == pytest.approx(math.log(2))
    assert metrics["collapse_chain/reasoning_action_mi_p"] == 1 / 1000
    # One action per prompt, two prompts of four: log 2, of which chance gives some.
    groups = [make_group(task, *[[task]] * 4) for task in range(2)]
    told = monitor("chain").measure(1, groups)
    mean = (36 * 2 * log2 + 16 * 3 * log3 + 8 * log2) / 70
    assert told.metrics["collapse_chain/state_action_mi"] == pytest.approx(2 * log2 - mean / 2)
    assert "collapse_chain/state_action_mi_low" not in told.metrics
    # Reasonings of a prompt are all alike, so they control nothing.
    assert told.metrics["collapse_chain/reasoning_action_mi"] == 0
    assert told.skipped == {}


def test_the_chain_asks_how_likely_an_action_is_after_other_reasonings():
    # Thought 0 fixes action 0, thought 9 leaves both open. Action 0: 1 against a mixture of 1 and
    # 1/2; action 9: 1/2 against a mixture of 0 and 1/2.
    groups = [make_group(task, [0], [9]) for task in range(2)]
    metrics = monitor("chain").measure(1, groups).metrics
    expected = (math.log(4 / 3) + math.log(2)) / 2
    assert metrics["collapse_chain/reasoning_action_mi"] == pytest.approx(expected)


def test_the_chain_scores_as_many_rollouts_as_it_is_told():
    # The first two of thoughts 0, 0, 0, 1 are alike; all four carry H(3/4, 1/4).
    groups = [make_group(task, [0], [0], [0], [1]) for task in range(2)]
    two = monitor("chain", chain_rollouts=2).measure(1, groups).metrics
    assert two["collapse_chain/reasoning_action_mi"] == 0
    metrics = monitor("chain", chain_rollouts=4).measure(1, groups).metrics
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert metrics["collapse_chain/reasoning_action_mi"] == pytest.approx(entropy)


def test_groups_with_one_first_prompt_are_one_state_of_the_chain():
    twin = replace(GROUPS[0], group_id=99)
    found = monitor("chain").measure(1, [GROUPS[0], twin])
    assert "at least 2 distinct prompts" in found.skipped["state_action"]


def series(watch: CollapseMonitor, gaps, start: int = 1):
    """One measurement for each gap between right and wrong prompts."""
    found = []
    for step, gap in enumerate(gaps, start=start):
        cast(ToyModel, watch.score).gap = float(gap)
        found.append(watch.measure(step, GROUPS))
    return found


def falling_gaps() -> np.ndarray:
    noise = 1 + 0.05 * np.random.default_rng(0).normal(size=40)
    return 4.0 * np.clip(1 - (np.arange(40) - 15) / 15, 0, 1) * noise


def test_simulated_collapse_sets_off_the_alarm_once_while_entropy_stands():
    found = series(monitor("first_turn", num_prompts=4), falling_gaps())
    alarms = [m.alarm for m in found if m.alarm is not None]
    assert len(alarms) == 1
    assert alarms[0].kind is Regime.TEMPLATE_COLLAPSE
    assert 16 <= alarms[0].step <= 32  # the gap falls from step 16 on and is gone at 31
    assert found[0].regime is Regime.DIVERSE
    assert found[-1].regime is Regime.TEMPLATE_COLLAPSE


def test_a_steady_run_raises_no_alarm():
    noise = 1 + 0.05 * np.random.default_rng(1).normal(size=60)
    assert all(m.alarm is None for m in series(monitor("first_turn"), 4.0 * noise))


RESUMED_VIEWS = ("first_turn", "trajectory", "positions", "chain")
RESUMED = {"num_prompts": 3, "num_pairs": 9, "bootstrap": 10, "permutations": 10, "seed": 5}


@pytest.fixture(scope="module")
def unbroken():
    return series(monitor(*RESUMED_VIEWS, **RESUMED), falling_gaps())


@pytest.mark.parametrize("cut", [1, 4, 20, 35])
def test_a_run_resumed_from_json_measures_what_an_unbroken_one_does(cut, unbroken):
    gaps = falling_gaps()
    begun, resumed = (monitor(*RESUMED_VIEWS, **RESUMED) for _ in range(2))
    first = series(begun, gaps[:cut])
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert first == unbroken[:cut]
    assert series(resumed, gaps[cut:], start=cut + 1) == unbroken[cut:]
    assert resumed.alarm is not None  # so that the alarm's own state was needed


def test_looks_know_the_prompts_that_came_before_whatever_their_groups_are_called():
    watch = monitor("first_turn", "trajectory")
    renamed = [replace(group, group_id=100 + group.group_id) for group in GROUPS[:3]]
    new = make_group(7, [0, 1], [1])
    watch.measure(1, GROUPS)
    watch.measure(2, [*renamed, new])
    for view in ("first_turn", "trajectory"):
        looks = watch.state_dict()["watches"]["toy"][view]["verdicts"]["looks"]
        first, second = (set(look["prompts"]) for look in looks)
        assert len(first) == len(second) == 4 and len(first & second) == 3


def test_two_groups_of_one_task_are_one_task_in_every_view():
    twins = [*GROUPS, *(replace(group, group_id=100 + group.group_id) for group in GROUPS)]
    found = monitor("first_turn", "trajectory", "positions").measure(1, twins)
    assert {name: report.num_used_prompts for name, report in found.reports.items()} == {
        "first_turn": 4,
        "trajectory": 4,
        "turn_1": 4,
        "turn_2": 4,
    }


def test_smoothing_goes_on_from_its_own_view_with_its_own_decay():
    begun, resumed = (monitor("first_turn", "trajectory", ema_decay=0.7) for _ in range(2))
    first = begun.measure(1, GROUPS)
    resumed.load_state_dict(begun.state_dict())
    alike = [make_group(task, [0], [0, 0, 0]) for task in range(4)]
    for watch in (begun, resumed):
        second = watch.measure(2, alike)
        assert second.reports["first_turn"].marginal_std == pytest.approx(0)
        for view in ("first_turn", "trajectory"):
            before, now = first.reports[view], second.reports[view]
            sigma = 0.7 * before.marginal_std + 0.3 * now.marginal_std
            assert before.marginal_std > 0.1
            assert now.marginal_std_ema == pytest.approx(sigma)


def test_p_values_come_by_default_and_intervals_when_they_are_asked_for():
    plain = monitor("trajectory").measure(1, GROUPS).reports["trajectory"]
    assert plain.intervals == {} and plain.p_values["mi_estimate"] < 0.05
    none = monitor("trajectory", permutations=0).measure(1, GROUPS).reports["trajectory"]
    assert none.p_values == {}
    asked = monitor("trajectory", bootstrap=20, permutations=19).measure(1, GROUPS)
    report = asked.reports["trajectory"]
    assert report.p_values["mi_estimate"] == 1 / 20
    assert report.intervals["mi_estimate"].low <= report.mi_estimate


def test_regime_and_alarm_follow_one_view_and_never_mix_two():
    watch = monitor("first_turn", "trajectory", num_prompts=4)
    assert watch.measure(1, GROUPS).regime is Regime.DIVERSE
    state = json.dumps(watch.state_dict()["watches"]["toy"]["first_turn"])
    gone = watch.measure(2, GROUPS[:3])  # too few prompts for the view that is followed
    assert "trajectory" in gone.reports
    assert gone.regime is None
    assert json.dumps(watch.state_dict()["watches"]["toy"]["first_turn"]) == state


def test_a_run_that_began_on_another_view_stays_on_it_after_a_resume():
    begun, resumed = (monitor("first_turn", "trajectory", num_prompts=4) for _ in range(2))
    first = begun.measure(1, GROUPS[:3])
    assert list(first.reports) == ["trajectory"]
    assert first.environments["toy"].view == "trajectory"
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    uneven = [*GROUPS[:3], make_group(3, [0, 1, 0, 1, 0, 1])]  # so that the views differ
    for watch in (begun, resumed):
        found = watch.measure(2, uneven)
        followed = [found.reports[view].mi_estimate for view in ("trajectory", "first_turn")]
        assert followed[0] != followed[1]
        state = watch.state_dict()
        assert state["followed"] == {"toy": "trajectory"}
        levels = state["watches"]["toy"]["trajectory"]["alarm"]["mi"]
        assert levels == [
            first.reports["trajectory"].mi_estimate,
            followed[0],
        ]


def test_images_reach_the_model_in_every_view():
    pictures = [Image.new("RGB", (2, 2), colour) for colour in ("red", "lime")]
    groups = [make_group(0, [0], [1], images=[picture]) for picture in pictures]
    model = ToyModel()
    found = monitor("first_turn", "trajectory", "positions", "chain", score=model).measure(
        1, groups
    )
    # The token ids are equal: only the pictures make two prompts of them.
    assert found.skipped == {}
    assert found.reports["first_turn"].num_prompts == 2
    assert {id(prompt.images[0]) for prompt in model.seen} == {id(p) for p in pictures}
    assert all(len(prompt.images) == 1 for prompt in model.seen)


@pytest.mark.parametrize("view", ["first_turn", "trajectory", "chain"])
def test_a_view_asks_the_model_once_for_all_its_prompts(view):
    model = ToyModel()
    monitor(view, score=model).measure(1, GROUPS)
    assert len(model.seen) > model.num_calls == 1


def test_draws_depend_on_seed_and_step_only():
    def drawn(seed: int, step: int) -> bytes:
        model = ToyModel()
        monitor("trajectory", score=model, num_pairs=3, seed=seed).measure(step, GROUPS)
        return b"".join(prompt.key for prompt in model.seen)

    assert drawn(0, 1) == drawn(0, 1)
    assert len({drawn(0, 1), drawn(0, 2), drawn(1, 1)}) == 3


def rewarded(group: Group, rewards: Sequence[float]) -> Group:
    """The same episodes, each with a reward on its last turn."""
    trajectories = []
    for trajectory, reward in zip(group.trajectories, rewards, strict=True):
        last = replace(trajectory.turns[-1], reward=reward)
        trajectories.append(replace(trajectory, turns=(*trajectory.turns[:-1], last)))
    return replace(group, trajectories=tuple(trajectories))


def test_a_look_says_whether_reasoning_that_depends_on_its_prompt_earns_more():
    monitor = CollapseMonitor(score=ToyModel(), views=("first_turn",), num_pairs=16)
    name = "collapse_first_turn_sample/"
    found = monitor.measure(1, GROUPS).metrics
    assert f"{name}gain_reward_correlation" not in found
    # Thoughts 0 and 1 have the same gain, since they are as likely after any prompt.
    paid = [rewarded(group, [1.0, 0.0, 1.0, 0.0]) for group in GROUPS[:3]]
    found = monitor.measure(2, [*paid, GROUPS[3]]).metrics
    assert f"{name}gain_reward_correlation" not in found
    # Members 0 and 2 name the task, 1 and 3 another: gains are high where rewards are.
    other = [make_group(task, [0], [1], [0], [1]) for task in range(4)]
    for group in other:
        for member in (1, 3):
            group.trajectories[member].turns[0].completion_ids[1] = 10 + (group.task_seed + 1) % 4
    paid = [rewarded(group, [1.0, 0.0, 1.0, 0.0]) for group in other[:3]]
    found = monitor.measure(3, [*paid, other[3]]).metrics
    assert found[f"{name}num_rewarded_prompts"] == 3
    assert found[f"{name}gain_reward_correlation"] == pytest.approx(1.0)
    assert found[f"{name}gain_reward_correlation_se"] == pytest.approx(0.0, abs=1e-9)
