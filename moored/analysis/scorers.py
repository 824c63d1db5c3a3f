"""Models that score: one in this process, or one behind a server. What both need to say is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from moored.analysis.encode import Encoder
from moored.config import EndpointConfig, load_config
from moored.diagnostics.pairs import PairSet
from moored.diagnostics.scoring import ScoreFn
from moored.errors import MooredError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A model that scores, and what is known of it."""

    name: str
    score: ScoreFn
    encoder: Encoder
    shares_prompt: bool
    """The prompt is computed once for all its continuations."""
    max_context: int | None = None

    def token_forwards(self, num_prompt_tokens: int, continuation_tokens: Sequence[int]) -> int:
        """Tokens the model goes through to score these continuations after one prompt."""
        times = 1 if self.shares_prompt else len(continuation_tokens)
        return num_prompt_tokens * times + sum(continuation_tokens)

    def cost(self, pairs: PairSet) -> int:
        """Token-forwards of a whole cross-scoring."""
        tokens = [len(pair.continuation) for pair in pairs.pairs]
        return sum(self.token_forwards(len(prompt.ids), tokens) for prompt in pairs.prompts)

    def check_fits(self, pairs: PairSet) -> None:
        """Raise when a reasoning after the longest prompt is beyond the model's context."""
        prompt = max(len(prompt.ids) for prompt in pairs.prompts)
        reply = max(len(pair.continuation) for pair in pairs.pairs)
        if self.max_context is not None and prompt + reply > self.max_context:
            raise MooredError(
                f"a prompt of {prompt} and a reasoning of {reply} tokens do not fit into the "
                f"{self.max_context} of {self.name!r}; score the beginnings only: --max-tokens N"
            )


def local_scorer(name: str, device: str, dtype: str) -> Scorer:
    """A model by name, folder or hub id, in this process."""
    from moored.engine.local.engine import LocalEngine

    config = load_config({"model": name, "engine": {"device": device, "dtype": dtype}})
    engine = LocalEngine(config, trains=False)
    return Scorer(
        name=name,
        score=engine.scorer.score,
        encoder=Encoder(engine.tokenizer, vocabulary=engine.vocabulary),
        shares_prompt=True,
        max_context=engine.max_positions,
    )


def endpoint_scorer(
    url: str,
    model: str,
    *,
    tokenizer: str | None,
    api_key: str | None,
    concurrency: int,
    timeout_s: float,
) -> Scorer:
    """A model behind an OpenAI-compatible server that gives log-probabilities of prompts."""
    from moored.engine.endpoint.scorer import EndpointScorer

    options = EndpointConfig(url=url, concurrency=concurrency, timeout_s=timeout_s)
    scorer = EndpointScorer(model, options, api_key=api_key)
    encoder = Encoder(None if tokenizer is None else _load_tokenizer(tokenizer))
    name = f"{model} at {url}"
    return Scorer(name=name, score=scorer.score, encoder=encoder, shares_prompt=False)


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MooredError("text needs a tokenizer; run: pip install 'moored[train]'") from error
    embedded = files("moored.models") / name
    where = str(embedded) if embedded.is_dir() else name
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=Path(where).is_dir())
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise MooredError(f"tokenizer {name!r} cannot be loaded: {first}") from error
