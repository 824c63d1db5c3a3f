"""Messages to token streams, and replies back to text.

A reply is never re-tokenised: the next prompt is the ids before it, the ids as they were sampled,
and what the chat template puts between one reply and the next. A template that rewrites earlier
turns is found out at construction; then every turn gets a prompt of its own.
Text only: an image needs a processor that knows its placeholder ids; it would take the place of
`_plain_text` and fill `Prompt.images`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from moored.envs.base import parse_reply
from moored.errors import MooredError
from moored.types import Content, Message, Prompt, Span, content_images, content_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHED_TEXTS = 1024
CACHED_PIECES = 1 << 16
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# Words of the dialogues that find out what a template does.
_SYSTEM, _USER, _REPLY, _NEXT = "SYSTEMPROBE", "USERPROBE", "REPLYPROBE", "NEXTPROBE"
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Spans:
    """Token ranges of a reply's two parts, tags excluded; both None when the reply is malformed."""

    think: Span | None = None
    answer: Span | None = None


class _Mark(NamedTuple):
    """A place between tokens where characters are whole."""

    num_tokens: int
    num_chars: int


class Renderer:
    """Turns dialogues into token ids with a tokenizer's own chat template.

    `template_options` are extra variables of the template, e.g. `{"enable_thinking": False}`.
    """

    stop_ids: tuple[int, ...]
    """Tokens that end a reply: the template's end of turn, and the tokenizer's end of text."""
    is_prefix_stable: bool
    """False when the template changes earlier turns, e.g. strips their reasoning; `extend` then
    renders the whole dialogue anew, and the ids do not continue the earlier stream."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, object] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise MooredError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; choose an "
                f"instruction-tuned model, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._encode = lru_cache(CACHED_TEXTS)(self._encode_text)
        self._piece = lru_cache(CACHED_PIECES)(self._decode_piece)
        self._anchor = self._encode("a").tolist()
        self._anchor_chars = len(self._decode(self._anchor))
        self._probe_template()

    def start(self, messages: Sequence[Message]) -> Prompt:
        """The first prompt, up to where the model begins to write."""
        return Prompt(self._encode(self._render(messages)).copy())

    def extend(
        self,
        prompt_ids: np.ndarray,
        completion_ids: np.ndarray,
        reply: str,
        observation: Content,
        history: Sequence[Message],
    ) -> np.ndarray:
        """Ids of the next prompt; `history` are the messages before the reply."""
        if not self.is_prefix_stable:
            turn = Message("assistant", reply), Message("user", observation)
            return self.start([*history, *turn]).ids
        between = self._encode(self._text_after_reply(observation))
        if len(completion_ids) and completion_ids[-1] == self._end_id:
            between = between[np.argmax(between == self._end_id) + 1 :]
        return np.concatenate([prompt_ids, completion_ids, between])

    def decode(self, completion_ids: np.ndarray) -> str:
        """The reply as an environment reads it: without the stop token, other tokens kept.

        Where the template itself writes `<think>` before the reply, the tag is put back.
        """
        return self._opening + self._decode(self._without_stop(completion_ids))

    def spans(self, completion_ids: np.ndarray, text: str) -> Spans:
        """Where reasoning and answer lie in the sampled ids; `text` is what `decode` gave.

        A token that holds both a part of a tag and inner text belongs to the tag.
        """
        if not parse_reply(text).is_valid:
            return Spans()
        body = text[len(self._opening) :]
        marks = self._marks(self._without_stop(completion_ids), body)
        begin, close, answer_begin, answer_close = (
            text.find(tag) - len(self._opening) + len(tag) * (not tag.startswith("</"))
            for tag in TAGS
        )
        return Spans(
            _token_span(marks, max(begin, 0), close),
            _token_span(marks, answer_begin, answer_close),
        )

    def _marks(self, ids: list[int], body: str) -> list[_Mark]:
        """All places where whole characters end, from cached texts of the tokens."""
        pieces = list(self._whole_pieces(ids))
        joined = "".join(text for _, text in pieces)
        if not joined.endswith(body):
            return self._marks_by_prefix(ids, body)
        # Some decoders strip the space before the first word.
        num_tokens, num_chars = 0, len(body) - len(joined)
        marks = [_Mark(0, 0)]
        for length, text in pieces:
            num_tokens, num_chars = num_tokens + length, num_chars + len(text)
            marks.append(_Mark(num_tokens, max(num_chars, 0)))
        return marks

    def _whole_pieces(self, ids: list[int]) -> Iterator[tuple[int, str]]:
        """Shortest runs of tokens that make whole characters: how many tokens, their text."""
        for is_broken, run in groupby(ids, key=lambda token: _BROKEN in self._piece((token,))):
            if not is_broken:
                yield from ((1, self._piece((token,))) for token in run)
                continue
            pending: tuple[int, ...] = ()
            for token in run:
                pending += (token,)
                if not self._piece(pending).endswith(_BROKEN):
                    yield len(pending), self._piece(pending)
                    pending = ()
            if pending:
                yield len(pending), self._piece(pending)

    def _marks_by_prefix(self, ids: list[int], body: str) -> list[_Mark]:
        """The same for decoders whose tokens change each other's text; quadratic."""
        marks, num_chars = [], 0
        for stop in range(len(ids) + 1):
            num_chars = max(num_chars, _common_length(self._decode(ids[:stop]), body))
            marks.append(_Mark(stop, num_chars))
        if num_chars < len(body):
            raise MooredError(
                f"spans was given another text than its ids decode to: {body[:200]!r}"
            )
        return marks

    def _probe_template(self) -> None:
        """Find out how the template treats system prompts, replies and earlier turns."""
        from jinja2.exceptions import TemplateError

        self._folds_system = False
        try:
            self._folds_system = _SYSTEM not in self._render([Message("system", _SYSTEM), _user()])
        except TemplateError:
            self._folds_system = True
        try:
            self._opening = self._find_opening()
            self._end_id = self._find_end_id()
            self.is_prefix_stable = self._keeps_history()
        except TemplateError as error:
            raise MooredError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot render a dialogue of "
                f"user and assistant turns: {error}"
            ) from error
        eos_id = cast(int | None, self.tokenizer.eos_token_id)
        found = dict.fromkeys([self._end_id, eos_id])
        self.stop_ids = tuple(token for token in found if token is not None)
        if not self.stop_ids:
            raise MooredError(
                f"nothing ends a reply: the tokenizer {self.tokenizer.name_or_path!r} has no "
                f"eos_token and its chat template ends no turn with a special token; set "
                f"tokenizer.eos_token"
            )

    def _find_opening(self) -> str:
        """What of `<think>…` the template already writes in the model's name; mostly nothing."""
        prompt = self._render([_user()]).rpartition(_USER)[2]
        at = prompt.rfind("<think>")
        return "" if at < 0 or "</think>" in prompt[at:] else prompt[at:]

    def _find_end_id(self) -> int | None:
        """The first special token after a reply, before the next message's text."""
        between = self._text_after_reply(_NEXT).partition(_NEXT)[0]
        added = self.tokenizer.added_tokens_decoder
        ends = (token for token in self._encode(between).tolist() if token in added)
        return next(ends, None)

    def _keeps_history(self) -> bool:
        """True when a dialogue's text is its first prompt and what was appended turn by turn."""
        reply = f"{self._opening or '<think>'}one</think><answer>two</answer>"
        dialogue = [Message("system", _SYSTEM), _user()]
        stream = self._render(dialogue)
        for _ in range(2):
            dialogue += [Message("assistant", reply), Message("user", _NEXT)]
            stream += reply.removeprefix(self._opening) + self._text_after_reply(_NEXT)
        return stream == self._render(dialogue)

    def _text_after_reply(self, observation: Content) -> str:
        """What stands between a reply and the next one: end of turn, user message, header."""
        dialogue = [_user(), Message("assistant", _REPLY), Message("user", observation)]
        before, _, after = self._render(dialogue).partition(_REPLY)
        if not after:
            raise MooredError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out assistant "
                f"messages, it cannot be used for several turns: {before[-200:]!r}"
            )
        return after

    def _render(self, messages: Sequence[Message]) -> str:
        chat = [{"role": m.role, "content": _plain_text(m.content)} for m in messages]
        if self._folds_system and [m["role"] for m in chat[:2]] == ["system", "user"]:
            both = f"{chat[0]['content']}\n\n{chat[1]['content']}"
            chat[:2] = [{"role": "user", "content": both}]
        options = {"tokenize": False, "add_generation_prompt": True, **self._options}
        text = self.tokenizer.apply_chat_template(chat, **options)
        assert isinstance(text, str)
        return text

    def _encode_text(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)

    def _decode(self, ids: list[int]) -> str:
        # Special tokens are kept: the tags may be such tokens.
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _decode_piece(self, ids: tuple[int, ...]) -> str:
        """Text of tokens inside a reply; the anchor keeps decoders from stripping a first space."""
        return self._decode([*self._anchor, *ids])[self._anchor_chars :]

    def _without_stop(self, completion_ids: np.ndarray) -> list[int]:
        ids = np.asarray(completion_ids).tolist()
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids


def _token_span(marks: Sequence[_Mark], begin: int, close: int) -> Span:
    """The tokens wholly inside characters [begin, close)."""
    first = bisect_left(marks, begin, key=lambda mark: mark.num_chars)
    last = bisect_right(marks, close, key=lambda mark: mark.num_chars) - 1
    start = marks[first].num_tokens
    return start, max(start, marks[last].num_tokens)


def _common_length(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _plain_text(content: Content) -> str:
    if content_images(content):
        raise MooredError(
            "a message holds an image, but this renderer has no image processor; choose a text "
            "view of the environment"
        )
    return content_text(content)


def _user() -> Message:
    return Message("user", _USER)
