"""Replies from any server with OpenAI's `/chat/completions`: vLLM, SGLang, llama.cpp, OpenAI.

Such a server takes messages and gives text; token ids, log-probabilities and weights stay with it.
`TextRenderer` stands in for a tokenizer, so that episodes are recorded like any others.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from moored.config_engine import EndpointConfig
from moored.engine.base import Request, SamplingParams, Stream
from moored.engine.endpoint.chat_api import (
    ChatReply,
    message_to_json,
    parse_chat_reply,
    parse_model_names,
)
from moored.errors import MooredError, close_match_hint
from moored.json_http import HttpError, JsonClient
from moored.reply import find_parts
from moored.rollout.render import Spans
from moored.types import Completion, Content, FinishReason, Message, Prompt, content_images

NUM_ATTEMPTS = 6
KEY_VARIABLE = "OPENAI_API_KEY"
# A seed that every server accepts: some read 32 bits with a sign.
_SEED_BITS = 31

logger = logging.getLogger(__name__)


class TextRenderer:
    """A renderer without a tokenizer: a token is a character, its id the code point."""

    stop_ids: tuple[int, ...] = ()
    is_prefix_stable: bool = True

    def start(self, messages: Sequence[Message]) -> Prompt:
        """The dialogue as text, one paragraph per message."""
        text = "".join(f"{message.role}: {_shown(message.content)}\n\n" for message in messages)
        images = tuple(image for message in messages for image in message.images)
        return Prompt(_code_points(f"{text}assistant: "), images)

    def expect(self, observations: Iterable[Content]) -> None:
        """Nothing to prepare."""

    def extend(
        self,
        prompt: Prompt,
        completion_ids: np.ndarray,
        reply: str,
        observation: Content,
        history: Sequence[Message],
    ) -> Prompt:
        """The next prompt."""
        between = _code_points(f"\n\nuser: {_shown(observation)}\n\nassistant: ")
        return prompt.then(completion_ids, between, images=content_images(observation))

    def observation_start(self, prompt: Prompt, messages: Sequence[Message]) -> int | None:
        """Where the newest message begins: every character is a token of its own."""
        return len(prompt.ids) - len(f"user: {_shown(messages[-1].content)}\n\nassistant: ")

    def decode(self, completion_ids: np.ndarray) -> str:
        return "".join(map(chr, completion_ids.tolist()))

    def spans(self, completion_ids: np.ndarray, text: str) -> Spans:
        """Characters of reasoning and answer."""
        return Spans(*(find_parts(text) or ()))


class EndpointSampler:
    """Writes replies through a server's chat completions, many requests at a time.

    What may pass (429, 5xx, timeouts, lost connections, unreadable answers) is tried again with
    growing pauses. A request that still fails gives a completion that ends in `ERROR`. Only an
    endpoint that never answered raises: at once where it never will (no server, wrong key, unknown
    model), else when the first requests have all failed.
    """

    def __init__(
        self,
        model: str,
        options: EndpointConfig,
        *,
        api_key: str | None = None,
        first_pause_s: float = 0.5,
    ) -> None:
        self.model = model
        self.concurrency = options.concurrency
        self._client = JsonClient(options.url, api_key=api_key, timeout_s=options.timeout_s)
        self._has_key = bool(api_key)
        self._first_pause_s = first_pause_s
        self._limit_name = "max_tokens"
        self.has_answered = self._has_warned = False
        self._num_failed = 0
        self._token_counts: list[int] = []

    @property
    def mean_reply_tokens(self) -> float | None:
        """Mean over the replies whose tokens the server counted; None when it counted none."""
        return float(np.mean(self._token_counts)) if self._token_counts else None

    def stream(self, params: SamplingParams) -> EndpointStream:
        """Nothing is kept between turns: every request carries its whole dialogue."""
        return EndpointStream(self, params)

    def take(self, outcome: ChatReply | Exception, num_first: int) -> Completion:
        """The completion of one request; raises what ends the rollout."""
        if isinstance(outcome, ChatReply):
            if outcome.num_tokens is not None:
                self._token_counts.append(outcome.num_tokens)
            ids = _code_points(outcome.text)
            reason = FinishReason.LENGTH if outcome.is_cut else FinishReason.STOP
            return Completion(ids, np.full(len(ids), np.nan), reason)
        if not isinstance(outcome, HttpError):
            raise outcome
        self._num_failed += 1
        is_hopeless = outcome.is_unreachable or outcome.status in (401, 404)
        if not self.has_answered and (is_hopeless or self._num_failed >= num_first):
            raise self._explain(outcome) from outcome
        nothing = np.zeros(0, np.int64), np.zeros(0)
        return Completion(*nothing, FinishReason.ERROR, error=str(outcome))

    def ask(self, request: Request, params: SamplingParams, stop: threading.Event) -> ChatReply:
        """One request, tried again where that may help."""
        body: dict[str, object] = {
            "model": self.model,
            "messages": [message_to_json(message) for message in request.messages],
            "temperature": params.temperature,
            "seed": request.seed % (1 << _SEED_BITS),
            self._limit_name: params.max_tokens,
        }
        num_failed = 0
        while True:
            try:
                reply = self._read(self._client.post("/chat/completions", body))
                self.has_answered = True
                return reply
            except HttpError as error:
                if self._renames_limit(body, error):
                    continue
                num_failed += 1
                is_lost = error.is_unreachable and not self.has_answered
                if is_lost or not error.is_transient or num_failed == NUM_ATTEMPTS:
                    raise
                self._report(error)
                if stop.wait(self._pause_s(error, request.seed, num_failed)):
                    raise

    def _read(self, answer: object) -> ChatReply:
        try:
            return parse_chat_reply(answer)
        except MooredError as error:
            raise HttpError(self._client.show(str(error))) from None

    def _renames_limit(self, body: dict[str, object], error: HttpError) -> bool:
        """OpenAI's newer models refuse `max_tokens`; other servers know no other name."""
        newer = "max_completion_tokens"
        if error.status != 400 or newer not in error.message or newer in body:
            return False
        self._limit_name = newer
        body[newer] = body.pop("max_tokens")
        return True

    def _pause_s(self, error: HttpError, seed: int, num_failed: int) -> float:
        """Doubles each time; jittered, so that those who failed together do not return together."""
        jitter = random.Random(f"{seed} {num_failed}").uniform(0.5, 1.0)
        return error.retry_after_s + self._first_pause_s * 2 ** (num_failed - 1) * jitter

    def _report(self, error: HttpError) -> None:
        """Warn once: a busy server makes many requests retry."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        logger.log(level, "%s: %s; asking again (said once)", self._client.url, error)

    def _explain(self, error: HttpError) -> MooredError:
        """What the user can do about an endpoint that never answered."""
        url = self._client.url
        if error.is_unreachable:
            return MooredError(
                f"no server answers at {url}: {error}; start it or correct --endpoint"
            )
        if error.status == 401:
            what = "refuses the API key" if self._has_key else "asks for an API key"
            return MooredError(
                f"{url} {what}: {error}; put the right one into {KEY_VARIABLE}, or name another "
                f"variable with --api-key-env"
            )
        hint = "" if error.status is None else self._model_hint(error.status)
        return MooredError("; ".join(filter(None, [f"{url} gave no reply: {error}", hint])))

    def _model_hint(self, status: int) -> str:
        try:
            names = parse_model_names(self._client.get("/models"))
        except HttpError:
            names = []
        if names and self.model not in names:
            hint = self._client.show(close_match_hint(self.model, names))
            return f"its list of models lacks {self.model!r}, {hint}"
        if status == 404 and not names:
            return "check the address, which mostly ends in /v1, and the name of the model"
        return ""


class Asker(Protocol):
    """What `EndpointStream` needs: `ask` in many threads, `take` in the one that polls."""

    concurrency: int
    has_answered: bool

    def ask(self, request: Request, params: SamplingParams, stop: threading.Event) -> Any: ...

    def take(self, outcome: Any, num_first: int) -> Completion: ...


class EndpointStream(Stream):
    """Requests under way in threads, at most the sampler's `concurrency` at a time."""

    is_lockstep = False

    def __init__(self, sampler: Asker, params: SamplingParams) -> None:
        self._sampler = sampler
        self._params = params
        self._todo: SimpleQueue[Request | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, object]] = SimpleQueue()
        self._stop = threading.Event()
        self._num_threads = self._num_under_way = 0
        self._held: list[tuple[int, Completion]] = []

    def submit(self, request: Request) -> None:
        self._num_under_way += 1
        self._todo.put(request)
        if self._num_threads < min(self._num_under_way, self._sampler.concurrency):
            self._num_threads += 1
            # Daemons: a reply that hangs must not keep Ctrl-C or an error from ending the command.
            threading.Thread(target=self._work, daemon=True).start()

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        if not self._num_under_way:
            return []
        try:
            outcomes = [self._done.get(timeout=wait_s)]
        except Empty:
            return []
        while not self._done.empty():
            outcomes.append(self._done.get())
        self._num_under_way -= len(outcomes)
        self._held += [(s, self._sampler.take(o, self._num_threads)) for s, o in outcomes]
        if self._num_under_way and not self._sampler.has_answered:
            # Failures wait for a first answer: if none comes, one error is raised for all.
            return self.poll() if wait_s is None else []
        found, self._held = self._held, []
        return found

    def close(self) -> None:
        self._stop.set()
        for _ in range(self._num_threads):
            self._todo.put(None)

    def _work(self) -> None:
        while (request := self._todo.get()) is not None and not self._stop.is_set():
            try:
                outcome = self._sampler.ask(request, self._params, self._stop)
            except Exception as error:  # raised again by the thread that polls
                outcome = error
            self._done.put((request.session, outcome))


def read_api_key(variable: str | None = None) -> str | None:
    """The key from an environment variable; one that was asked for by name must be set."""
    key = os.environ.get(variable or KEY_VARIABLE)
    if variable is not None and not key:
        raise MooredError(f"the environment variable {variable!r} is not set; put the key there")
    return key


def _code_points(text: str) -> np.ndarray:
    return np.fromiter(map(ord, text), dtype=np.int64, count=len(text))


def _shown(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "[image]" for part in content)
