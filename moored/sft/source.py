"""Where dialogues come from: `train(i)` and `held_out(i)` are functions of the seed and `i` alone,
so that a resumed run goes on with the dialogue after the last one it learnt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Protocol

import numpy as np

from moored.config import EnvConfig
from moored.envs.base import SPLIT_SEEDS, Environment, Split
from moored.envs.mix import EnvMix, in_a_sentence, open_env
from moored.envs.teaching import Guesses
from moored.errors import ConfigError, EnvError
from moored.sft.demonstrations import Episode, Kind, TraceMix, answer_of, play
from moored.sft.dialogues import Dialogue, hold_out, read_dialogues
from moored.sft.options import SftConfig

PROBED = 8
"""Tasks of an environment that its oracle is tried on before a run, where they are quick."""
PROBE_S = 1.0
"""After so long, no further task is tried."""


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
        return self._play(entry, task_seed, rng, kind)

    def probe(self) -> list[str]:
        """Play a few train tasks of each environment; a sentence for each oracle that fails them.

        Raises where one cannot be played, so that this is known before a model is loaded.
        """
        warnings = (self._probe_one(entry) for entry in range(len(self._envs)))
        return [text for text in warnings if text]

    def _probe_one(self, entry: int) -> str:
        rng, begin = random.Random(f"sft {self._seed} probe"), time.perf_counter()
        in_use: list[Kind] = [k for k, share in self._traces[entry].shares.items() if share > 0]
        for kind in in_use:
            self._play(entry, rng.choice(SPLIT_SEEDS["train"]), rng, kind)
        if in_use == ["plain"] and isinstance(self._envs[entry], Guesses):
            return ""  # guesses need not be right
        found: list[Episode] = []
        while len(found) < PROBED and (not found or time.perf_counter() - begin < PROBE_S):
            found.append(self._play(entry, rng.choice(SPLIT_SEEDS["train"]), rng, "grounded"))
        tasks = "the task" if len(found) == 1 else f"all {len(found)} tasks"
        name = self._mix.names[entry]
        if not any(episode.is_valid for episode in found):
            return (
                f"the oracle of environment {name!r} wrote replies that the environment calls "
                f"invalid in {tasks} that it was tried on, and the model will learn to write such "
                f"replies; correct oracle(), or what step() accepts"
            )
        if not any(episode.success or episode.reward > 0 for episode in found):
            return (
                f"the oracle of environment {name!r} earned nothing in {tasks} that it was tried "
                f"on, and nor will a model that learns from it; correct oracle(), or the reward "
                f"of step()"
            )
        return ""

    def _play(self, entry: int, task_seed: int, rng: random.Random, kind: Kind) -> Episode:
        noise = self._traces[entry].noise
        try:
            return play(self._envs[entry], task_seed, rng, kind=kind, noise=noise)
        except (Exception, SystemExit) as error:
            why = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
            raise EnvError(
                f"environment {self._mix.names[entry]!r} failed while its oracle played task "
                f"{task_seed}: {why}"
            ) from error

    def close(self) -> None:
        self._stack.close()


def check_oracle(name: str, env: Environment) -> None:
    """Refuse an environment that knows no good answer for its first task."""
    with in_a_sentence(name):
        env.reset(0)
        try:
            answer, why = answer_of(env), "it gives no answer to task 0"
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
