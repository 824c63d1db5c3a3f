"""Messages to token streams, and replies back to text.

A reply is never re-tokenised: the next prompt is the ids before it, the ids as they were sampled,
and what the chat template puts between one reply and the next. A template that rewrites earlier
turns is detected at construction; then every turn gets its own prompt.
An image becomes the text that `image_text` gives it, and travels with the ids in `Prompt.images`.
Special tokens come from the template, from image texts and from what was sampled; in a message they
are text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice
from typing import TYPE_CHECKING, cast

import numpy as np

from moored.errors import MooredError
from moored.models.today import with_fixed_date
from moored.reply import THINK_TAGS, find_parts, format_reply, open_think
from moored.rollout.decode import Decoder, bound, common_length
from moored.rollout.encode import ChunkEncoder, check_ids
from moored.types import Content, Message, Prompt, Span, content_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHED_BETWEEN = 8192
CACHED_STARTS = 1024

# Words of the dialogues that test what a template does.
_SYSTEM, _USER, _REPLY, _NEXT = "SYSTEMPROBE", "USERPROBE", "REPLYPROBE", "NEXTPROBE"


@dataclass(frozen=True, slots=True)
class Spans:
    """Token ranges of a reply's two parts, tags excluded; both None when the reply is malformed."""

    think: Span | None = None
    answer: Span | None = None


class Renderer:
    """Turns dialogues into token ids with a tokenizer's own chat template.

    `template_options` are extra variables of the template, e.g. `{"enable_thinking": False}`.
    `image_text` gives the text that stands for an image, e.g. the placeholder tokens of a vision
    model; without it a message that holds an image is refused. `vocabulary` is the number of ids
    that the model knows; a tokenizer that writes others is refused. `eos_ids` are special tokens
    after which the model writes nothing more, besides those of tokenizer and template.
    """

    stop_ids: tuple[int, ...]
    """Tokens that end a reply: the template's end of turn, the tokenizer's end of text, and those
    that the model's generation_config.json names."""
    is_prefix_stable: bool
    """False when the template changes earlier turns, e.g. strips their reasoning; `extend` then
    renders the whole dialogue again, and the ids do not continue the earlier stream."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, object] | None = None,
        image_text: Callable[[object], str] | None = None,
        vocabulary: int | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise MooredError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; choose an "
                f"instruction-tuned model, or put a chat_template.jinja into the model's folder"
            )
        self.tokenizer = tokenizer
        self._options = {"chat_template": _template(tokenizer), **(template_options or {})}
        self._image_text = image_text
        self._encoder = ChunkEncoder(tokenizer)
        self._between: dict[str, _Between] = {}
        self._starts: dict[tuple[tuple[str, str], ...], Prompt] = {}
        self._tails: dict[object, np.ndarray] = {}
        self._decoder = Decoder(tokenizer, anchor=self._encoder.encode("a").tolist())
        self._probe_template(eos_ids)
        if vocabulary is not None:
            shown = self._render([_user()]) + self._text_after_reply(_NEXT)
            check_ids(tokenizer, self._encoder.encode(shown), vocabulary)

    def start(self, messages: Sequence[Message]) -> Prompt:
        """The first prompt, up to where the model begins to write."""
        if not all(isinstance(message.content, str) for message in messages):
            images = tuple(image for message in messages for image in message.images)
            return Prompt(self._first_ids(messages), images)
        key = tuple((message.role, cast(str, message.content)) for message in messages)
        if key not in self._starts:
            bound(self._starts, CACHED_STARTS)
            self._starts[key] = Prompt(self._first_ids(messages))
        return self._starts[key]

    def _first_ids(self, messages: Sequence[Message]) -> np.ndarray:
        from jinja2.exceptions import TemplateError

        try:
            return self._encoder.encode(self._render(messages))
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise MooredError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses a dialogue of "
                f"{roles} ({error}); an environment should begin with a system and a user message"
            ) from error

    def expect(self, observations: Iterable[Content]) -> None:
        """Encode together what `extend` will be given one by one."""
        if not self.is_prefix_stable:
            return
        plain = dict.fromkeys(o for o in observations if isinstance(o, str))
        texts = {o: self._text_after_reply(o) for o in plain if o not in self._between}
        chunks = {o: self._encoder.chunks(text) for o, text in texts.items()}
        arrays = iter(self._encoder.encode_chunks(chain.from_iterable(chunks.values())))
        bound(self._between, CACHED_BETWEEN)
        for observation, text in texts.items():
            own = chunks[observation]
            ids = list(islice(arrays, len(own)))
            self._between[observation] = self._join(observation, text, own, ids)

    def extend(
        self,
        prompt: Prompt,
        completion_ids: np.ndarray,
        reply: str,
        observation: Content,
        history: Sequence[Message],
    ) -> Prompt:
        """The next prompt; `history` are the messages before the reply."""
        if not self.is_prefix_stable:
            turn = Message("assistant", reply), Message("user", observation)
            return self.start([*history, *turn])
        has_end = len(completion_ids) > 0 and completion_ids[-1] == self._end_id
        between = self._after_reply(observation)
        ids = between.after_end if has_end else between.ids
        return prompt.then(completion_ids, ids, images=content_images(observation))

    def observation_start(self, prompt: Prompt, messages: Sequence[Message]) -> int | None:
        """Where the newest user message begins in `prompt`, which shows the dialogue `messages`.

        The cut is at a special token (or right after a sampled reply), because only there the ids
        on one side do not depend on the text on the other: another message can follow the same
        history. A first prompt without such a place is all observation. None when a later prompt
        has no such place.
        """
        if self.is_prefix_stable and any(message.role == "assistant" for message in messages):
            # After a reply that stays as it was sampled, the newest message says all about its ids.
            ids = self._after_reply(messages[-1].content).message
        else:
            ids = self._rendered_message(messages)
        start = len(prompt.ids) - len(ids)
        is_end = start >= 0 and len(ids) > 0 and not np.count_nonzero(prompt.ids[start:] != ids)
        return start if is_end else None

    def _rendered_message(self, messages: Sequence[Message]) -> np.ndarray:
        """Ids of a rendered dialogue from the border before its newest message; none without."""
        key = tuple((message.role, message.content) for message in messages)
        is_text = all(isinstance(content, str) for _, content in key)
        if is_text and key in self._tails:
            return self._tails[key]
        *earlier, newest = messages

        def shown(content: Content) -> str:
            return self._render([*earlier, Message("user", content)])

        text = shown(newest.content)
        chunks = self._encoder.chunks(text)
        place = self._place(newest.content, text, chunks, shown)
        is_first = all(message.role != "assistant" for message in messages)
        ids = np.zeros(0, dtype=np.int64)
        if place > 0 or is_first or self._encoder.starts_at_border(text):
            ids = np.concatenate(self._encoder.encode_chunks(chunks[place:]))
        if is_text:
            bound(self._tails, CACHED_STARTS)
            self._tails[key] = ids
        return ids

    def _place(
        self, content: Content, text: str, chunks: Sequence[str], shown: Callable[[Content], str]
    ) -> int:
        """The chunk in which a message begins; `shown` gives the text with another in its place."""
        end = None if self._frame is None else self._text(content) + self._frame[1]
        if end is not None and text.endswith(end):
            at = len(text) - len(end)
        else:  # the template changes messages: two that begin differently part where they begin
            at = min(common_length(text, shown(probe)) for probe in (_USER, _NEXT))
        starts = list(accumulate(map(len, chunks[:-1]), initial=0))
        return bisect_right(starts, at) - 1

    def decode(self, completion_ids: np.ndarray) -> str:
        """The reply as an environment reads it: without the stop token, other tokens kept.

        Where the template itself writes `<think>` before the reply, the tag is put back.
        """
        return self._opening + self._decoder.decode(self._without_stop(completion_ids))

    def reply_ids(self, reply: str) -> np.ndarray:
        """What a model writes for `decode` to give `reply` (white space aside), stop included."""
        opening = self._opening if reply.startswith(self._opening) else THINK_TAGS[0]
        body = reply.removeprefix(opening) if self._opening else reply
        # Behind another token, as in a dialogue: a text's first word may be spelled otherwise.
        end = self.stop_ids[0]
        special = self._encoder.special
        text = f"{self._decoder.decode([end])}{self._lead}{special.hide(body)}"
        return np.array([*special.encode(text)[1:], end], dtype=np.int64)

    def spans(self, completion_ids: np.ndarray, text: str) -> Spans:
        """Where reasoning and answer lie in the sampled ids; `text` is what `decode` gave.

        A token that holds both a part of a tag and inner text belongs to the tag.
        """
        parts = find_parts(text)
        if parts is None:
            return Spans()
        shift = len(self._opening)
        ends = self._decoder.ends(self._without_stop(completion_ids), text[shift:])
        return Spans(_token_span(ends, parts[0], shift), _token_span(ends, parts[1], shift))

    def _probe_template(self, eos_ids: Collection[int]) -> None:
        """Find out how the template treats system prompts, replies and earlier turns."""
        from jinja2.exceptions import TemplateError

        self._folds_system = False
        self._frame: tuple[str, str] | None = None
        try:
            self._folds_system = _SYSTEM not in self._render([Message("system", _SYSTEM), _user()])
        except TemplateError:
            self._folds_system = True
        try:
            self._opening = self._find_opening()
            self._lead = self._reply_lead()
            self._end_id = self._find_end_id()
            self.is_prefix_stable = self._keeps_history()
            self._frame = self._find_frame()
        except TemplateError as error:
            raise MooredError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot render a dialogue of "
                f"user and assistant turns: {error}"
            ) from error
        eos_id = cast(int | None, self.tokenizer.eos_token_id)
        # Where config.json names none, transformers puts a default there, which may be any token.
        special = (token for token in eos_ids if token in self.tokenizer.added_tokens_decoder)
        found = dict.fromkeys([self._end_id, eos_id, *special])
        self.stop_ids = tuple(token for token in found if token is not None)
        if not self.stop_ids:
            raise MooredError(
                f"nothing ends a reply: the tokenizer {self.tokenizer.name_or_path!r} has no "
                f"eos_token and its chat template ends no turn with a special token; set "
                f"tokenizer.eos_token"
            )

    def _find_opening(self) -> str:
        """The part of `<think>…` that the template already writes for the model; mostly nothing."""
        return open_think(self._render([_user()]).rpartition(_USER)[2])

    def _find_end_id(self) -> int | None:
        """The first special token after a reply, before the next message's text."""
        between = self._text_after_reply(_NEXT).partition(_NEXT)[0]
        added = self.tokenizer.added_tokens_decoder
        ends = (token for token in self._encoder.encode(between).tolist() if token in added)
        return next(ends, None)

    def _find_frame(self) -> tuple[str, str] | None:
        """What stands around a user message, where the template leaves messages as they are."""
        head, _, tail = self._text_after_reply(_NEXT).partition(_NEXT)
        for message in (f"  {_NEXT}\n ", f"<tool_response>{_NEXT}</tool_response>", "", "\n"):
            if self._text_after_reply(message) != head + message + tail:
                return None
        return head, tail

    def _keeps_history(self) -> bool:
        """True when a dialogue's text is its first prompt and what was appended turn by turn."""
        reply = format_reply("one", "two")
        if self._opening:
            reply = self._opening + reply.removeprefix(THINK_TAGS[0])
        written = self._lead + reply.removeprefix(self._opening)
        dialogue = [Message("system", _SYSTEM), _user()]
        stream = self._render(dialogue)
        for _ in range(2):
            dialogue += [Message("assistant", reply), Message("user", _NEXT)]
            stream += written + self._text_after_reply(_NEXT)
        return stream == self._render(dialogue)

    def _reply_lead(self) -> str:
        """White space the template puts before a reply but leaves to the model to write."""
        whole = self._render([_user(), Message("assistant", _REPLY), Message("user", _NEXT)])
        lead = whole.partition(_REPLY)[0].removeprefix(self._render([_user()]))
        return lead if lead.isspace() else ""

    def _text_after_reply(self, observation: Content) -> str:
        """What stands between a reply and the next one: end of turn, user message, header."""
        if self._frame is not None and isinstance(observation, str):
            return self._text(observation).join(self._frame)
        dialogue = [_user(), Message("assistant", _REPLY), Message("user", observation)]
        before, _, after = self._render(dialogue).partition(_REPLY)
        if not after:
            raise MooredError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out assistant "
                f"messages, it cannot be used for several turns: {before[-200:]!r}"
            )
        return after

    def _render(self, messages: Sequence[Message]) -> str:
        chat = [{"role": m.role, "content": self._text(m.content)} for m in messages]
        if self._folds_system and [m["role"] for m in chat[:2]] == ["system", "user"]:
            both = f"{chat[0]['content']}\n\n{chat[1]['content']}"
            chat[:2] = [{"role": "user", "content": both}]
        options = {"tokenize": False, "add_generation_prompt": True, **self._options}
        text = self.tokenizer.apply_chat_template(chat, **options)
        assert isinstance(text, str)
        return text

    def _text(self, content: Content) -> str:
        """The content, its special tokens hidden, with the texts of images in their places."""
        hide = self._encoder.special.hide
        if isinstance(content, str):
            return hide(content)
        if self._image_text is None and content_images(content):
            raise MooredError(
                "a message holds an image, but this renderer has no text for images; choose a "
                "text view of the environment"
            )
        parts = (
            hide("".join(part["text"] for part in run if part["type"] == "text"))
            if is_text
            else "".join(self._image_text(part["image"]) for part in run)  # pyright: ignore
            for is_text, run in groupby(content, lambda part: part["type"] == "text")
        )
        return "".join(parts)

    def _after_reply(self, observation: Content) -> _Between:
        if isinstance(observation, str) and observation in self._between:
            return self._between[observation]
        text = self._text_after_reply(observation)
        chunks = self._encoder.chunks(text)
        found = self._join(observation, text, chunks, self._encoder.encode_chunks(chunks))
        if isinstance(observation, str):
            bound(self._between, CACHED_BETWEEN)
            self._between[observation] = found
        return found

    def _join(
        self, observation: Content, text: str, chunks: Sequence[str], arrays: list[np.ndarray]
    ) -> _Between:
        """What stands after a reply, of its text, its chunks and their ids."""
        place = self._place(observation, text, chunks, self._text_after_reply)
        ids = np.concatenate(arrays)
        after_end = ids[np.argmax(ids == self._end_id) + 1 :]
        return _Between(ids, after_end, ids[sum(map(len, arrays[:place])) :])

    def _without_stop(self, completion_ids: np.ndarray) -> list[int]:
        ids = np.asarray(completion_ids).tolist()
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids


@dataclass(frozen=True, slots=True, eq=False)
class _Between:
    """Ids from the end of a reply to the start of the next: end of turn, user message, header."""

    ids: np.ndarray
    after_end: np.ndarray
    """Without the end of turn, for a reply that wrote it itself."""
    message: np.ndarray
    """From the border before the user message on."""


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template for dialogues without tools."""
    try:
        return with_fixed_date(tokenizer.get_chat_template())
    except ValueError as error:
        named = ", ".join(sorted(cast(Mapping[str, str], tokenizer.chat_template)))
        raise MooredError(
            f"the tokenizer {tokenizer.name_or_path!r} has several chat templates ({named}), and "
            f"none of them is called default; give the name default to the one that should be used"
        ) from error


def _token_span(ends: Sequence[int], chars: Span, shift: int) -> Span:
    """The tokens wholly inside `chars`; the first `shift` characters have no tokens."""
    start = bisect_left(ends, chars[0] - shift)
    # Of several places with the same text before them, the first: not inside a character.
    stop = bisect_left(ends, ends[bisect_right(ends, chars[1] - shift) - 1])
    return start, max(start, stop)


def _user() -> Message:
    return Message("user", _USER)
