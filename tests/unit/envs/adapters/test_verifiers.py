"""The verifiers adapter against the real package: tasks of one turn and of several."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("verifiers")

from moored.envs import format_reply
from moored.envs.check.runner import check_env
from moored.envs.mix import make_env
from moored.errors import EnvError, MooredError

TASKSETS = """
import asyncio

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""
"""
ADDER = """
__all__ = ["AdderTaskset"]


class AdderTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer) / 2

    @vf.metric
    async def reasoning_chars(self, trace) -> float:
        return float(len(trace.assistant_messages[-1].reasoning_content or ""))


class AdderConfig(vf.TasksetConfig):
    largest: int = 200


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    def load(self):
        for number in range(self.config.largest):
            text = f"What is {number} + 1?"
            data = Data(prompt=text, system_prompt="Add.", answer=str(number + 1))
            yield AdderTask(data, self.config.task)
"""
LADDER = '''
__all__ = ["LadderTaskset", "LadderEnv"]


class LadderTask(vf.Task[Data]):
    @vf.stop
    async def says_enough(self, trace) -> bool:
        return trace.last_reply == "enough"

    @vf.reward
    async def num_replies(self, trace) -> float:
        return trace.num_turns / 10


class LadderEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class LadderEnv(vf.Env[LadderEnvConfig]):
    """Says the reply back, twice; "up" each time earns 1, and "hang" hangs."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Say up.")
            heard = []
            while not segment.terminated:
                if segment.last_reply == "hang":
                    await asyncio.sleep(60)
                if segment.last_reply == "raise":
                    raise KeyError("lost")
                heard.append(segment.last_reply)
                if len(heard) == 2:
                    break
                segment = await interaction.turn(f"You said {segment.last_reply}.")
        interaction.trace.record_reward("ups", float(heard == ["up", "up"]), 1.0)


class LadderTaskset(vf.Taskset[LadderTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield LadderTask(Data(answer=str(number)), self.config.task)
            number += 1
'''
TOOLED = """
__all__ = ["TooledTaskset"]


class TooledTask(vf.Task[Data]):
    async def setup(self, trace, runtime):
        await runtime.run("true")

    @vf.reward
    async def ran(self, trace, runtime) -> float:
        return 1.0


class TooledTaskset(vf.Taskset[TooledTask, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            yield TooledTask(Data(prompt=f"Go {number}."), self.config.task)
"""


@pytest.fixture(autouse=True)
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("adder_v1", ADDER), ("ladder_v1", LADDER), ("tooled_v1", TOOLED)):
        (tmp_path / f"{name}.py").write_text(TASKSETS + text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def answer(text: object, think: str = "") -> str:
    return format_reply(think, str(text))


def test_a_task_is_asked_and_scored_by_verifiers() -> None:
    env = make_env("verifiers:adder-v1", max_turns=3)
    system, user = env.reset(0)
    assert system.text.startswith("Add.\n\nYou have at most 3 turns.")
    number = int(user.text.split()[2])
    result = env.step(answer(number + 1, think="four"))
    assert (result.reward, result.terminated, result.success) == (1.0, True, True)
    assert result.metrics == {"reasoning_chars": 4.0}
    assert env.reset(0) == [system, user]
    assert env.step(answer(number)).reward == 0.0
    with pytest.raises(EnvError, match="call reset"):
        env.step(answer(number))


def test_an_environment_of_several_turns_is_played_turn_by_turn() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100)
    assert env.reset(0)[1].text == "Say up."
    first = env.step(answer("up"))
    assert (first.reward, first.is_over) == (0.0, False)
    assert str(first.observation).startswith("You said up.")
    assert not env.step("malformed").is_valid
    last = env.step(answer("up"))
    assert (last.reward, last.terminated) == (1.2, True)


def test_a_run_that_is_cut_off_is_scored_as_far_as_it_came() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100, max_turns=1)
    env.reset(0)
    result = env.step(answer("up"))
    assert (result.reward, result.terminated, result.truncated) == (0.1, False, True)


def test_a_malformed_last_reply_leaves_what_was_reached() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100, max_turns=2)
    env.reset(0)
    env.step(answer("up"))
    result = env.step("malformed")
    assert (result.reward, result.penalty, result.truncated) == (0.0, -0.1, True)
    env.reset(0)
    assert env.step("malformed").reward == env.step("malformed").reward == -0.1


def test_a_stop_condition_of_the_task_ends_the_exchange() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100)
    env.reset(0)
    result = env.step(answer("enough"))
    assert (result.reward, result.terminated) == (0.1, True)


def test_a_copy_pickled_in_mid_episode_goes_on_like_the_original() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100)
    env.reset(0)
    env.step(answer("up"))
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step(answer("up")) == env.step(answer("up"))


def test_what_an_environment_raises_and_one_that_hangs_cost_the_episode() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100, time_limit_s=1.0)
    env.reset(0)
    with pytest.raises(EnvError, match="verifiers: KeyError: 'lost'"):
        env.step(answer("raise"))
    env.reset(0)
    with pytest.raises(EnvError, match="no answer within 1 s"):
        env.step(answer("hang"))
    env.reset(0)


def test_an_episode_that_is_left_in_the_middle_leaves_no_thread() -> None:
    env = make_env("verifiers:ladder-v1", max_tasks=100)
    before = threading.active_count()
    for seed in range(5):
        env.reset(seed)
    env.close()
    for _ in range(200):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_tasks_that_need_a_runtime_are_refused() -> None:
    env = make_env("verifiers:tooled-v1")
    with pytest.raises(EnvError, match="needs a runtime to set up, a runtime to score"):
        env.reset(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "no-such-v1"}, "no-such-v1 cannot be loaded: ModuleNotFoundError"),
        ({"id": "adder-v1", "config": {"largest": "many"}}, "adder-v1 cannot be loaded"),
        ({"id": "adder-v1", "config": {"largest": 0}}, "adder-v1 has no tasks"),
        ({"id": "adder-v1", "max_tasks": 0}, "max_tasks"),
        ({}, "needs the option 'id'"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(MooredError, match=said) as refusal:
        make_env("verifiers", **options).reset(0)
    assert "\n" not in str(refusal.value)


def test_hostile_replies_are_scored() -> None:
    from moored.envs.check.nasty import NASTY_REPLIES

    env = make_env("verifiers:adder-v1", max_turns=1)
    for seed, reply in enumerate(NASTY_REPLIES):
        env.reset(seed)
        assert env.step(reply).is_over


def test_the_rules_that_need_no_oracle_are_kept() -> None:
    report = check_env(
        "verifiers:adder-v1",
        options={"max_turns": 2},
        num_tasks=2,
        num_split_seeds=20,
        in_child=False,
        only=["episode_seed", "splits"],
    )
    report.raise_if_failed()
