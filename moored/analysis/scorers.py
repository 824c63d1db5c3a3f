"""Models that score: one in this process, or one behind a server, each with its encoder.

Text is tokenised as a whole and the reasoning found by character offsets, so that tokens are those
a model would have written. Ids stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moored.config_engine import EndpointConfig
from moored.diagnostics.pairs import ScoreFn
from moored.errors import MooredError, TooFewPromptsError
from moored.files.records import Chat, Exchange, PromptLike
from moored.models.hub import hub_answers
from moored.models.today import with_fixed_date
from moored.types import ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A model that scores, and what is known of it."""

    name: str
    score: ScoreFn
    encoder: Encoder
    shares_prompt: bool
    """The prompt is computed once for all its continuations."""
    max_context: int | None = None

    def token_forwards(self, request: ScoreRequest) -> int:
        """Tokens the model goes through to score a request."""
        times = 1 if self.shares_prompt else len(request.continuations)
        return len(request.prompt.ids) * times + sum(map(len, request.continuations))

    def check_fits(self, request: ScoreRequest) -> None:
        """Raise when a reasoning after its prompt is beyond the model's context."""
        prompt, reply = len(request.prompt.ids), max(map(len, request.continuations))
        if self.max_context is not None and prompt + reply > self.max_context:
            raise TooFewPromptsError(
                f"a prompt of {prompt} and a reasoning of {reply} tokens do not fit into the "
                f"{self.max_context} of {self.name!r}; score the beginnings only: --max-tokens N"
            )


@dataclass(slots=True)
class Scorers:
    """One model for all looks, or for each look that of the nearest checkpoint.

    One model is in memory at a time.
    """

    name: str
    temperature: float
    load: Callable[[int | None], Scorer]
    """The model of a checkpoint by its step; None: the only one."""
    steps: tuple[int, ...] = ()
    """Steps of the checkpoints; none: there is one model."""
    _loaded: dict[int | None, Scorer] = field(default_factory=dict)

    @classmethod
    def single(cls, scorer: Scorer, temperature: float = 1.0) -> Scorers:
        return cls(scorer.name, temperature, lambda _: scorer)

    def at(self, step: int | None) -> Scorer:
        """The model for a look that ends with `step`."""
        place = nearest_step(self.steps, step) if self.steps else None
        if place not in self._loaded:
            self._loaded.clear()
            self._loaded[place] = self.load(place)
        return self._loaded[place]

    def steps_away(self, step: int | None) -> int:
        """Steps between a look that ends with `step` and the weights that score it."""
        if step is None or not self.steps:
            return 0
        return abs(step - nearest_step(self.steps, step))


def nearest_step(steps: Sequence[int], step: int | None) -> int:
    """The last of `steps` that is not after `step`, else the first; of no step, the last."""
    before = [each for each in steps if step is None or each <= step]
    return max(before) if before else min(steps)


class Encoder:
    """Turns prompts and reasonings into ids; without a tokenizer it takes ids only."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, vocabulary: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        """Number of ids the model knows; None when it cannot be found out."""

    def prompt(self, prompt: PromptLike) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return self._checked(prompt)
        tokenizer = self._need_tokenizer()
        if not isinstance(prompt, str):
            return self._ids(self._render(prompt))
        # Files hold prompts without the special tokens that stood before them.
        bos = cast(str | None, tokenizer.bos_token)
        if bos is None or prompt.startswith(bos):
            return self._ids(prompt)
        adds_bos = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
        return self._ids(bos + prompt if adds_bos else prompt)

    def prompts(self, turns: Sequence[Exchange]) -> list[tuple[np.ndarray, int | None]]:
        """The prompt of each turn, and where what its reply answers begins; None: not known.

        As in an episode, ids of a dialogue go on from those of the turn before, if the texts do.
        """
        if any(isinstance(turn.prompt, np.ndarray | str) for turn in turns):
            return [(self.prompt(turn.prompt), turn.observation_start) for turn in turns]
        text = self._render(cast(Chat, turns[0].prompt))
        found: list[tuple[np.ndarray, int]] = [(self._ids(text), 0)]
        for turn in turns[1:]:
            chat, before, (ids, _) = cast(Chat, turn.prompt), text, found[-1]
            replies = [k for k, each in enumerate(chat[:-1]) if each.get("role") == "assistant"]
            history = self._render(chat[: replies[-1] + 1], is_open=False) if replies else ""
            text = self._render(chat)
            if not (history.startswith(before) and text.startswith(history)):
                return [(self.prompt(turn.prompt), None) for turn in turns]
            ids = np.concatenate([ids, self._ids(history[len(before) :])])
            rest = self._ids(text[len(history) :])
            found.append((np.concatenate([ids, rest]), len(ids)))
        return list(found)

    def reasoning(self, turn: Exchange) -> tuple[np.ndarray, int]:
        """Ids up to the end of the reasoning, and how many stand before it."""
        content, (start, stop) = turn.response, turn.think or (0, 0)
        if isinstance(content, np.ndarray):
            return self._checked(content[:stop]), start
        tokenizer = self._need_tokenizer()
        if not tokenizer.is_fast:
            opening, inner = self._ids(content[:start]), self._ids(content[start:stop])
            return np.concatenate([opening, inner]), len(opening)
        found = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(found["input_ids"], dtype=np.int64)
        spans_T2 = np.array(found["offset_mapping"], dtype=np.intp).reshape(-1, 2)
        # A token that holds both a part of a tag and inner text belongs to the tag.
        num_opening = int(np.count_nonzero(spans_T2[:, 0] < start))
        return ids[: int(np.count_nonzero(spans_T2[:, 1] <= stop))], num_opening

    def text(self, ids: np.ndarray) -> str:
        """The text of ids; without a tokenizer, the ids."""
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return cast(str, self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def check_text(self, turns: Sequence[Exchange]) -> None:
        """Raise when ids do not decode to the text recorded beside them."""
        known = [
            turn
            for turn in turns
            if None not in (turn.text, turn.think) and isinstance(turn.response, np.ndarray)
        ]
        if self._tokenizer is None or not known:
            return
        wrong = [r for r in known if not self._matches(r)]
        # A few may differ: not every decoder keeps every space.
        if 2 * len(wrong) > len(known):
            raise MooredError(
                f"the token ids were written with another tokenizer than the model's: they decode "
                f"to {self._decode(wrong[0])[:60]!r}, but the file says "
                f"{(wrong[0].text or '')[:60]!r}; give the model that wrote them"
            )

    def _matches(self, turn: Exchange) -> bool:
        return self._decode(turn).strip(BROKEN).strip() in (turn.text or "")

    def _decode(self, turn: Exchange) -> str:
        return self.text(np.asarray(turn.response)[slice(*turn.think or (0, 0))])

    def _render(self, chat: Chat, *, is_open: bool = True) -> str:
        """The text of messages; `is_open` where a reply follows."""
        from jinja2.exceptions import TemplateError

        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise MooredError(
                f"prompts are chat messages, but the tokenizer {tokenizer.name_or_path!r} has no "
                f"chat template; give the model that wrote the replies"
            )
        goes_on = is_open and chat[-1].get("role") == "assistant"
        try:
            text = tokenizer.apply_chat_template(
                cast(Any, chat),
                chat_template=with_fixed_date(tokenizer.get_chat_template()),
                tokenize=False,
                add_generation_prompt=is_open and not goes_on,
                continue_final_message=goes_on,
            )
        except (TemplateError, ValueError) as error:
            raise MooredError(
                f"the chat template of {tokenizer.name_or_path!r} cannot render a prompt: {error}"
            ) from error
        return cast(str, text)

    def _ids(self, text: str) -> np.ndarray:
        ids = self._need_tokenizer().encode(text, add_special_tokens=False)
        return np.array(ids, dtype=np.int64)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if self._vocabulary is not None and len(ids) and ids.max() >= self._vocabulary:
            raise MooredError(
                f"the file holds token id {ids.max()}, but the model knows {self._vocabulary} "
                f"tokens; give the model that wrote it"
            )
        return ids

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise MooredError("the file holds text, which needs a tokenizer; name it: --tokenizer")
        return self._tokenizer


def local_scorer(
    name: str,
    device: str = "auto",
    dtype: str = "auto",
    *,
    temperature: float = 1.0,
    lora: Mapping[str, object] | None = None,
    weights: Path | None = None,
    shown: str | None = None,
) -> Scorer:
    """A model by name, folder or hub id, in this process.

    `weights` is a checkpoint of a run, whose weights take the place of the model's; a run with
    LoRA needs its options. `shown` is what the model is called.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MooredError(
            "scoring needs a model in this process (pip install 'moored[train]') or behind a "
            "server (--endpoint)"
        ) from error
    from moored.engine.build import load_scorer

    engine = load_scorer(name, device, dtype, temperature, lora=lora, weights=weights)
    return Scorer(
        name=shown or name,
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
        only_files = Path(where).is_dir() or not hub_answers()
        return AutoTokenizer.from_pretrained(
            where, local_files_only=only_files, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise MooredError(f"tokenizer {name!r} cannot be loaded: {first}") from error
