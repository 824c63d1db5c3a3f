"""The rules behind `check_env`, one function each: the first line of its docstring is the rule.

A rule plays episodes of the environments that `Subject.make` gives it. It returns what it saw,
raises `Broken` with what was wrong, or `NotApplicable` with the reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations

import numpy as np

from moored.envs.base import SPLIT_SEEDS, Environment, format_reply, parse_reply
from moored.envs.check_probe import (
    HASH_SEEDS,
    MALFORMED,
    Broken,
    NotApplicable,
    Subject,
    copy_by_pickle,
    difference,
    digests_in_fresh_processes,
    expect_attributes,
    expect_messages,
    expect_result,
    expect_same,
    feed,
    play_oracle,
    replay,
    time_reply,
)
from moored.envs.nasty import EXECUTED, NASTY_REPLIES, fuzz_replies
from moored.errors import EnvError
from moored.types import content_text, messages_digest

_HUGE = "x" * 1_000_000


def check_protocol(subject: Subject) -> str:
    """Attributes, methods and what they return have the types of the protocol."""
    env = subject.make()
    expect_attributes(env)
    for seed in subject.seeds:
        expect_messages(env.reset(seed))
        answer = env.oracle()
        if not isinstance(answer, str):
            raise Broken(f"oracle() must return the answer as text, got {answer!r:.80}")
        expect_result(env.step(format_reply("", answer)))
    env.close()
    return f"{env.name}, max_turns = {env.max_turns}"


def check_processes(subject: Subject) -> str:
    """The same task seed gives the same first messages in fresh processes."""
    env = subject.make()
    if type(env).__module__ == "__main__":
        raise NotApplicable(
            "the class lives in a script or notebook, where a fresh process cannot find it; "
            "move it into a module and give 'module:Class'"
        )
    here = [messages_digest(env.reset(seed)) for seed in subject.seeds]
    for hash_seed, there in zip(HASH_SEEDS, digests_in_fresh_processes(subject), strict=True):
        pairs = zip(subject.seeds, here, there, strict=True)
        wrong = [seed for seed, a, b in pairs if a != b]
        if wrong:
            raise Broken(
                f"task seed {wrong[0]} gave other first messages in a process with "
                f"PYTHONHASHSEED={hash_seed}; draw everything from random.Random(task_seed): no "
                f"hash(), no order of a set, no global random, no clock"
            )
    return f"{len(here)} tasks, {1 + len(HASH_SEEDS)} processes"


def check_episode_seed(subject: Subject) -> str:
    """The episode seed does not change the first messages."""
    env = subject.make()
    for seed in subject.seeds:
        digests = {messages_digest(env.reset(seed, episode)) for episode in (0, 1, 12345)}
        if len(digests) > 1:
            raise Broken(
                f"task seed {seed} gave {len(digests)} different first messages under 3 episode "
                f"seeds; a group must share its prompt, so use episode_seed for noise in step only"
            )
    return f"{len(subject.seeds)} tasks, 3 episodes each"


def check_determinism(subject: Subject) -> str:
    """The same seeds and replies give the same results, in a new instance and a reused one."""
    reused = subject.make()
    num_scripts = 0
    for seed in subject.seeds:
        replies, asked = play_oracle(subject.make(), seed)
        alone = replay(subject.make(), seed, replies)
        expect_same(alone, asked, seed, "an episode where oracle() was called before each reply")
        for replies in subject.scripts(seed):
            first = replay(subject.make(), seed, replies)
            expect_same(first, replay(subject.make(), seed, replies), seed, "a new instance")
            replay(reused, seed + 1, [MALFORMED])  # an episode that is left in the middle
            expect_same(first, replay(reused, seed, replies), seed, "a reused instance")
            num_scripts += 1
    return f"{num_scripts} episodes, 3 times each"


def check_noise(subject: Subject) -> str:
    """Another episode seed changes results only where is_stochastic says so."""
    env = subject.make()
    num_scripts = num_varied = 0
    for seed in subject.seeds:
        for replies in subject.scripts(seed):
            first = replay(env, seed, replies)
            partings = [difference(first, replay(env, seed, replies, k)) for k in range(1, 4)]
            parting = next(filter(None, partings), "")
            if parting and not env.is_stochastic:
                raise Broken(
                    f"task seed {seed}: another episode seed led elsewhere ({parting}), but "
                    f"is_stochastic is False; set it to True, or take the noise out"
                )
            num_scripts, num_varied = num_scripts + 1, num_varied + bool(parting)
    if not env.is_stochastic:
        return "none, as is_stochastic = False says"
    return f"seen in {num_varied} of {num_scripts} scripts, is_stochastic = True"


def check_global_random(subject: Subject) -> str:
    """Playing leaves the global generators of random and numpy alone."""
    saved = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    before = _global_random_state()
    try:
        for seed in subject.seeds:
            play_oracle(subject.make(), seed)
        after = _global_random_state()
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
    if before != after:
        raise Broken(
            "the global random state changed while playing; draw from random.Random(task_seed) "
            "and random.Random(episode_seed) of your own"
        )
    return "untouched"


def check_pickling(subject: Subject) -> str:
    """A pickled copy, taken before reset or in mid-episode, goes on like the original."""
    for seed in subject.seeds:
        original = subject.make()
        copy = copy_by_pickle(original)
        if messages_digest(copy.reset(seed)) != messages_digest(original.reset(seed)):
            raise Broken(f"task seed {seed}: a copy pickled before reset gave another first prompt")
        solve, fail, _ = subject.scripts(seed)
        for replies in ([MALFORMED, *solve], fail):
            _expect_same_after_pickling(original, seed, replies, num_played=0)
            _expect_same_after_pickling(original, seed, replies, num_played=1)
    return f"{len(subject.seeds)} tasks, before reset, after it and after a turn"


def check_ending(subject: Subject) -> str:
    """Every episode ends within max_turns, and a step after the end raises EnvError."""
    env = subject.make()
    for seed in subject.seeds:
        for replies in subject.scripts(seed):
            if not replay(env, seed, replies)[-1].done:
                raise Broken(
                    f"task seed {seed} was not done after max_turns = {env.max_turns} replies; "
                    f"return done=True on the last turn"
                )
            _expect_over(env)
    return f"max_turns = {env.max_turns}, then EnvError"


def check_reference(subject: Subject) -> str:
    """The oracle's answers succeed on every task; if stochastic, in some episode of each."""
    env = subject.make()
    tries = subject.num_episodes if env.is_stochastic else 1
    for seed in subject.seeds:
        wins = (play_oracle(env, seed, episode)[1][-1].success for episode in range(tries))
        if not any(wins):
            rewards = [result.reward for result in play_oracle(env, seed)[1]]
            raise Broken(
                f"task seed {seed}: the oracle did not succeed in {tries} episode(s), rewards "
                f"{rewards}; make tasks solvable in max_turns = {env.max_turns}, and report "
                f"success=True when solved"
            )
    return f"{len(subject.seeds)} tasks solved"


def check_splits(subject: Subject) -> str:
    """Train, validation and test tasks share no first prompt."""
    env, num_seeds = subject.make(), subject.num_split_seeds
    digests = {
        split: {messages_digest(env.reset(seed)) for seed in seeds[:num_seeds]}
        for split, seeds in SPLIT_SEEDS.items()
    }
    distinct = {digest for found in digests.values() for digest in found}
    if len(distinct) == 1:
        raise NotApplicable("all seeds give one task, so there is nothing to keep apart")
    for a, b in combinations(digests, 2):
        shared = digests[a] & digests[b]
        if shared:
            raise Broken(
                f"{len(shared)} of {len(digests[b])} {b} tasks are {a} tasks too; draw tasks with "
                f"moored.envs.base.draw_task, which splits them by content"
            )
    return f"{len(distinct)} different tasks from {num_seeds} seeds a split, none shared"


def check_observations(subject: Subject) -> str:
    """Observations stay short, whatever is replied."""
    env, longest = subject.make(), 0
    for seed in subject.seeds:
        lengths = [len(message.text) for message in env.reset(seed)]
        hostile = [_HUGE, format_reply("", _HUGE), format_reply(_HUGE, "")][: env.max_turns]
        for replies in (*subject.scripts(seed), hostile):
            lengths += [len(content_text(x.observation)) for x in replay(env, seed, replies)]
        longest = max(longest, *lengths)
        if longest > subject.max_observation_chars:
            raise Broken(
                f"task seed {seed} showed {longest} characters in one message, more than the "
                f"{subject.max_observation_chars} allowed; cut long texts, do not echo replies"
            )
    return f"at most {longest} characters"


def check_replies(subject: Subject) -> str:
    """Empty, huge and hostile replies are scored: no exception, no hang, nothing executed."""
    env, slowest_s, limit_s = subject.make(), 0.0, subject.reply_limit_s
    EXECUTED.clear()
    for reply in NASTY_REPLIES:
        try:
            elapsed_s = time_reply(env, subject.seeds[0], reply, limit_s)
        except Broken:
            raise
        except Exception as error:
            raise Broken(
                f"step({_shorten(reply)}) raised {type(error).__name__}: {error}; score such a "
                f"reply with is_valid=False instead"
            ) from error
        if EXECUTED:
            raise Broken(f"step({_shorten(reply)}) ran code from the reply; never eval or exec it")
        if elapsed_s > limit_s:
            raise Broken(
                f"step({_shorten(reply)}) took {elapsed_s * 1e3:.0f} ms, more than "
                f"{limit_s * 1e3:.0f}; refuse long answers before parsing them"
            )
        slowest_s = max(slowest_s, elapsed_s)
    return f"{len(NASTY_REPLIES)} replies, slowest {slowest_s * 1e3:.1f} ms"


def check_malformed(subject: Subject) -> str:
    """Replies whose tags are not as asked get is_valid = False and no success."""
    env = subject.make()
    malformed = [reply for reply in NASTY_REPLIES if not parse_reply(reply).is_valid]
    for reply in malformed:
        (result,) = replay(env, subject.seeds[0], [reply])
        if result.is_valid or result.success:
            raise Broken(
                f"step({_shorten(reply)}) gave is_valid={result.is_valid}, "
                f"success={result.success}; read replies with moored.envs.parse_reply"
            )
    return f"{len(malformed)} replies"


def check_rewards(subject: Subject) -> str:
    """Rewards and metrics are finite numbers."""
    env = subject.make()
    rewards: list[float] = []
    for seed in subject.seeds:
        fuzzed = list(fuzz_replies(random.Random(seed), env.max_turns))
        for replies in (*subject.scripts(seed), fuzzed):
            for result in replay(env, seed, replies):
                _expect_finite(seed, {"reward": result.reward, **result.metrics})
                rewards.append(result.reward)
    return f"from {min(rewards):g} to {max(rewards):g} a turn"


def _global_random_state() -> tuple[object, str]:
    return random.getstate(), repr(np.random.get_state(legacy=False))


def _expect_same_after_pickling(
    env: Environment, seed: int, replies: list[str], *, num_played: int
) -> None:
    played = replay(env, seed, replies[:num_played])
    copy = copy_by_pickle(env)
    if played and played[-1].done:
        return
    rest = feed(env, replies[num_played:])
    where = f"a copy pickled after {num_played} turns"
    expect_same(rest, feed(copy, replies[num_played:]), seed, where)


def _expect_over(env: Environment) -> None:
    try:
        env.step(MALFORMED)
    except EnvError:
        return
    except Exception as error:
        raise Broken(
            f"step after the end raised {type(error).__name__}: {error}; raise EnvError"
        ) from error
    raise Broken("step after the end returned a result; raise EnvError until reset is called")


def _expect_finite(seed: int, numbers: dict[str, float]) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise Broken(f"task seed {seed} gave {name} = {value}; it must be a finite number")


def _shorten(reply: str) -> str:
    return f"{reply[:60]!a}… {len(reply)} characters" if len(reply) > 60 else f"{reply!a}"


RULES: dict[str, Callable[[Subject], str]] = {
    "protocol": check_protocol,
    "processes": check_processes,
    "episode_seed": check_episode_seed,
    "determinism": check_determinism,
    "noise": check_noise,
    "global_random": check_global_random,
    "pickling": check_pickling,
    "ending": check_ending,
    "reference": check_reference,
    "splits": check_splits,
    "observations": check_observations,
    "replies": check_replies,
    "malformed": check_malformed,
    "rewards": check_rewards,
}
"""Every rule by name, in the order they run."""

FIRST_RULES = ("protocol", "replies")
"""When one of these is broken, the rules after it are not run: wrong types break all of them, and
an environment that runs or chokes on hostile replies should not be given more."""
