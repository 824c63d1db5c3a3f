"""Rules of `check_env` that compare results of episodes: noise, the reference solution, prices."""

from __future__ import annotations

import random
from statistics import fmean

from moored.envs.base import StepResult
from moored.envs.check.probe import (
    MALFORMED,
    NotApplicable,
    Probe,
    Subject,
    difference,
    play_guesses,
    play_oracle,
    replay,
    total_reward,
)
from moored.envs.check.types import Broken
from moored.errors import EnvError
from moored.reply import format_reply

NUM_COMPARED = 8
"""Episodes of each stochastic task whose rewards are compared."""
TOLERANCE = 1e-9
"""Of rewards that are sums."""
NUM_GUESSED = 4
"""Episodes of guesses that are played of each task, to see what valid turns cost."""
Play = tuple[int, int]
"""Task seed and episode seed."""


def check_noise(subject: Subject) -> str:
    """Another episode seed changes results where is_stochastic is True, and only there."""
    env = subject.make()
    num_scripts = num_varied = 0
    for seed in subject.seeds:
        for replies in subject.scripts(seed):
            parting = _parting_of_episodes(env, seed, replies, range(1, 4))
            if parting and not env.is_stochastic:
                raise Broken(
                    f"task seed {seed}: another episode seed led elsewhere ({parting}), but "
                    f"is_stochastic is False; set it to True, or take the noise out"
                )
            num_scripts, num_varied = num_scripts + 1, num_varied + bool(parting)
    if not env.is_stochastic:
        return "none, as is_stochastic = False says"
    if num_varied:
        return f"seen in {num_varied} of {num_scripts} scripts, is_stochastic = True"
    return _find_rare_noise(subject, env)


def _find_rare_noise(subject: Subject, env: Probe) -> str:
    """Try more episodes, and other answers: the words of the prompt may name what is noisy."""
    episodes = range(1, subject.num_episodes)
    for seed in subject.seeds:
        words = dict.fromkeys(env.reset(seed)[1].text.replace(".", " ").split())
        for replies in (subject.scripts(seed)[0], *([format_reply("", word)] for word in words)):
            if _parting_of_episodes(env, seed, replies, episodes):
                return f"seen in task {seed}, rarely, is_stochastic = True"
    raise Broken(
        f"is_stochastic is True, but {len(subject.seeds)} tasks went the same in "
        f"{subject.num_episodes} episodes each; draw noise from "
        f"random.Random(f'noise {{task_seed}} {{episode_seed}}'), or set is_stochastic to False"
    )


def _parting_of_episodes(env: Probe, seed: int, replies: list[str], episodes: range) -> str:
    """Say where the same replies lead elsewhere in another episode; empty when nowhere."""
    first = replay(env, seed, replies)
    partings = (difference(first, replay(env, seed, replies, k)) for k in episodes)
    return next(filter(None, partings), "")


def check_reference(subject: Subject) -> str:
    """The oracle succeeds on every task, and earns more than malformed and foreign replies.

    Where there is noise, success in some episode of each task is enough, and means are compared.
    """
    env = subject.make()
    tries = subject.num_episodes if env.is_stochastic else 1
    for seed in subject.seeds:
        wins = (play_oracle(env, seed, episode)[1][-1].success for episode in range(tries))
        if not any(wins):
            rewards = [result.reward for result in play_oracle(env, seed)[1]]
            episodes = "1 episode" if tries == 1 else f"{tries} episodes"
            raise Broken(
                f"task seed {seed}: the oracle did not succeed in {episodes}, rewards "
                f"{rewards}; make tasks solvable in max_turns = {env.max_turns}, and report "
                f"success=True when solved"
            )
    return f"{len(subject.seeds)} tasks solved, {_compare_rewards(subject, env)}"


def _compare_rewards(subject: Subject, env: Probe) -> str:
    """Raise unless the oracle earns more than 0 and than replies that solve nothing.

    Task by task; where there is noise, on average over all tasks. Another task's solution may
    happen to solve a task too, so that is compared on average in any case.
    """
    episodes = range(min(NUM_COMPARED, subject.num_episodes) if env.is_stochastic else 1)
    plays = [(seed, episode) for seed in subject.seeds for episode in episodes]
    oracle = {play: total_reward(play_oracle(env, *play)[1]) for play in plays}
    malformed, foreign = (_script_rewards(subject, env, plays, script) for script in (1, 2))
    for unit in [plays] if env.is_stochastic else [[play] for play in plays]:
        mean = fmean(oracle[play] for play in unit)
        if not mean > 0:
            raise Broken(
                f"task seed {unit[0][0]}: the oracle succeeds, but its total reward is {mean:g}; "
                f"a solution must earn more than 0"
            )
        _expect_more(oracle, malformed, unit, "malformed replies")
    _expect_more(oracle, foreign, list(foreign), "another task's solution")
    return f"mean reward {fmean(oracle.values()):.3g}"


def _script_rewards(
    subject: Subject, env: Probe, plays: list[Play], script: int
) -> dict[Play, float]:
    """Total rewards of one of the scripts, where it does not begin with the oracle's own."""
    rewards: dict[Play, float] = {}
    for seed, episode in plays:
        own, replies = subject.scripts(seed)[0], subject.scripts(seed)[script]
        if replies[: len(own)] != own:
            rewards[seed, episode] = total_reward(replay(env, seed, replies, episode))
    return rewards


def _expect_more(
    oracle: dict[Play, float], others: dict[Play, float], plays: list[Play], what: str
) -> None:
    compared = [play for play in plays if play in others]
    if not compared:
        return
    mean, other = fmean(oracle[play] for play in compared), fmean(others[play] for play in compared)
    if not mean > other:
        raise Broken(
            f"task seed {compared[0][0]}: the oracle earns {mean:g}, and {what} {other:g}; pay a "
            f"solution more than what does not solve"
        )


def check_penalty(subject: Subject) -> str:
    """A malformed turn costs at least as much as any valid one, and ends no episode early.

    Turns that end the episode are compared with one another, and so are those that do not: what is
    charged for time running out is charged for both.
    """
    env, malformed_rewards = subject.make(), set[float]()
    for seed in subject.seeds:
        malformed = [replay(env, seed, replies) for replies in _malformed_scripts(env)]
        valid = _valid_plays(subject, env, seed)
        for is_over in (False, True):
            rewards = _turn_rewards(malformed, is_valid=False, is_over=is_over)
            others = _turn_rewards(valid, is_valid=True, is_over=is_over)
            if rewards and others:
                malformed_rewards.update(rewards)
                _expect_dearer(seed, max(rewards), min(others))
        for play in valid:
            _expect_no_early_end(seed, malformed[0], play)
    if not malformed_rewards:
        raise NotApplicable("no valid turn was seen to compare with; oracle and guess play them")
    most, least = max(malformed_rewards), min(malformed_rewards)
    earned = f"{most:g}" if most == least else f"{least:g} to {most:g}"
    return f"malformed turns earn {earned}, valid ones of the same task no less"


def _turn_rewards(plays: list[list[StepResult]], *, is_valid: bool, is_over: bool) -> list[float]:
    turns = (turn for play in plays for turn in play)
    return [t.reward for t in turns if (t.is_valid, t.is_over) == (is_valid, is_over)]


def _malformed_scripts(env: Probe) -> list[list[str]]:
    """Replies without tags, and with an answer that most environments cannot read."""
    return [[reply] * env.max_turns for reply in (MALFORMED, format_reply("", MALFORMED))]


def _valid_plays(subject: Subject, env: Probe, seed: int) -> list[list[StepResult]]:
    """Episodes of guesses, of the oracle, and of another task's answers over and over."""
    plays = [play_guesses(env, seed, random.Random(number)) for number in range(NUM_GUESSED)]
    try:
        own, other = (subject.scripts(task)[0] for task in (seed, seed + 1))
    except EnvError:
        return plays  # no good answer is known
    return [*plays, replay(env, seed, own), replay(env, seed, other * env.max_turns)]


def _expect_dearer(seed: int, cheapest: float, dearest: float) -> None:
    if cheapest > dearest + TOLERANCE:
        raise Broken(
            f"task seed {seed}: a malformed turn earned {cheapest:g}, and a valid one {dearest:g}, "
            f"so a model that fails learns to write malformed replies; let each of them earn at "
            f"most {dearest:g}"
        )


def _expect_no_early_end(seed: int, malformed: list[StepResult], valid: list[StepResult]) -> None:
    """A failure in valid turns earns no less than malformed replies until the end."""
    if not valid or valid[-1].success or not all(turn.is_valid for turn in valid):
        return
    total, other = total_reward(malformed), total_reward(valid)
    if total > other + TOLERANCE:
        raise Broken(
            f"task seed {seed}: malformed replies ended the episode on turn {len(malformed)} with "
            f"{total:g} in all, and a failure of {len(valid)} valid turns earned {other:g}, so a "
            f"model that fails learns to write malformed replies; let each use up one turn only, "
            f"or charge for the turns it saves"
        )
