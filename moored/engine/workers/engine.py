"""The engine of a driver: sampler and learner over one team of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moored.config import Config
from moored.engine.check import (
    PlainModel,
    check_engine,
    check_positions,
    check_scores,
    check_window,
)
from moored.engine.workers.learner import TeamLearner
from moored.engine.workers.sampler import TeamSampler
from moored.engine.workers.team import Team
from moored.engine.workers.worker import WorkerInfo
from moored.rollout.render import Renderer


class TeamEngine:
    """What `Engine` asks for, computed by the workers of a team."""

    def __init__(self, config: Config, team: Team) -> None:
        self._config = config
        self.team = team
        self.info: WorkerInfo = team.call("describe")[0]
        self.tokenizer: Any = team.call("tokenizer")[0]
        self.learner = TeamLearner(team)
        self.scorer = self.learner
        self.sampler = TeamSampler(team, streams=self.info.streams)
        self._renderer: Renderer | None = None

    @property
    def renderer(self) -> Renderer:
        """Made on first use: scoring does not need it, nor a chat template."""
        if self._renderer is None:
            self._renderer = Renderer(
                self.tokenizer, vocabulary=self.vocabulary, eos_ids=self.info.eos_ids
            )
        return self._renderer

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return self.info.vocabulary

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model was made for and is scored exactly, where it says."""
        return self.info.max_positions

    @property
    def exact_limit(self) -> int | None:
        """The same; longer where the model scales its angles, and so reaches beyond."""
        return self.info.exact_limit

    def describe(self) -> str:
        return self.info.description

    def check(self) -> None:
        longest = self._config.rollout.max_context
        check_window(self.info.model_type, self.info.sliding_window, longest)
        check_positions(self.info.model_type, self.info.position_limit, longest)
        check_engine(self, self._plain_model(), self._config.rollout.temperature)

    def check_scores(self) -> None:
        """As `check`, where nothing is written."""
        check_scores(self.scorer, self._plain_model(), self.tokenizer, self.vocabulary)

    def _plain_model(self) -> PlainModel:
        return PlainModel(
            kind=f"models of type {self.info.model_type!r}",
            logprobs=self._plain_logprobs,
            bf16=self.info.bf16,
        )

    def _plain_logprobs(self, prompt_ids: np.ndarray, ids: np.ndarray, bf16: bool) -> np.ndarray:
        return self.team.call("plain_logprobs", None, prompt_ids, ids, bf16)[0]

    def publish(self) -> None:
        self.team.call("publish")

    def export(self, folder: Path) -> None:
        self.team.call("export", None, folder)

    def close(self) -> None:
        self.team.close()
