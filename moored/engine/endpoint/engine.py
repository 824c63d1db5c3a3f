"""The engine of a policy behind an OpenAI-compatible server: it writes and scores, nothing else."""

from __future__ import annotations

from pathlib import Path

from moored.config import Config
from moored.engine.base import Learner
from moored.engine.endpoint.sampler import EndpointSampler, TextRenderer, read_api_key
from moored.engine.endpoint.scorer import EndpointScorer
from moored.errors import MooredError


class EndpointEngine:
    """What a server serves under the name `model`."""

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        if trains:
            raise MooredError(
                "the weights behind an endpoint cannot be trained; set engine.kind to local"
            )
        options = config.engine.endpoint
        key = read_api_key(options.api_key_env)
        self.renderer = TextRenderer()
        self.sampler = EndpointSampler(config.model, options, api_key=key)
        self.scorer = EndpointScorer(config.model, options, api_key=key)

    @property
    def learner(self) -> Learner:
        raise MooredError("the weights behind an endpoint cannot be trained or loaded")

    def describe(self) -> str:
        return "behind a server"

    def check(self) -> None:
        """Nothing to compare with: the server's model is not here."""

    def publish(self) -> None:
        """The server's weights do not change."""

    def export(self, folder: Path) -> None:
        raise MooredError("the weights behind an endpoint cannot be exported")

    def close(self) -> None:
        """Connections close with their clients."""
