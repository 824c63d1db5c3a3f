"""Does the engine compute what the model computes? Asked once, before a run begins.

Sampler and learner are asked through their protocols for a short reply to a chat prompt, and
compared with the model's own forward pass in float32. In bfloat16 that pass differs from float32
too, by an amount that depends on the model: the engine may be off by a few times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moored.config import Config
from moored.engine.base import Engine, Request, SamplingParams, Scorer, new_session, write_replies
from moored.errors import MooredError
from moored.models.lengths import position_limit, sliding_window
from moored.models.shapes import description_of
from moored.rollout.encode import check_ids
from moored.types import Message, Prompt, ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES = (
    Message("system", "You are a helpful assistant who thinks before answering."),
    Message("user", "A box stands left of its target. Which way do you push it, and why?"),
)
"""A dialogue as chat models expect: on arbitrary tokens bfloat16 itself is off by many nats."""
OTHERS = (
    (
        Message("system", "Answer in one short sentence."),
        Message("user", "The key is under the red stone, north of the bridge. Where is the key?"),
    ),
    (
        Message("system", "You play a game against a friend."),
        Message("user", "There are nine cards on the table, and you may take one, two or three."),
    ),
    (
        Message("system", "You are good with numbers."),
        Message("user", "Count from one to ten. Which of these are even, and what is their sum?"),
    ),
)
"""Dialogues that are tried after the first in bfloat16. Rounding sends a token of a mixture of
experts to others now and then, and some replies are off by that; of a wrong engine all are."""
CHECKED_KINDS = ("local", "torchrun", "ray")
"""Engines that hold a loaded model to its window and its positions."""
NUM_TOKENS = 16
TOLERANCE = 1e-3
"""Nats by which a token may be off where the model itself is exact."""
TIMES_PLAIN = 3.0
"""How many times the largest bfloat16 error of the model's own pass the engine's may be."""
LEAST_BF16 = 0.05
"""Nats that are fine in bfloat16, however lucky the model's own pass was on these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModel:
    """The model's own forward pass."""

    kind: str
    """Its name in messages."""
    logprobs: Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
    """(prompt ids, ids, in bfloat16?) -> log-probability of each id."""
    bf16: bool
    """The engine computes in bfloat16."""


def check_context(config: Config) -> None:
    """Raise before a model is loaded where its engine would refuse the length of dialogues after.

    Goes by what is known of it on this machine; of other models the engine finds out.
    """
    if config.engine.kind not in CHECKED_KINDS:
        return
    described, longest = description_of(config.model), config.rollout.max_context
    kind = str(described.get("model_type", "language"))
    check_window(kind, sliding_window(described), longest)
    check_positions(kind, position_limit(described), longest)


def check_window(model_type: str, window: int | None, max_context: int) -> None:
    """Raise when layers look back fewer tokens than a dialogue may have."""
    if window is not None and window < max_context:
        raise MooredError(
            f"a {model_type} model with layers that look back {window} tokens only cannot be used "
            f"on longer dialogues; set rollout.max_context to {window} or less"
        )


def check_positions(model_type: str, limit: int | None, max_context: int) -> None:
    """Raise when a dialogue may have more tokens than the model has positions for."""
    if limit is not None and limit < max_context:
        raise MooredError(
            f"rollout.max_context = {max_context} is longer than the {limit} tokens that this "
            f"{model_type} model was made for; set it to {limit} or less"
        )


def check_engine(engine: Engine, plain: PlainModel, temperature: float) -> None:
    """Raise when sampler or learner differ from the plain model by more than rounding explains."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature)
    found = None
    for dialogue in (MESSAGES, *(OTHERS if plain.bf16 else ())):
        prompt = engine.renderer.start(dialogue)
        with _explained(plain):
            request = Request(session=new_session(), prompt=prompt, seed=0)
            reply = write_replies(engine.sampler, [request], params)[0]
            scored = engine.scorer.score([ScoreRequest(prompt, [reply.token_ids])])[0][0]
            parts = {"sampler": reply.logprobs, "learner": scored}
            found = _difference(plain, prompt.ids, reply.token_ids, parts)
        if found is None:
            return
    assert found is not None
    raise found


def check_scores(
    scorer: Scorer, plain: PlainModel, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> None:
    """The same where nothing is written, which needs no chat template."""
    check_ids(tokenizer, np.zeros(0, dtype=np.int64), vocabulary)
    text = " ".join(message.text for message in MESSAGES)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    prompt, rest = Prompt(ids[:NUM_TOKENS]), ids[NUM_TOKENS : 2 * NUM_TOKENS]
    with _explained(plain):
        scored = scorer.score([ScoreRequest(prompt, [rest])])[0][0]
        found = _difference(plain, prompt.ids, rest, {"learner": scored})
    if found is not None:
        raise found


@contextmanager
def _explained(plain: PlainModel) -> Iterator[None]:
    """One sentence for what the code of a model raises that takes other arguments than ours."""
    try:
        yield
    except MooredError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise MooredError(
            f"{plain.kind} do not work with this engine; choose one of the families in "
            f"docs/models.md ({type(error).__name__}: {error})"
        ) from error


def _difference(
    plain: PlainModel, prompt_ids: np.ndarray, ids: np.ndarray, parts: Mapping[str, np.ndarray]
) -> MooredError | None:
    """What to raise when log-probabilities of a part of the engine are not the model's."""
    exact = plain.logprobs(prompt_ids, ids, False)
    allowed = TOLERANCE
    if plain.bf16:
        own = plain.logprobs(prompt_ids, ids, True)
        allowed = max(LEAST_BF16, TIMES_PLAIN * float(np.abs(own - exact).max()))
    for name, found in parts.items():
        error = float(np.abs(found - exact).max())
        if not error <= allowed:
            return MooredError(
                f"{plain.kind} do not work with this engine: log-probabilities of the {name} "
                f"differ from the model's by {error:.3g} nats, where {allowed:.3g} are rounding"
            )
    return None
