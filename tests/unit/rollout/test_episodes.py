"""Whole episodes of real environments, played by scripted samplers."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from moored.config import RolloutConfig, load_config
from moored.engine.base import LockstepStream, Request, SamplingParams, Stream
from moored.envs.base import Environment, StepResult
from moored.envs.mix import EnvMix, make_env
from moored.errors import EnvError, MooredError
from moored.reply import format_reply, parse_reply
from moored.types import Completion, FinishReason, Group, Message, StopReason

pytest.importorskip("transformers")

from moored.rollout.episodes import Task, roll_out
from moored.rollout.pool import EnvPool
from moored.rollout.render import Renderer
from moored.training.samples import build_samples

PARAMS = SamplingParams(max_tokens=64)
ROOM = 100_000


class FakeSampler:
    """Writes what `reply` says, through the tokenizer, and remembers what it was asked."""

    def __init__(self, renderer: Renderer, reply: Callable[[Request], str]) -> None:
        self.renderer = renderer
        self.reply = reply
        self.batches: list[list[Request]] = []
        self.ended: list[int] = []

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._complete(self.reply(request), params) for request in requests]

    def stream(self, params: SamplingParams) -> LockstepStream:
        return LockstepStream(self, params)

    def episodes(self, sessions: Iterable[int]) -> list[int]:
        """Episodes of a rollout, counted from 0: a later episode has a larger session."""
        known = sorted({request.session for batch in self.batches for request in batch})
        return [known.index(session) for session in sessions]

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.ended += sessions

    def load_weights(self, weights: object, version: int) -> None:
        raise AssertionError("a rollout loads no weights")

    def _complete(self, text: str, params: SamplingParams) -> Completion:
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=False)
        ids.append(self.renderer.stop_ids[0])
        is_cut = len(ids) > params.max_tokens
        ids = ids[: params.max_tokens]
        return Completion(
            token_ids=np.array(ids, dtype=np.int64),
            logprobs=-np.arange(len(ids), dtype=np.float64),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            policy_version=7,
        )


class Walk:
    """Three turns, reward 1 each; what `plan` names for a turn is done instead."""

    name: ClassVar[str] = "walk"
    is_stochastic: bool = False
    max_turns: int = 3

    def __init__(
        self, plan: dict[int, str] | None = None, ends: bool = True, max_steps: int = 3
    ) -> None:
        self.plan = plan or {}
        self.ends = ends
        self.max_steps = max_steps
        self.num_resets = self.num_closed = 0

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self.turn = 0
        self.num_resets += 1
        if self.plan.get(0) == "raise":
            raise RuntimeError("no map")
        seed = episode_seed if self.plan.get(0) == "leak" else 0
        return [Message("system", "Walk."), Message("user", f"Task {task_seed}.{seed}")]

    def step(self, reply: str) -> StepResult:
        self.turn += 1
        what = self.plan.get(self.turn)
        if what == "raise":
            raise RuntimeError("the ice broke")
        return StepResult(
            observation=f"You said {len(reply)} characters.",
            reward=math.nan if what == "nan" else 1.0,
            terminated=self.ends and self.turn == 3,
            truncated=self.turn == self.max_steps < 3,
            is_valid=parse_reply(reply).is_valid,
            metrics={"num_steps": 2.0},
        )

    def oracle(self) -> str:
        return "on"

    def close(self) -> None:
        self.num_closed += 1
        if "close" in self.plan.values():
            raise OSError("already gone")


@pytest.fixture(scope="module")
def renderer(toy_tokenizer) -> Renderer:
    return Renderer(toy_tokenizer.make_tokenizer("chatml"))


def say(text: str) -> Callable[[Request], str]:
    return lambda request: text


def tasks_of(
    make: Callable[[], Environment], seeds: Sequence[int], size: int, name: str = "walk"
) -> list[Task]:
    return [
        Task(group_id=i, env=name, make_env=make, task_seed=seed, episode_seeds=tuple(range(size)))
        for i, seed in enumerate(seeds)
    ]


def play(
    tasks: Sequence[Task], sampler: FakeSampler, *, max_context: int = ROOM, **options
) -> list[Group]:
    room = RolloutConfig(max_response_tokens=PARAMS.max_tokens, max_context=max_context)
    engine: Any = SimpleNamespace(sampler=sampler, renderer=sampler.renderer)
    given: dict[str, Any] = {"seed": (0, 1)} | options
    return roll_out(tasks, engine=engine, options=room, **given)


def with_oracle(name: str, renderer: Renderer, **options) -> tuple[Callable, FakeSampler]:
    """A maker of environments and a sampler that asks the environment of a session for help."""
    made: list[Environment] = []

    def make() -> Environment:
        made.append(make_env(name, **options))
        return made[-1]

    def reply(request: Request) -> str:
        (episode,) = sampler.episodes([request.session])
        return format_reply("I know.", made[episode].oracle())

    sampler = FakeSampler(renderer, reply)
    return make, sampler


def facts(group: Group) -> list[object]:
    return [
        (
            trajectory.episode_seed,
            trajectory.stop,
            trajectory.success,
            dict(trajectory.metrics),
            [(t.reply, t.reward, t.prompt.ids.tolist()) for t in trajectory.turns],
        )
        for trajectory in group.trajectories
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sokoban", {}),
        ("frozen_lake", {"slip": 0.0}),
        ("bandit", {}),
        ("countdown", {}),
    ],
)
def test_oracle_replies_succeed(renderer, name, options):
    make, sampler = with_oracle(name, renderer, **options)
    groups = play(tasks_of(make, [3, 4, 5], 2, name), sampler)
    assert [group.task_seed for group in groups] == [3, 4, 5]
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.success and trajectory.stop is StopReason.DONE
        assert all(turn.is_valid and turn.policy_version == 7 for turn in trajectory.turns)
        assert trajectory.metrics["num_invalid_turns"] == 0


@pytest.mark.parametrize(
    ("name", "num_turns", "penalty"),
    [("sokoban", 5, -0.2), ("frozen_lake", 5, -0.1), ("bandit", 1, -0.1), ("countdown", 1, -0.1)],
)
def test_garbage_replies_cost_the_format_penalty_each_turn(renderer, name, num_turns, penalty):
    sampler = FakeSampler(renderer, say("what? <answer>"))
    (group,) = play(tasks_of(lambda: make_env(name), [0], 2, name), sampler)
    for trajectory in group.trajectories:
        assert not trajectory.success
        assert trajectory.num_turns == num_turns
        assert trajectory.reward == pytest.approx(penalty * num_turns)
        assert all(turn.think_span is turn.answer_span is None for turn in trajectory.turns)
        assert trajectory.metrics["num_invalid_turns"] == num_turns


def test_turns_hold_what_was_seen_and_written(renderer):
    sampler = FakeSampler(renderer, say("<think>on</think><answer>go</answer>"))
    (group,) = play(tasks_of(Walk, [5], 1), sampler)
    (trajectory,) = group.trajectories
    decode = renderer.tokenizer.decode
    assert [turn.seen for turn in trajectory.turns] == [
        "Task 5.0",
        "You said 36 characters.",
        "You said 36 characters.",
    ]
    stream = np.zeros(0, dtype=np.int64)
    for turn in trajectory.turns:
        assert turn.prompt.ids[: len(stream)].tolist() == stream.tolist()
        assert decode(turn.reasoning_ids) == "on" and decode(turn.action_ids) == "go"
        assert turn.logprobs.tolist() == [-float(i) for i in range(len(turn.completion_ids))]
        stream = np.concatenate([turn.prompt.ids, turn.completion_ids])
    exchange = "<think>on</think><answer>go</answer><|im_end|>\n"
    header = "<|im_start|>assistant\n"
    seen = f"<|im_start|>user\nYou said 36 characters.<|im_end|>\n{header}"
    assert decode(stream) + "\n" == (
        "<|im_start|>system\nWalk.<|im_end|>\n<|im_start|>user\nTask 5.0<|im_end|>\n"
        f"{header}{exchange}{seen}{exchange}{seen}{exchange}"
    )
    num_tokens = sum(len(turn.completion_ids) for turn in trajectory.turns)
    assert trajectory.metrics == {
        "num_steps": 6.0,
        "num_turns": 3.0,
        "num_invalid_turns": 0.0,
        "num_sampled_tokens": float(num_tokens),
        "num_cut_replies": 0.0,
        "num_env_errors": 0.0,
    }


def test_one_batch_a_turn_over_the_live_episodes_and_sessions_are_ended(renderer):
    sampler = FakeSampler(renderer, say("on"))
    short = tasks_of(lambda: make_env("bandit"), [1], 2, "bandit")
    heard = []
    long = tasks_of(Walk, [2], 3)
    play([*short, *long], sampler, on_replies=lambda *numbers: heard.append(numbers))
    assert heard == [(5, 5), (8, 3), (11, 3), (11, 0)]
    batches = [sampler.episodes(r.session for r in batch) for batch in sampler.batches]
    assert batches == [[0, 1, 2, 3, 4], [2, 3, 4], [2, 3, 4]]
    assert sampler.episodes(sampler.ended) == [0, 1, 2, 3, 4]


def test_two_rollouts_never_use_the_same_session(renderer):
    sampler = FakeSampler(renderer, say("on"))
    for _ in range(2):
        play(tasks_of(Walk, [1], 2), sampler)
    assert len(set(sampler.ended)) == 4


def test_request_seeds_differ_by_episode_task_turn_and_run_but_not_by_batch(renderer):
    def seeds(tasks: list[Task], seed: tuple[int, ...]) -> list[int]:
        sampler = FakeSampler(renderer, say("on"))
        play(tasks, sampler, seed=seed)
        return [request.seed for batch in sampler.batches for request in batch]

    both = seeds(tasks_of(Walk, [1, 2], 2), (0, 1))
    assert len(set(both)) == 2 * 2 * 3
    assert all(0 <= seed < 1 << 63 for seed in both)
    assert set(seeds(tasks_of(Walk, [2], 2), (0, 1))) < set(both)
    assert not set(seeds(tasks_of(Walk, [1, 2], 2), (0, 2))) & set(both)


def test_trajectories_do_not_depend_on_what_else_is_in_the_batch(renderer):
    def reply(request: Request) -> str:
        actions = ("Up", "Down", "Left", "Right")
        return format_reply(f"{request.seed % 997}", actions[request.seed % 4])

    def rolled(seeds: list[int], workers: int) -> dict[int, list[object]]:
        tasks = tasks_of(lambda: make_env("frozen_lake"), seeds, 4, "frozen_lake")
        with EnvPool(workers=workers) as pool:
            groups = play(tasks, FakeSampler(renderer, reply), pool=pool)
        return {group.task_seed: facts(group) for group in groups}

    alone, together = rolled([8], 1), rolled([9, 8, 7], 3)
    assert alone[8] == together[8]
    assert together == rolled([7, 8, 9], 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_environment_that_raises_ends_its_episode_only(renderer, workers, caplog):
    plans = iter([{0: "raise"}, {2: "raise"}, {}, {1: "nan"}])
    tasks = tasks_of(lambda: Walk(next(plans)), [1], 4)
    with caplog.at_level(logging.WARNING, logger="moored.rollout.episodes"):
        (group,) = play(tasks, FakeSampler(renderer, say("on")), pool=EnvPool(workers=workers))
    error, done = StopReason.ENV_ERROR, StopReason.DONE
    assert [t.stop for t in group.trajectories] == [error, error, done, error]
    assert [t.num_turns for t in group.trajectories] == [0, 2, 3, 1]
    assert [t.metrics["num_env_errors"] for t in group.trajectories] == [1, 1, 0, 1]
    assert np.isnan(group.rewards).tolist() == [True, True, False, True]
    assert group.rewards[2] == 3.0
    messages = [record.getMessage() for record in caplog.records]
    raised = r"the environment raised RuntimeError at test_episodes\.py:\d+: "
    assert re.fullmatch(rf"walk task 1, episode 0, turn 0: {raised}no map", messages[0])
    assert any(re.search(rf"{raised}the ice broke", message) for message in messages)
    # What moored itself finds wrong has no line of the user's.
    assert any("the environment raised EnvError: " in message for message in messages)
    assert any("finite" in message for message in messages)


def test_what_a_library_raises_is_told_with_the_line_of_the_environment(renderer, caplog):
    class Parses(Walk):
        def step(self, reply: str) -> StepResult:
            return json.loads(reply)

    with caplog.at_level(logging.WARNING, logger="moored.rollout.episodes"):
        play(tasks_of(Parses, [1], 1), FakeSampler(renderer, say("on")))
    assert "raised JSONDecodeError at test_episodes.py:" in caplog.text


def test_what_many_episodes_have_to_say_is_said_a_few_times_and_counted(renderer, caplog):
    class Gone(Walk):
        def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
            raise OSError(f"no answer for {task_seed}" if episode_seed else "another")

    with caplog.at_level(logging.WARNING, logger="moored.rollout.episodes"):
        play(tasks_of(Gone, [1, 2], 32), FakeSampler(renderer, say("on")))
    told = [re.sub(r" at \S+:\d+:", ":", record.getMessage()) for record in caplog.records]
    assert told == [
        "walk task 1, episode 0, turn 0: the environment raised OSError: another",
        *(
            f"walk task 1, episode {k}, turn 0: the environment raised OSError: no answer for 1"
            for k in (1, 2, 3)
        ),
        "walk task 2, episode 0, turn 0: the environment raised OSError: another",
        "walk, 59 more episodes like these: the environment raised OSError: no answer for 2",
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="moored.rollout.episodes"):
        play(tasks_of(Gone, [1], 5), FakeSampler(renderer, say("on")))
    assert caplog.records[-1].getMessage().startswith("walk, 1 more episode like these: the")


def test_an_episode_that_ends_in_an_error_did_not_succeed(renderer):
    class Early(Walk):
        def step(self, reply: str) -> StepResult:
            return replace(super().step(reply), success=True)

    plans = iter([{2: "raise"}, {}])
    (group,) = play(tasks_of(lambda: Early(next(plans)), [1], 2), FakeSampler(renderer, say("on")))
    assert [t.stop for t in group.trajectories] == [StopReason.ENV_ERROR, StopReason.DONE]
    assert [t.success for t in group.trajectories] == [False, True]


def wrong_result(**changes: Any) -> StepResult:
    given = {"observation": "on", "reward": 0.0, "terminated": False}
    return StepResult(**{**given, **changes})


@pytest.mark.parametrize(
    ("messages", "result", "why"),
    [
        ([], None, r"reset must return a list of messages, got \[\]"),
        ((Message("user", "go"),), None, "reset must return a list of messages, got"),
        ([{"role": "user", "content": "go"}], None, "reset must return Message objects, got"),
        (None, ("on", 0.0), "step must return a StepResult, got tuple"),
        (None, wrong_result(reward="0.5"), "a reward must be a finite number, got '0.5'"),
        (None, wrong_result(observation=None), "text or a list of parts, got None"),
        (None, wrong_result(observation=[{"type": "text"}]), "must be a text or an image, got"),
        (None, wrong_result(metrics={"depth": "deep"}), "metric 'depth' must be a number, got"),
        (
            None,
            wrong_result(metrics={"depth": np.zeros(2)}),
            "metric 'depth' must be a number, got",
        ),
    ],
)
def test_an_answer_that_is_none_costs_its_episode_and_not_the_rollout(
    renderer, caplog, messages, result, why
):
    class Odd(Walk):
        def reset(self, task_seed: int, episode_seed: int = 0) -> Any:
            known = super().reset(task_seed, episode_seed)
            return known if messages is None else messages

        def step(self, reply: str) -> Any:
            return result

    envs = iter([Odd({}), Walk({})])
    with caplog.at_level(logging.WARNING, logger="moored.rollout.episodes"):
        (group,) = play(tasks_of(lambda: next(envs), [1], 2), FakeSampler(renderer, say("on")))
    assert [t.stop for t in group.trajectories] == [StopReason.ENV_ERROR, StopReason.DONE]
    assert re.search(why, caplog.records[0].getMessage())


def test_half_a_character_in_an_observation_is_replaced_before_it_is_encoded(renderer):
    class Cut(Walk):
        def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
            return [*super().reset(task_seed, episode_seed), Message("user", "go \ud83d")]

        def step(self, reply: str) -> StepResult:
            result = super().step(reply)
            return replace(result, observation=[{"type": "text", "text": "√ \ude00"}])

    (group,) = play(tasks_of(lambda: Cut({}), [1], 1), FakeSampler(renderer, say("on")))
    (trajectory,) = group.trajectories
    assert trajectory.stop is StopReason.DONE
    seen = [turn.seen for turn in trajectory.turns]
    assert seen == ["go ?", *[[{"type": "text", "text": "√ ?"}]] * 2]


def test_a_sampler_that_raises_ends_the_rollout_and_its_sessions(renderer):
    def reply(request: Request) -> str:
        raise OSError("server gone")

    sampler, pool = FakeSampler(renderer, reply), EnvPool()
    with pytest.raises(OSError, match="server gone"):
        play(tasks_of(Walk, [1], 2), sampler, pool=pool)
    assert sampler.episodes(sampler.ended) == [0, 1]
    assert pool.take(Walk).num_resets == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_reply_the_sampler_gives_up_on_ends_its_episode_only(renderer, caplog):
    class Flaky(FakeSampler):
        def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
            found = super().generate(requests, params)
            if len(self.batches) == 2:
                lost = FinishReason.ERROR
                found[1] = Completion(np.zeros(0, np.int64), np.zeros(0), lost, error="busy")
            return found

    pool = EnvPool()
    sampler = Flaky(renderer, say("on"))
    (group,) = play(tasks_of(Walk, [1], 3), sampler, pool=pool)
    assert [t.stop for t in group.trajectories] == [
        StopReason.DONE,
        StopReason.SAMPLER_ERROR,
        StopReason.DONE,
    ]
    assert [t.num_turns for t in group.trajectories] == [3, 1, 3]
    assert sampler.episodes(r.session for r in sampler.batches[2]) == [0, 2]
    assert np.isnan(group.rewards).tolist() == [False, True, False]
    assert (
        build_samples(
            [Group(group_id=0, env="walk", task_seed=1, trajectories=group.trajectories[1:2])]
        )
        == []
    )
    assert "walk task 1, episode 1, turn 1: the sampler gave no reply: busy" in caplog.text
    assert pool.take(Walk).num_closed == 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_request_carries_the_dialogue_it_renders(renderer):
    sampler = FakeSampler(renderer, say("on"))
    play(tasks_of(Walk, [5], 1), sampler)
    assert sampler.batches[1][0].messages == (
        Message("system", "Walk."),
        Message("user", "Task 5.0"),
        Message("assistant", "on"),
        Message("user", "You said 2 characters."),
    )


def test_context_limit_truncates_and_keeps_the_reward(renderer):
    sampler = FakeSampler(renderer, say("on"))
    play(tasks_of(Walk, [1], 1), sampler)
    second = len(sampler.batches[1][0].prompt.ids)
    # Room for the second reply, to the token, but not for the third.
    (group,) = play(tasks_of(Walk, [1], 1), sampler, max_context=second + PARAMS.max_tokens)
    (trajectory,) = group.trajectories
    assert trajectory.stop is StopReason.CONTEXT_LIMIT and trajectory.stop.is_truncation
    assert trajectory.num_turns == 2 and trajectory.reward == 2.0
    (group,) = play(tasks_of(Walk, [1], 1), sampler, max_context=second + PARAMS.max_tokens - 1)
    assert group.trajectories[0].num_turns == 1


def test_first_prompt_without_room_is_reported(renderer, caplog):
    sampler = FakeSampler(renderer, say("on"))
    (group,) = play(tasks_of(Walk, [1], 1), sampler, max_context=PARAMS.max_tokens + 3)
    assert group.trajectories[0].stop is StopReason.CONTEXT_LIMIT
    assert group.trajectories[0].num_turns == 0 and not sampler.batches
    assert "raise max_context or lower max_response_tokens" in caplog.text


def test_an_episode_its_environment_truncates_stops_at_the_turn_limit(renderer):
    sampler = FakeSampler(renderer, say("on"))
    (group,) = play(tasks_of(lambda: Walk(max_steps=2), [1], 1), sampler)
    assert group.trajectories[0].stop is StopReason.TURN_LIMIT
    assert group.trajectories[0].num_turns == 2 and group.trajectories[0].reward == 2.0


def test_an_environment_that_never_ends_stops_at_its_turn_limit(renderer):
    sampler = FakeSampler(renderer, say("on"))
    (group,) = play(tasks_of(lambda: Walk(ends=False), [1], 1), sampler)
    assert group.trajectories[0].stop is StopReason.TURN_LIMIT
    assert group.trajectories[0].num_turns == 3


def test_a_reply_cut_by_length_is_counted_and_closed_by_the_template(renderer):
    sampler = FakeSampler(renderer, say("on and " * 40))
    (group,) = play(tasks_of(Walk, [1], 1), sampler)
    turns = group.trajectories[0].turns
    assert group.trajectories[0].metrics["num_cut_replies"] == 3.0
    assert all(len(turn.completion_ids) == PARAMS.max_tokens for turn in turns)
    after = turns[1].prompt.ids[len(turns[0].prompt.ids) + PARAMS.max_tokens]
    assert after == renderer.stop_ids[0]


def test_a_template_that_rewrites_history_starts_a_new_stream_each_turn(toy_tokenizer):
    rewriting = Renderer(toy_tokenizer.make_tokenizer("qwen3"))
    sampler = FakeSampler(rewriting, say("<think>secret</think><answer>go</answer>"))
    (group,) = play(tasks_of(Walk, [1], 1), sampler)
    last = rewriting.tokenizer.decode(group.trajectories[0].turns[2].prompt.ids)
    assert "secret" not in last and last.count("<answer>go</answer>") == 2


@pytest.mark.parametrize("style", ["chatml", "qwen3"])
def test_a_turn_knows_where_its_newest_observation_begins(toy_tokenizer, style):
    renderer = Renderer(toy_tokenizer.make_tokenizer(style))
    sampler = FakeSampler(renderer, say("<think>on</think><answer>go</answer>"))
    (group,) = play(tasks_of(Walk, [5], 1), sampler)
    for turn in group.trajectories[0].turns:
        newest = renderer.tokenizer.decode(turn.prompt.ids[turn.observation_start :])
        assert newest == (f"<|im_start|>user\n{turn.seen}<|im_end|>\n<|im_start|>assistant\n")


def test_first_prompts_that_differ_inside_a_group_are_refused(renderer):
    sampler = FakeSampler(renderer, say("on"))
    with pytest.raises(MooredError, match="another first prompt"):
        play(tasks_of(lambda: Walk({0: "leak"}), [1], 2), sampler)
    assert sampler.episodes(sampler.ended) == [0, 1]


def test_a_pool_reuses_environments_and_drops_those_that_raised(renderer):
    made: list[Walk] = []

    def make() -> Walk:
        made.append(Walk({1: "raise"} if not made else {}))
        return made[-1]

    with EnvPool() as pool:
        for _ in range(2):
            play(tasks_of(make, [1], 2), FakeSampler(renderer, say("on")), pool=pool)
        assert [env.num_closed for env in made] == [1, 0, 0]
    assert [env.num_resets for env in made] == [1, 2, 1]
    assert [env.num_closed for env in made] == [1, 1, 1]


def test_a_pool_knows_the_entry_of_a_mix_that_made_an_environment():
    env = ["sokoban", {"name": "sokoban", "options": {"max_turns": 2}}]
    first, second = EnvMix(load_config({"env": env}).env).makers
    with EnvPool() as pool:
        made = pool.take(first)
        pool.give_back(first, made)
        assert pool.take(second).max_turns == 2
        assert pool.take(first) is made


def test_without_a_pool_environments_are_closed_and_a_failing_close_loses_nothing(renderer, caplog):
    made = [Walk({9: "close"}), Walk()]
    remaining = iter(made)
    (group,) = play(tasks_of(lambda: next(remaining), [1], 2), FakeSampler(renderer, say("on")))
    assert group.rewards.tolist() == [3.0, 3.0]
    assert [env.num_closed for env in made] == [1, 1]
    assert "already gone" in caplog.text


def test_workers_step_environments_at_the_same_time(renderer):
    barrier = threading.Barrier(2, timeout=60)

    class Meeting(Walk):
        def step(self, reply: str) -> StepResult:
            barrier.wait()
            return super().step(reply)

    with EnvPool(workers=2) as pool:
        (group,) = play(tasks_of(Meeting, [1], 2), FakeSampler(renderer, say("on")), pool=pool)
    assert group.rewards.tolist() == [3.0, 3.0]


def test_an_environment_that_cannot_be_made_is_an_error(renderer):
    sampler = FakeSampler(renderer, say("on"))
    with pytest.raises(EnvError, match="max_turns"):
        play(tasks_of(lambda: make_env("sokoban", max_turns=0), [1], 1), sampler)


def test_environments_are_closed_when_a_later_one_cannot_be_made(renderer):
    made: list[Walk] = []

    def make() -> Walk:
        if len(made) == 2:
            raise EnvError("no more rooms")
        made.append(Walk())
        return made[-1]

    with pytest.raises(EnvError, match="no more rooms"):
        play(tasks_of(make, [1], 3), FakeSampler(renderer, say("on")))
    assert [env.num_closed for env in made] == [1, 1]


def test_replies_that_come_together_are_decoded_before_any_environment_reads_one(toy_tokenizer):
    events: list[str] = []

    class Noting(Walk):
        def step(self, reply: str) -> StepResult:
            events.append("step")
            return super().step(reply)

    class NotingRenderer(Renderer):
        def decode(self, completion_ids: np.ndarray) -> str:
            events.append("decode")
            time.sleep(0.001)  # as a tokenizer, let other threads run
            return super().decode(completion_ids)

    noting = NotingRenderer(toy_tokenizer.make_tokenizer("chatml"))
    play(tasks_of(Noting, [1], 3), FakeSampler(noting, say("on")))
    assert events == (["decode"] * 3 + ["step"] * 3) * 3


class OneByOne(Stream):
    """A stream whose replies are finished one at a time, the newest request first."""

    is_lockstep = False

    def __init__(self, sampler: FakeSampler, params: SamplingParams) -> None:
        self.sampler, self.params = sampler, params
        self.requests: list[Request] = []
        self.ended: list[int] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        if not self.requests:
            return []
        request = self.requests.pop()
        (completion,) = self.sampler.generate([request], self.params)
        return [(request.session, completion)]

    def end(self, sessions: Sequence[int]) -> None:
        self.ended += sessions

    def close(self) -> None:
        self.requests.clear()


class StreamSampler(FakeSampler):
    def stream(self, params: SamplingParams) -> OneByOne:
        self.last = OneByOne(self, params)
        return self.last


def test_a_stream_hears_of_each_episode_that_is_over(renderer):
    sampler = StreamSampler(renderer, say("on"))
    groups = play(tasks_of(Walk, [1, 2], 3), sampler)
    assert {len(t.turns) for group in groups for t in group.trajectories} == {3}
    assert len(sampler.last.ended) == len(set(sampler.last.ended)) == 6


@pytest.mark.parametrize("workers", [1, 3])
def test_trajectories_over_a_stream_equal_those_in_lockstep(renderer, workers):
    def reply(request: Request) -> str:
        actions = ("Up", "Down", "Left", "Right")
        return format_reply(f"{request.seed % 997}", actions[request.seed % 4])

    def rolled(kind: type[FakeSampler]) -> list[list[object]]:
        tasks = tasks_of(lambda: make_env("frozen_lake"), [7, 8, 9], 4, "frozen_lake")
        with EnvPool(workers=workers) as pool:
            return [facts(group) for group in play(tasks, kind(renderer, reply), pool=pool)]

    assert rolled(StreamSampler) == rolled(FakeSampler)


def test_over_a_stream_a_slow_environment_holds_up_its_own_episode_only(renderer):
    is_over = threading.Event()

    class Slow(Walk):
        def step(self, reply: str) -> StepResult:
            assert is_over.wait(10), "the other episode did not go on"
            return super().step(reply)

    class Quick(Walk):
        def step(self, reply: str) -> StepResult:
            result = super().step(reply)
            if self.turn == 3:
                is_over.set()
            return result

    kinds = iter([Slow, Quick])
    with EnvPool(workers=2) as pool:
        tasks = tasks_of(lambda: next(kinds)(), [1], 2)
        (group,) = play(tasks, StreamSampler(renderer, say("on")), pool=pool)
    assert group.rewards.tolist() == [3.0, 3.0]
