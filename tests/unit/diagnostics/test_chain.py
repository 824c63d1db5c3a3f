"""I(Z;A|X) and I(X;A) worked out by hand."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moored.diagnostics import action_information, reasoning_action_information
from moored.diagnostics.actions import state_action
from moored.diagnostics.chain import Link, reasoning_action
from moored.diagnostics.report import Interval
from moored.errors import MooredError, TooFewPromptsError
from moored.types import Group, Prompt, ScoreRequest, StopReason, Trajectory, Turn


def test_actions_that_ignore_reasoning_carry_nothing():
    scores = [np.repeat([[-1.0], [-2.0]], 2, axis=1)]
    report = reasoning_action_information(scores, permutations=50)
    assert report.mi_nats == pytest.approx(0)
    assert report.p_value == 1


def test_actions_fixed_by_reasoning_carry_log_k():
    block = np.full((4, 4), -1e3)
    np.fill_diagonal(block, 0.0)
    report = reasoning_action_information([block] * 3, permutations=99)
    assert report.mi_nats == pytest.approx(math.log(4))
    assert report.mi_upper_bound == pytest.approx(math.log(4))
    assert report.p_value == 0.01
    assert report.interval is not None
    assert report.interval.low == pytest.approx(math.log(4))


def test_mean_is_over_actions_of_all_prompts():
    block = np.full((2, 2), -1e3)
    np.fill_diagonal(block, 0.0)
    flat = np.zeros((3, 3))
    report = reasoning_action_information([block, flat])
    assert report.mi_nats == pytest.approx(2 * math.log(2) / 5)
    assert (report.num_prompts, report.num_actions) == (2, 5)


def entropy(*shares: float) -> float:
    return -sum(p * math.log(p) for p in shares)


def fixed_actions(keys: str) -> np.ndarray:
    """Every reasoning fixes its action: an action is possible after equal reasonings only."""
    return np.array([[0.0 if a == b else -1e3 for b in keys] for a in keys])


@pytest.mark.parametrize("keys", ["a" * 15 + "b", "aab", "aabbcc", "abcd"])
def test_a_reasoning_that_came_up_often_weighs_as_often(keys):
    shares = [keys.count(key) / len(keys) for key in set(keys)]
    for reasoning_keys in (None, [list(keys)]):
        report = reasoning_action_information([fixed_actions(keys)], reasoning_keys=reasoning_keys)
        assert report.mi_nats == pytest.approx(entropy(*shares))


def test_fifteen_reasonings_alike_and_one_other_carry_a_quarter_of_a_nat():
    block = fixed_actions("a" * 15 + "b")
    report = reasoning_action_information([block], reasoning_keys=[["a"] * 15 + ["b"]])
    assert report.mi_nats == pytest.approx(0.2338, abs=1e-4)


def test_prompts_with_one_distinct_reasoning_count_zero():
    # One prompt of five has two reasonings, H(2/3, 1/3) = 0.636; without the others that would be
    # the result, but where reasoning does not vary it controls nothing: 0.636 / 5.
    blocks = [fixed_actions("aab"), *[np.full((3, 3), -0.5)] * 4]
    keys = [["a", "a", "b"], *[["c"] * 3] * 4]
    report = reasoning_action_information(blocks, reasoning_keys=keys, permutations=9)
    assert report.mi_nats == pytest.approx(entropy(2 / 3, 1 / 3) / 5)
    assert (report.num_prompts, report.num_actions, report.num_constant_blocks) == (5, 15, 4)
    assert report.num_skipped_blocks == 0
    alike = reasoning_action_information([np.zeros((2, 2))], reasoning_keys=[["c", "c"]])
    assert alike.mi_nats == 0


def test_noise_between_scores_of_one_reasoning_counts_zero():
    # Scored twice in bfloat16, the same reasoning gives two numbers.
    block = np.array([[-1.0, -1.01], [-1.01, -1.0]])
    assert reasoning_action_information([block], reasoning_keys=[["c", "c"]]).mi_nats == 0


def test_a_prompt_with_one_action_has_nothing_to_compare():
    blocks = [fixed_actions("ab"), np.zeros((1, 1))]
    report = reasoning_action_information(blocks, reasoning_keys=[["a", "b"], ["c"]])
    assert report.mi_nats == pytest.approx(math.log(2))
    assert (report.num_prompts, report.num_skipped_blocks) == (1, 1)
    assert report.num_constant_blocks == 0


THINK, END = 1, 2


def turn(context: Sequence[int], thought: int, *action: int) -> Turn:
    """A reply whose reasoning is one token, 20 + thought, and whose action ends with END."""
    reply = [THINK, 20 + thought, END, *(40 + a for a in action), END]
    return Turn(
        prompt=Prompt(np.array(context)),
        completion_ids=np.array(reply),
        logprobs=np.zeros(len(reply)),
        think_span=(1, 2),
        answer_span=(3, 3 + len(action)),
        reply="",
    )


def group(task: int, *members: Sequence[Turn]) -> Group:
    trajectories = tuple(
        Trajectory(
            env="toy", task_seed=task, episode_seed=i, turns=tuple(turns), stop=StopReason.DONE
        )
        for i, turns in enumerate(members)
    )
    return Group(group_id=task, env="toy", task_seed=task, trajectories=trajectories)


class ToyScore:
    """`logp(context, thought, done, token)` is the likelihood of a token of an action."""

    def __init__(self, logp: Callable[[list[int], int, list[int], int], float]) -> None:
        self.logp = logp
        self.requests: list[ScoreRequest] = []

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        self.requests += requests
        return [[self._scored(r.prompt.ids, ids) for ids in r.continuations] for r in requests]

    def _scored(self, prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
        # Tokens up to the action must not count.
        found = np.full(len(ids), -99.0)
        text = [*prompt.tolist(), *ids.tolist()]
        start = len(text) - text[::-1].index(THINK) - 1
        for k in range(max(len(prompt), start + 3), len(text)):
            done = text[start + 3 : k]
            found[k - len(prompt)] = self.logp(text[:start], text[start + 1] - 20, done, text[k])
        return found


@pytest.mark.parametrize("num_prompt_tokens", [1, 9])
def test_an_action_that_begins_a_longer_one_is_told_apart_by_its_end(num_prompt_tokens):
    # "U" after reasoning 0, "U || R" after reasoning 1, both certain. Without its end "U" is as
    # likely after either, and half of the information is lost: 0.347 for log 2 = 0.693.
    # With one token of prompt it is computed anew after each reasoning, with nine once.
    written = {0: [40, END], 1: [40, 41, END]}

    def logp(_context: list[int], thought: int, done: list[int], token: int) -> float:
        return 0.0 if written[thought][: len(done) + 1] == [*done, token] else -1e3

    def both(task: int) -> Group:
        context = [100 + task] * num_prompt_tokens
        return group(task, [turn(context, 0, 0)], [turn(context, 1, 0, 1)])

    score = ToyScore(logp)
    groups = [both(0), both(1)]
    assert reasoning_action(groups, score).mi_nats == pytest.approx(math.log(2))
    assert len(score.requests) == (4 if num_prompt_tokens == 1 else 2)
    assert state_action(groups).num_distinct_actions == 2


def own_contexts(task: int) -> Group:
    """Two turns of two members: from the second on, each has a dialogue of its own."""
    members = []
    for i in range(2):
        first = turn([100 + task], i, i)
        members.append([first, turn([100 + task, 50 + i], i, i)])
    return group(task, *members)


def test_a_later_action_is_scored_in_its_own_context_after_the_reasonings_of_its_group():
    # At turn 1 reasoning decides, at turn 2 the context does, whatever reasoning says.
    def logp(context: list[int], thought: int, _done: list[int], token: int) -> float:
        decides = thought if len(context) == 1 else context[1] - 50
        return 0.0 if token in (40 + decides, END) else -1e3

    score = ToyScore(logp)
    found = reasoning_action([own_contexts(task) for task in range(4)], score)
    assert found.mi_nats == pytest.approx(math.log(2) / 2)
    # Eight blocks of four tasks, the same in each: two log 2, two 0.
    assert (found.num_prompts, found.num_actions) == (4, 16)
    assert found.interval == Interval(found.mi_nats, found.mi_nats)


def test_no_more_actions_are_scored_than_asked_for_and_every_group_has_its_share():
    def logp(_context: list[int], thought: int, _done: list[int], token: int) -> float:
        return 0.0 if token in (40 + thought, END) else -1e3

    groups = [own_contexts(task) for task in range(4)]
    found = reasoning_action(groups, ToyScore(logp), rollouts=2, num_pairs=8)
    assert (found.num_prompts, found.num_actions) == (4, 8)
    # With a single block, either turn number may be its.
    num_seen = set()
    for seed in range(20):
        score = ToyScore(logp)
        reasoning_action(groups, score, rollouts=2, num_pairs=2, seed=seed)
        num_seen |= {len(request.prompt.ids) for request in score.requests}
    # One token of context and three up to the action at the first turn, two of context at the next.
    assert num_seen == {4, 2}


def test_the_upper_bound_is_averaged_over_actions_like_the_information():
    blocks = [fixed_actions("ab"), fixed_actions("abcdef")]
    report = reasoning_action_information(blocks)
    assert report.mi_upper_bound == pytest.approx((2 * math.log(2) + 6 * math.log(6)) / 8)
    assert report.mi_nats == pytest.approx(report.mi_upper_bound)  # reached, never passed


def test_the_interval_takes_prompts_as_units_and_two_have_none():
    blocks = [fixed_actions("ab"), np.zeros((2, 2)), fixed_actions("ab")]
    found = [reasoning_action_information(blocks[:count]).interval for count in (1, 2, 3)]
    assert found[:2] == [None, None]
    # log 2, 0, log 2: mean 2/3 log 2, sample variance log 2 squared / 3, over three prompts; the
    # upper end stays below the bound.
    mean, error = 2 * math.log(2) / 3, math.log(2) / 3
    assert found[2] is not None
    assert found[2].low == pytest.approx(mean - 4.303 * error)
    assert found[2].high == pytest.approx(math.log(2))
    # Turns of one prompt are no further units.
    report = reasoning_action_information(blocks, prompts=["x", "x", "y"])
    assert (report.num_prompts, report.interval) == (2, None)


def test_chain_refuses_what_it_cannot_measure():
    with pytest.raises(TooFewPromptsError):
        reasoning_action_information([np.zeros((1, 1))])
    with pytest.raises(MooredError, match=r"scores\[0\]"):
        reasoning_action_information([np.zeros((2, 3))])
    with pytest.raises(MooredError, match=r"reasoning_keys\[0\] has 1 keys for 2"):
        reasoning_action_information([np.zeros((2, 2))], reasoning_keys=[["a"]])
    with pytest.raises(MooredError, match="reasoning_keys must have one row per block, got 0"):
        reasoning_action_information([np.zeros((2, 2))], reasoning_keys=[])
    with pytest.raises(MooredError, match="prompts must have one row per block, got 2 for 1"):
        reasoning_action_information([np.zeros((2, 2))], prompts=["x", "y"])
    with pytest.raises(MooredError, match="permutations must be"):
        action_information(["x", "y"], ["a", "b"], permutations=-1)
    with pytest.raises(MooredError, match="finite"):
        reasoning_action_information([np.full((2, 2), math.nan)])


def test_action_information_is_what_counting_gives_beyond_chance():
    # Two prompts, each with its own action: log 2. Of the six dealings of two Ups and two Downs to
    # the first prompt's two places, two have it, four have one of each: 0. Their mean is log 2 / 3.
    report = action_information(["x", "x", "y", "y"], ["U", "U", "D", "D"], permutations=4000)
    assert report.mi_plugin_nats == pytest.approx(math.log(2))
    assert report.mi_null_mean_nats == pytest.approx(math.log(2) / 3)
    assert report.mi_nats == pytest.approx(2 * math.log(2) / 3)
    assert report.p_value == pytest.approx(1 / 3, abs=0.03)
    assert report.interval is None  # Two prompts are one comparison.
    assert (report.num_samples, report.num_prompts, report.num_distinct_actions) == (4, 2, 2)


def test_the_null_is_the_mean_over_all_dealings():
    rng = np.random.default_rng(3)
    prompts, actions = [0, 0, 0, 1, 1, 1], rng.integers(3, size=6).tolist()
    plugin = [
        action_information(prompts, list(dealt)).mi_plugin_nats
        for dealt in itertools.permutations(actions)
    ]
    report = action_information(prompts, actions)
    assert report.mi_null_mean_nats == pytest.approx(statistics.mean(plugin))


def test_the_interval_leaves_out_one_prompt_at_a_time_with_its_null():
    # Three prompts with the actions UU, UU, DD. Without either of the first two, what is left is
    # 2/3 log 2 as above; without the third all actions are alike: 0.
    prompts, actions = list("xxyyzz"), list("UUUUDD")
    report = action_information(prompts, actions)
    # Of 15 places for the two Ds three are in one prompt: H(1/3) there; else x or y or z is whole
    # and the others have one of each: log 3 - 2/3 log 2 - 2/3 log 2.
    plugin = math.log(3) - 2 / 3 * math.log(2)
    null = 0.2 * plugin + 0.8 * (math.log(3) - 4 / 3 * math.log(2))
    assert report.mi_nats == pytest.approx(plugin - null)
    whole = 2 * math.log(2) / 3
    error = math.sqrt(2 / 3 * (2 * (whole / 3) ** 2 + (2 * whole / 3) ** 2))
    assert report.interval is not None
    assert report.interval.low == pytest.approx(plugin - null - 4.303 * error)
    assert report.interval.high == pytest.approx(plugin - null + 4.303 * error)


@pytest.mark.parametrize(("num_actions", "plugin"), [(40, 0.99), (400, 1.90)])
def test_actions_that_ignore_their_prompt_have_an_interval_that_holds_zero(num_actions, plugin):
    rng = np.random.default_rng(num_actions)
    prompts = np.repeat(np.arange(8), 16).tolist()
    found = [
        action_information(prompts, rng.integers(num_actions, size=128).tolist(), permutations=99)
        for _ in range(200)
    ]
    # Of log 8 = 2.08 at most; corrected after Miller and Madow it would be 0.75 and 1.87.
    assert statistics.mean(r.mi_plugin_nats for r in found) == pytest.approx(plugin, abs=0.02)
    assert abs(statistics.mean(r.mi_nats for r in found)) < 0.01
    holds = [r.interval is not None and r.interval.low <= 0 <= r.interval.high for r in found]
    assert statistics.mean(holds) >= 0.97
    assert statistics.mean((r.p_value or 0) <= 0.05 for r in found) <= 0.09


@pytest.mark.parametrize("num_actions", [40, 400])
def test_actions_that_follow_their_prompt_stand_out(num_actions):
    # Three of four times one of two actions of the prompt's own, else any.
    rng = np.random.default_rng(num_actions)
    prompts = np.repeat(np.arange(8), 16)
    found = []
    for _ in range(50):
        own = rng.integers(num_actions, size=(8, 2))
        followed = own[prompts, rng.integers(2, size=128)]
        actions = np.where(rng.random(128) < 0.75, followed, rng.integers(num_actions, size=128))
        found.append(action_information(prompts.tolist(), actions.tolist(), permutations=199))
    assert all(r.interval is not None and r.interval.low > 0.2 for r in found)
    assert all(r.p_value == 1 / 200 for r in found)


def test_strong_dependence_reads_lower_than_it_is_by_what_chance_gives():
    # Each of eight prompts has an action of its own, log 8 = 2.08.
    prompts = np.repeat(np.arange(8), 16).tolist()
    report = action_information(prompts, prompts)
    assert report.mi_plugin_nats == pytest.approx(math.log(8))
    assert report.mi_nats == pytest.approx(1.854, abs=1e-3)


def test_one_action_whatever_the_prompt_or_another_every_time_is_no_dependence():
    prompts = np.repeat(np.arange(5), 4).tolist()
    for actions in (["U"] * 20, list(range(20))):
        report = action_information(prompts, actions, permutations=9)
        assert (report.mi_nats, report.p_value) == (0, 1)
        assert report.interval == Interval(0, 0)


def repeated(choices: np.ndarray, lengths: np.ndarray) -> list[Group]:
    """Member i of task c does `choices[c, i]` at each of its turns."""
    groups = []
    for task, (own, turns) in enumerate(zip(choices.tolist(), lengths.tolist(), strict=True)):
        members = [
            # What it sees from the second turn on tells what it did at the first.
            [turn([100 + task, *[60 + choice] * t], 0, choice) for t in range(num_turns)]
            for choice, num_turns in zip(own, turns, strict=True)
        ]
        groups.append(group(task, *members))
    return groups


def test_a_policy_that_copies_its_own_first_action_is_not_state_conditioned():
    # Four tasks, in each of which the four members choose 0 to 3 and keep to it. Counted over
    # newest observations, which show the first action, that would be log 4 at later turns.
    choices = np.tile(np.arange(4), (4, 1))
    report = state_action(repeated(choices, np.full((4, 4), 3)), permutations=99)
    assert report.mi_plugin_nats == 0 and report.mi_nats < 0
    assert (report.num_samples, report.num_prompts, report.p_value) == (48, 4, 1)


def test_turns_of_a_trajectory_stay_together_in_the_null():
    # Members draw one action and repeat it ten times: dealt turn by turn the null would be ten
    # independent ones, and a chance of 5 % would come up far more often.
    rng = np.random.default_rng(5)
    p_values = [
        state_action(
            repeated(rng.integers(4, size=(6, 6)), rng.integers(8, 11, size=(6, 6))),
            permutations=99,
            seed=run,
        ).p_value
        for run in range(200)
    ]
    assert statistics.mean((p or 0) <= 0.05 for p in p_values) <= 0.09


def test_turn_numbers_are_never_pooled():
    # The action is the turn number, and tasks differ in length: pooled, a task's longer episodes
    # would tell that it has later actions.
    members = [[[turn([100 + task, t], 0, t) for t in range(task + 1)]] * 2 for task in range(4)]
    groups = [group(task, *own) for task, own in enumerate(members)]
    report = state_action(groups, permutations=9)
    assert (report.mi_nats, report.p_value) == (0, 1)
    # 20 actions; the two at the last turn number, which one task gets to, are left out.
    assert report.share_left_out == pytest.approx(2 / 20)


def test_actions_need_two_prompts_with_two_each_and_equal_lengths():
    for prompts in (["x", "x"], ["x", "x", "y"], []):
        with pytest.raises(TooFewPromptsError, match="at least 2 distinct prompts with 2 actions"):
            action_information(prompts, ["a"] * len(prompts))
    with pytest.raises(MooredError, match="2 and 1"):
        action_information(["x", "y"], ["a"])
    with pytest.raises(MooredError, match="turns must name one per action, got 1, 2"):
        action_information(["x", "y"], ["a", "b"], turns=[1])


def test_a_link_reads_back_what_it_logged():
    link = Link(mi_nats=0.5, interval=Interval(0.1, 0.9), p_value=0.02)
    logged = link.metrics("chain/mi")
    assert logged == {
        "chain/mi": 0.5,
        "chain/mi_low": 0.1,
        "chain/mi_high": 0.9,
        "chain/mi_p": 0.02,
    }
    assert Link.from_log(logged, "chain/mi") == link
    bare = Link.from_log({"chain/mi": 0.5, "chain/mi_p": 0.1}, "chain/mi")
    assert bare == Link(mi_nats=0.5, p_value=0.1)
    assert Link.from_log({"chain/mi": 0.5}, "chain/mi") is None  # How much of it is chance?
    assert Link.from_log(logged, "chain/other") is None


def test_chain_information_is_the_mean_gain_over_all_actions_of_unequal_groups():
    rng = np.random.default_rng(17)
    blocks = [rng.normal(-3, 2, (k, k)) for k in (2, 3, 6, 2, 9)]
    gains = [
        [row[k] - math.log(sum(map(math.exp, row)) / len(row)) for k, row in enumerate(block)]
        for block in blocks
    ]
    report = reasoning_action_information(blocks)
    mean = statistics.mean(itertools.chain(*gains))
    assert report.mi_nats == pytest.approx(mean)
    # Linearised: a prompt counts with what its actions add to the mean, 5/22 of them each.
    parts = [5 / 22 * sum(g - mean for g in own) for own in gains]
    half = 2.776 * math.sqrt(sum(x * x for x in parts) / (5 * 4))
    assert report.interval is not None
    assert report.interval.low == pytest.approx(mean - half)
    assert report.interval.high == pytest.approx(min(mean + half, report.mi_upper_bound))


def test_chain_p_value_equals_the_share_of_all_dealings():
    rng = np.random.default_rng(18)
    block = rng.normal(0, 1, (4, 4)) + 0.5 * np.eye(4)
    sums = [sum(block[k, d[k]] for k in range(4)) for d in itertools.permutations(range(4))]
    exact = statistics.mean(bool(s >= sums[0] - 1e-9) for s in sums)
    report = reasoning_action_information([block], permutations=4000)
    assert 0.05 < exact < 0.95
    assert report.p_value == pytest.approx(exact, abs=0.03)
