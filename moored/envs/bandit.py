"""Bandit: two arms named after professions, one safe, one risky; choose the better one.

The smallest task with noisy rewards: the names suggest the kinds of arm, and an expected value
decides.
"""

from __future__ import annotations

import random
from typing import ClassVar

from moored.envs.base import FORMAT_REMINDER, StepResult, draw_task, malformed_reward
from moored.envs.teaching import fill
from moored.errors import EnvError
from moored.reply import parse_actions, parse_reply
from moored.types import Message

# fmt: off
STEADY = (
    "Accountant", "Actuary", "Archivist", "Auditor", "Baker", "Barber", "Bookkeeper",
    "Butler", "Cartographer", "Cashier", "Clerk", "Curator", "Dentist", "Dietitian",
    "Florist", "Gardener", "Geologist", "Janitor", "Judge", "Librarian", "Locksmith",
    "Mathematician", "Notary", "Nurse", "Optician", "Pharmacist", "Plumber", "Postman",
    "Potter", "Professor", "Proofreader", "Receptionist", "Registrar", "Secretary",
    "Shepherd", "Statistician", "Tailor", "Teacher", "Translator", "Weaver",
)
DARING = (
    "Acrobat", "Adventurer", "Astronaut", "Aviator", "Boxer", "Broker", "Buccaneer",
    "Bullfighter", "Cardsharp", "Cowboy", "Daredevil", "Entrepreneur", "Explorer",
    "Financier", "Firefighter", "Founder", "Gambler", "Gladiator", "Inventor", "Investor",
    "Jockey", "Mercenary", "Mountaineer", "Pirate", "Privateer", "Promoter", "Prospector",
    "Racer", "Rockstar", "Skydiver", "Smuggler", "Speculator", "Spy", "Stuntman", "Surfer",
    "Trader", "Trapper", "Whaler", "Wildcatter", "Wrestler",
)
# fmt: on


class Bandit:
    """Pull one of two arms, once; their names, two professions, show which is safe and which risky.

    The prompt says what the two kinds of arm pay, not which arm is which: an arm named after a
    steady profession (Librarian) is safe, one named after a daring profession (Trader) is risky.
    Success is choosing the arm that pays more on average, whatever it paid this time. One pull
    terminates the episode.

    Reward: 0.1 from the safe arm, 1 with probability 0.25, else 0, from the risky arm, so the
    risky arm is better. A reply that does not name one of the arms earns `format_penalty`.

    Options:
    - `safe_reward=0.1`: what the safe arm always pays.
    - `risky_reward=1.0`, `risky_probability=0.25`: what the risky arm pays, and how often.
    - `reverse=False`: steady names are the risky arms, so what the names suggest must be unlearnt.
    - `format_penalty=None`: reward of a malformed reply; None: −0.1, or that of the worse arm where
      an arm pays less.
    """

    name: ClassVar[str] = "bandit"
    max_turns: int = 1

    def __init__(
        self,
        *,
        safe_reward: float = 0.1,
        risky_reward: float = 1.0,
        risky_probability: float = 0.25,
        reverse: bool = False,
        format_penalty: float | None = None,
    ) -> None:
        if not 0 <= risky_probability <= 1:
            raise EnvError(
                f"bandit: risky_probability is a probability in [0, 1], got {risky_probability}"
            )
        self.safe_reward = safe_reward
        self.risky_reward = risky_reward
        self.risky_probability = risky_probability
        self.reverse = reverse
        worst_pay = min(safe_reward, risky_reward, 0.0)
        self.format_penalty = malformed_reward(format_penalty, -worst_pay)
        self.is_stochastic = 0 < risky_probability < 1 and risky_reward != 0
        self._arms: tuple[str, str] | None = None
        self._over = True

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        # Both orders of a pair belong to one split.
        self._arms, _ = draw_task(task_seed, _draw_arms, key=lambda arms: "|".join(sorted(arms)))
        # Another stream than the task's, and another one in every task.
        self._noise = random.Random(f"noise {task_seed} {episode_seed}")
        self._over = False
        return [Message("system", self._rules()), Message("user", _question(*self._arms))]

    def step(self, reply: str) -> StepResult:
        if self._over or self._arms is None:
            raise EnvError("bandit: the episode is over; call reset before step")
        self._over = True
        answer = parse_reply(reply).answer
        choice = None if answer is None else parse_actions(answer, self._arms)
        if choice is None or len(choice) != 1:
            return StepResult(
                observation=f"Malformed reply. Reward: {self.format_penalty:g}.",
                reward=self.format_penalty,
                penalty=self.format_penalty,
                terminated=True,
                is_valid=False,
            )
        is_risky = self._is_risky(choice[0])
        reward = self._pull_risky() if is_risky else self.safe_reward
        return StepResult(
            observation=f"You pulled {choice[0]}. Reward: {reward:g}.",
            reward=reward,
            terminated=True,
            success=self._mean_reward(choice[0]) == max(map(self._mean_reward, self._arms)),
            metrics={"chose_risky": float(is_risky)},
        )

    def oracle(self) -> str:
        if self._arms is None:
            raise EnvError("bandit: there is no task yet; call reset before oracle")
        return max(self._arms, key=self._mean_reward)

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """Which kind the answer is held to be: the better one."""
        better, worse = ("risky", "safe") if self._is_risky(self.oracle()) else ("safe", "risky")
        close = fill(f"{{{better.capitalize()}|The {better} arm}} pays more on average.", rng)
        return f"{answer} is {better}, {self._other(answer)} is {worse}. {close}"

    def guess(self, rng: random.Random) -> str:
        assert self._arms is not None
        return rng.choice(self._arms)

    def spoil(self, answer: str, chance: float, rng: random.Random) -> str:
        """The other arm, whatever the chance: an answer has one part."""
        return self._other(answer)

    def _other(self, arm: str) -> str:
        assert self._arms is not None
        first, second = self._arms
        return second if arm == first else first

    def close(self) -> None:
        self._over = True

    def _is_risky(self, arm: str) -> bool:
        return (arm in DARING) != self.reverse

    def _mean_reward(self, arm: str) -> float:
        risky = self.risky_probability * self.risky_reward
        return risky if self._is_risky(arm) else self.safe_reward

    def _pull_risky(self) -> float:
        return self.risky_reward if self._noise.random() < self.risky_probability else 0.0

    def _rules(self) -> str:
        return (
            "You pull one of two arms, once, and want the most reward on average. One arm is safe: "
            f"it always pays {self.safe_reward:g}. The other is risky: it pays "
            f"{self.risky_reward:g} with probability {self.risky_probability:g}, else 0. Which arm "
            "is which follows from the professions they are named after, by the same rule in every "
            f"game.\nA malformed reply earns {self.format_penalty:g} and ends the game.\n"
            f"{FORMAT_REMINDER}."
        )


def _question(first: str, second: str) -> str:
    return (
        f"The arms are {first} and {second}. Answer with the name of one arm.\n{FORMAT_REMINDER}."
    )


def _draw_arms(rng: random.Random) -> tuple[str, str]:
    steady, daring = rng.choice(STEADY), rng.choice(DARING)
    return (steady, daring) if rng.random() < 0.5 else (daring, steady)
