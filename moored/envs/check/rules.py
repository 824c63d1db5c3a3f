"""The rules behind `check_env`, one function each: the first line of its docstring is the rule.

A rule plays episodes of the environments that `Subject.make` gives it. It returns what it saw,
raises `Broken` with what was wrong, or `NotApplicable` with the reason.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import combinations, cycle

import numpy as np

from moored.envs.base import SPLIT_SEEDS, StepResult
from moored.envs.check.nasty import EXECUTED, NASTY_REPLIES, fuzz_replies
from moored.envs.check.outcomes import check_noise, check_penalty, check_reference
from moored.envs.check.probe import (
    MALFORMED,
    NotApplicable,
    Probe,
    Subject,
    expect_same,
    feed,
    find_opening,
    play_oracle,
    replay,
    shorten,
    time_reply,
)
from moored.envs.check.types import Broken, expect_attributes, expect_messages
from moored.envs.resources import SharedResources
from moored.envs.serving.wire import NoRoomError
from moored.envs.worker import START_LIMIT_S, Worker, WorkerLost
from moored.errors import EnvError
from moored.reply import format_reply, parse_reply
from moored.types import Content, Message, TextPart, content_text, messages_digest

HASH_SEEDS = ("1", "2")
_HUGE = "x" * 1_000_000


def check_protocol(subject: Subject) -> str:
    """Attributes, methods and what they return have the types of the protocol."""
    env = subject.make()
    expect_attributes(env.env)
    for seed in subject.seeds:
        expect_messages(env.reset(seed))
        answer = env.oracle()
        if not isinstance(answer, str):
            raise Broken(f"oracle() must return the answer as text, got {answer!r:.80}")
        env.step(format_reply("", answer))
    env.close()
    return f"{env.env.name}, max_turns = {env.max_turns}"


def check_processes(subject: Subject) -> str:
    """The same task seed gives the same first messages in fresh processes."""
    digests = _digests_in_fresh_processes(subject)
    env = subject.make()
    here = [messages_digest(env.reset(seed)) for seed in subject.seeds]
    for hash_seed, there in zip(HASH_SEEDS, digests, strict=True):
        pairs = zip(subject.seeds, here, there, strict=True)
        wrong = [seed for seed, a, b in pairs if a != b]
        if wrong:
            raise Broken(
                f"task seed {wrong[0]} gave other first messages in a process with "
                f"PYTHONHASHSEED={hash_seed}; draw everything from random.Random(task_seed): no "
                f"hash(), no order of a set, no global random, no clock"
            )
    return f"{len(here)} tasks, {1 + len(HASH_SEEDS)} processes"


def _digests_in_fresh_processes(subject: Subject) -> list[list[str]]:
    """First-message digests of all seeds, as processes with other hash seeds find them."""
    job = pickle.dumps((subject.portable_maker(), subject.seeds))
    subject.announce("reset in a fresh process")
    with ThreadPoolExecutor(len(HASH_SEEDS)) as threads:
        return list(threads.map(lambda hash_seed: _digests(job, hash_seed), HASH_SEEDS))


def _digests(job: bytes, hash_seed: str) -> list[str]:
    worker = Worker(f"{__name__}:make_digests", environ={"PYTHONHASHSEED": hash_seed})
    try:
        return worker.ask(job, wall_s=START_LIMIT_S)
    except WorkerLost as lost:
        raise Broken(f"a fresh process gave no first messages, {lost}") from None
    except NoRoomError:
        raise
    except Exception as error:
        raise Broken(
            f"a fresh process could not make the first messages: {type(error).__name__}: {error}"
        ) from error
    finally:
        worker.stop()


def make_digests(job: bytes) -> list[str]:
    """Run in a fresh process: the digests of a pickled maker and its seeds."""
    maker, seeds = pickle.loads(job)
    with closing(SharedResources()) as shared:
        env = maker()
        shared.attach(env)
        return [messages_digest(env.reset(seed)) for seed in seeds]


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
        with closing(subject.make()) as env:
            replies, asked = play_oracle(env, seed)
        alone = _replay_in_new(subject, seed, replies)
        expect_same(alone, asked, seed, "an episode where oracle() was called before each reply")
        for replies in subject.scripts(seed):
            first = _replay_in_new(subject, seed, replies)
            expect_same(first, _replay_in_new(subject, seed, replies), seed, "a new instance")
            replay(reused, seed + 1, [MALFORMED])  # an episode that is left in the middle
            expect_same(first, replay(reused, seed, replies), seed, "a reused instance")
            num_scripts += 1
    return f"{num_scripts} episodes, 3 times each"


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
    """A pickled copy, taken after reset or in mid-episode, goes on like the original."""
    for seed in subject.seeds:
        env = subject.make()
        for replies in subject.scripts(seed)[:2]:
            for num_played in (0, 1):
                played = replay(env, seed, replies[:num_played])
                if played and played[-1].is_over:
                    continue
                with closing(env.copy()) as copy:
                    rest = feed(env, replies[num_played:])
                    where = f"a copy pickled after {num_played} turns"
                    expect_same(rest, feed(copy, replies[num_played:]), seed, where)
    return f"{len(subject.seeds)} tasks, after reset and after a turn"


def check_ending(subject: Subject) -> str:
    """Every episode is terminated or truncated by max_turns; a step after that raises EnvError."""
    env = subject.make()
    for seed in subject.seeds:
        for replies in subject.scripts(seed):
            if not replay(env, seed, replies)[-1].is_over:
                raise Broken(
                    f"task seed {seed} was not over after max_turns = {env.max_turns} replies; on "
                    f"the last turn return terminated=True when the task itself is over, else "
                    f"truncated=True"
                )
            _expect_over(env)
    return f"max_turns = {env.max_turns}, then EnvError"


def check_splits(subject: Subject) -> str:
    """Train, validation and test tasks share no first prompt, whatever task numbers it shows.

    The first messages are compared, without the digits of the task seed. Equal tasks that look
    different, such as the same numbers in another order, are for the environment's own tests.
    """
    env, num_seeds = subject.make(), subject.num_split_seeds
    # From both ends: the last seeds have many digits, which can be removed safely.
    ends = slice((num_seeds + 1) // 2), slice(-(num_seeds // 2) or None, None)
    digests = {
        split: {_task_digest(env, seed) for end in ends for seed in seeds[end]}
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


def _task_digest(env: Probe, seed: int) -> str:
    """Digest of the first messages without the task seed, where it is too long to be chance."""
    messages, number = env.reset(seed), str(seed)
    if len(number) < 8:
        return messages_digest(messages)
    return messages_digest(
        [Message(message.role, _without(message.content, number)) for message in messages]
    )


def _without(content: Content, number: str) -> Content:
    if isinstance(content, str):
        return content.replace(number, "")
    return [
        TextPart(type="text", text=part["text"].replace(number, ""))
        if part["type"] == "text"
        else part
        for part in content
    ]


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
    env, slowest_s = subject.make(), 0.0
    openings = {seed: find_opening(env, seed) for seed in subject.seeds}
    EXECUTED.clear()
    for reply, seed in zip(NASTY_REPLIES, cycle(openings), strict=False):
        for opening in ([], openings[seed])[: 1 + bool(openings[seed])]:
            slowest_s = max(slowest_s, _time_nasty_reply(subject, env, seed, reply, opening))
    return f"{len(NASTY_REPLIES)} replies, slowest {slowest_s * 1e3:.1f} ms"


def _time_nasty_reply(
    subject: Subject, env: Probe, seed: int, reply: str, opening: list[str]
) -> float:
    limit_s = subject.reply_limit_s
    step = f"step({shorten(reply)})" + " in mid-episode" * bool(opening)
    try:
        elapsed_s = time_reply(env, seed, reply, limit_s, opening)
    except Broken:
        raise
    except (Exception, SystemExit) as error:
        raise Broken(
            f"{step} raised {type(error).__name__}: {error}; score such a reply with "
            f"is_valid=False instead"
        ) from error
    if EXECUTED:
        raise Broken(f"{step} ran code from the reply; never eval or exec it")
    if elapsed_s > limit_s:
        raise Broken(
            f"{step} took {elapsed_s * 1e3:.0f} ms, more than {limit_s * 1e3:.0f}; refuse long "
            f"answers before parsing them"
        )
    return elapsed_s


def check_malformed(subject: Subject) -> str:
    """Replies whose tags are malformed get is_valid = False and no success."""
    env = subject.make()
    malformed = [reply for reply in NASTY_REPLIES if not parse_reply(reply).is_valid]
    note = f"{len(malformed)} replies"
    for reply, seed in zip(malformed, cycle(subject.seeds), strict=False):
        result = replay(env, seed, [reply])[0]
        if result.reward < 0.0 and result.penalty == 0.0:
            note = (
                f"{len(malformed)} replies; step({shorten(reply)}) earned {result.reward:g}: if "
                f"that is for its form, report it as penalty too, and the filter will leave it out"
            )
        if result.is_valid or result.success:
            raise Broken(
                f"step({shorten(reply)}) gave is_valid={result.is_valid}, "
                f"success={result.success}; read replies with moored.envs.parse_reply"
            )
    return note


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


def _replay_in_new(subject: Subject, seed: int, replies: list[str]) -> list[StepResult]:
    """Replay in an instance of its own, which is closed: a server may have few sessions."""
    with closing(subject.make()) as env:
        return replay(env, seed, replies)


def _global_random_state() -> tuple[object, str]:
    return random.getstate(), repr(np.random.get_state(legacy=False))


def _expect_over(env: Probe) -> None:
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
    "penalty": check_penalty,
    "rewards": check_rewards,
}
"""Every rule by name, in the order they run."""

FIRST_RULES = ("protocol", "replies")
"""When one of these is broken, the rules after it are not run: wrong types break all of them, and
an environment that runs or chokes on hostile replies should not be given more."""
