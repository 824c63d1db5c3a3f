"""Where dialogues come from: `train(i)` and `held_out(i)` are functions of the seed and `i` alone,
so that a resumed run goes on with the dialogue after the last one it learnt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Protocol

import numpy as np

from moored.config import EnvConfig
from moored.envs.base import SPLIT_SEEDS, Environment, Split
from moored.envs.mix import EnvMix, in_a_sentence, open_env
from moored.errors import ConfigError, EnvError
from moored.sft.demonstrations import Episode, TraceMix, play
from moored.sft.dialogues import Dialogue, hold_out, read_dialogues
from moored.sft.options import SftConfig


class Source(Protocol):
    """An endless supply of dialogues to learn from, and some to test on."""

    num_held_out: int

    def train(self, index: int) -> Dialogue: ...

    def held_out(self, index: int) -> Dialogue: ...

    def close(self) -> None: ...


class FileSource:
    """Dialogues of a file, in another order every time round."""

    def __init__(self, dialogues: list[Dialogue], *, num_held_out: int, seed: int) -> None:
        self._train, self._tested = hold_out(dialogues, num_held_out)
        self._seed = seed
        self.num_held_out = len(self._tested)

    def train(self, index: int) -> Dialogue:
        epoch, place = divmod(index, len(self._train))
        return self._train[_order(self._seed, epoch, len(self._train))[place]]

    def held_out(self, index: int) -> Dialogue:
        return self._tested[index]

    def close(self) -> None:
        """Nothing is open."""


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


class OracleSource:
    """Episodes that the environments' oracles play: of train tasks, or of validation tasks."""

    def __init__(
        self,
        specs: Sequence[EnvConfig],
        traces: Sequence[TraceMix],
        *,
        num_held_out: int,
        seed: int,
    ) -> None:
        """`traces` says for each of `specs` how its episodes are written."""
        self._mix, self._traces, self._seed = EnvMix(specs), tuple(traces), seed
        self.num_held_out = num_held_out
        with ExitStack() as stack:
            self._envs = [stack.enter_context(open_env(s.name, **s.options)) for s in specs]
            for name, env in zip(self._mix.names, self._envs, strict=True):
                check_oracle(name, env)
            self._stack = stack.pop_all()

    def train(self, index: int) -> Dialogue:
        return self.episode(index, "train").messages

    def held_out(self, index: int) -> Dialogue:
        return self.episode(index, "validation").messages

    def episode(self, index: int, split: Split = "train") -> Episode:
        """The `index`-th episode of a split."""
        rng = random.Random(f"sft {self._seed} {split} {index}")
        entry = self._mix.index_of_group(index, seed=self._seed)
        traces = self._traces[entry]
        kind, task_seed = traces.draw(rng), rng.choice(SPLIT_SEEDS[split])
        try:
            return play(self._envs[entry], task_seed, rng, kind=kind, noise=traces.noise)
        except (Exception, SystemExit) as error:
            raise EnvError(
                f"environment {self._mix.names[entry]!r} failed while its oracle played task "
                f"{task_seed}: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        self._stack.close()


def check_oracle(name: str, env: Environment) -> None:
    """Refuse an environment that knows no good answer for its first task."""
    with in_a_sentence(name):
        env.reset(0)
        try:
            answer, why = env.oracle(), "it gives no answer to task 0"
        except (EnvError, NotImplementedError) as error:
            answer, why = "", str(error) or "it is not implemented"
    if not answer:
        raise ConfigError(
            f"environment {name!r} has no oracle to learn from ({why}); give dialogues=FILE, or "
            f"choose an environment that has one"
        )


def open_source(config: SftConfig) -> Source:
    """The dialogues that a configuration asks for."""
    most = config.evaluation.num_dialogues
    if config.dialogues is not None:
        return FileSource(read_dialogues(config.dialogues), num_held_out=most, seed=config.seed)
    given = [spec.demonstrations or config.demonstrations for spec in config.env]
    traces = [TraceMix(each.grounded, each.noised, each.noise) for each in given]
    return OracleSource(config.env, traces, num_held_out=most, seed=config.seed)
