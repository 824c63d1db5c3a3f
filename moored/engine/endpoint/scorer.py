"""Scores from a server's `/completions`: vLLM, SGLang, and others that echo prompts with log-probs.

A prompt and a continuation go out together as token ids; what comes back is the log-probability of
every one of them. Two ways of asking are tried in turn, and the one that works is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from moored.config_engine import EndpointConfig
from moored.errors import MooredError
from moored.json_http import HttpError, JsonClient
from moored.types import ScoreRequest

NUM_ATTEMPTS = 4
FIRST_PAUSE_S = 0.5


def _read_echo(choice: Mapping[str, Any], ids: list[int]) -> list[float | None]:
    return choice["logprobs"]["token_logprobs"][: len(ids)]


def _read_prompt(choice: Mapping[str, Any], ids: list[int]) -> list[float | None]:
    places = choice["prompt_logprobs"]
    return [
        None if place is None else place[str(token)]["logprob"]
        for place, token in zip(places, ids, strict=True)
    ]


_Read = Callable[[Mapping[str, Any], list[int]], list[float | None]]
WAYS: tuple[tuple[dict[str, object], _Read], ...] = (
    ({"echo": True, "logprobs": 1}, _read_echo),
    ({"prompt_logprobs": 1}, _read_prompt),
)
"""What to add to a request, and how to read its answer: OpenAI's way, then vLLM's own."""


class _NotGiven(MooredError):
    """The server answered without what was asked for."""


class EndpointScorer:
    """A `Scorer`: one call of the server for each continuation, several at a time."""

    def __init__(self, model: str, options: EndpointConfig, *, api_key: str | None = None) -> None:
        self._client = JsonClient(options.url, api_key=api_key, timeout_s=options.timeout_s)
        self.url = self._client.url
        self._model = model
        self._concurrency = options.concurrency
        self._way: tuple[dict[str, object], _Read] | None = None

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        pairs = [(r.prompt.ids.tolist(), ids.tolist()) for r in requests for ids in r.continuations]
        if not pairs or not all(prompt for prompt, _ in pairs):
            raise MooredError("an endpoint can score nothing after an empty prompt")
        whole = [[*prompt, *ids] for prompt, ids in pairs]
        if self._way is None:
            self._way = self._find_way(whole[0])
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            logps = list(pool.map(self._ask, whole))
        finally:
            pool.shutdown(cancel_futures=True)
        found = iter(logp[len(prompt) :] for logp, (prompt, _) in zip(logps, pairs, strict=True))
        return [[next(found) for _ in request.continuations] for request in requests]

    def _find_way(self, ids: list[int]) -> tuple[dict[str, object], _Read]:
        refusals = []
        for way in WAYS:
            try:
                self._ask(ids, way)
            except _NotGiven as error:
                refusals.append(str(error))
                continue
            return way
        raise MooredError(
            f"{self.url} gives no log-probabilities of prompts ({'; '.join(refusals)}); "
            f"serve the model with vLLM, or score with a local --model"
        )

    def _ask(
        self, ids: list[int], way: tuple[dict[str, object], _Read] | None = None
    ) -> np.ndarray:
        """Log-probability of every token but the first, whose place holds 0."""
        extra, read = way or self._way or WAYS[0]
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, **extra}
        answer: Any = self._post(body)
        try:
            found = read(answer["choices"][0], ids)
            if len(found) != len(ids):
                raise ValueError(f"{len(found)} values for {len(ids)} tokens")
            return np.array([0.0, *map(float, found[1:])])  # pyright: ignore[reportArgumentType]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise _NotGiven(f"with {', '.join(extra)} its answer lacks them") from error

    def _post(self, body: object) -> object:
        for attempt in range(NUM_ATTEMPTS):
            try:
                return self._client.post("/completions", body)
            except HttpError as error:
                if error.status in (400, 422) and self._way is None:
                    raise _NotGiven(str(error)) from error
                is_last = attempt == NUM_ATTEMPTS - 1 or error.is_unreachable
                if is_last or not error.is_transient:
                    raise MooredError(
                        f"{self.url} did not score: {error}; check --endpoint and the "
                        f"model's name there"
                    ) from error
                time.sleep(error.retry_after_s + FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")
