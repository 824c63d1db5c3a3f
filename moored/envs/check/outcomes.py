"""Rules of `check_env` that compare results of episodes: noise, and the reference solution."""

from __future__ import annotations

from statistics import fmean

from moored.envs.check.probe import Probe, Subject, difference, play_oracle, replay, total_reward
from moored.envs.check.types import Broken
from moored.reply import format_reply

NUM_COMPARED = 8
"""Episodes of each stochastic task whose rewards are compared."""
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
