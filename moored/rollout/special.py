"""Special tokens in content: what a message says is text, whatever it looks like.

Only the chat template may begin and end turns. The text of a special token inside of a message is
hidden under a private name while the template renders the dialogue, and then encoded as ordinary
text. Content without such text takes no part in this, and its ids are those of the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from moored.reply import TAGS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

HIDDEN = "\U000f8d3a"
"""Begins a private name; no text has this character, which stands for nothing, by accident. Content
that spells a private name on purpose is read as the text of the token, never as the token."""
_FIRST_NAME = 0xF0000
_BEGINNING = 3
"""Characters of a special token that are looked for first."""
_BRACKETED = re.compile(r"<.+>|\[.+\]")
_PROBES = (("user", "assistant", "user"), ("system", "user"))
"""Roles of the dialogues that show what a template writes; it may refuse one of them."""


class SpecialTokens:
    """Hides the special tokens in content, and encodes texts in which some are hidden."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        tokens = sorted(_control_tokens(tokenizer), key=len, reverse=True)
        self._names = {t: f"{HIDDEN}{chr(_FIRST_NAME + n)}" for n, t in enumerate(tokens)}
        self._found = _any_of(self._names)
        self._beginnings = tuple({token[:_BEGINNING] for token in tokens})
        self._swapped = self._names | {name: token for token, name in self._names.items()}
        self._either = _any_of(self._swapped)

    def hide(self, content: str) -> str:
        """The content with a private name for each special token in it; mostly the content."""
        for beginning in self._beginnings:  # of a thousand tokens there are few, found faster
            if beginning in content:
                assert self._found is not None
                return self._found.sub(lambda match: self._names[match[0]], content)
        return content

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text: what is hidden as ordinary text, other special tokens as such."""
        if HIDDEN not in text or self._either is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        if self._renamed is None:
            return self._encode_parts(text)
        swapped = self._either.sub(lambda match: self._swapped[match[0]], text)
        return self._renamed.encode(swapped, add_special_tokens=False).ids

    @cached_property
    def _renamed(self) -> Tokenizer | None:
        """The tokenizer with private names for its special tokens, whose text is text to it."""
        if not self._tokenizer.is_fast:
            return None
        return _rename(cast("TokenizersBackend", self._tokenizer).backend_tokenizer, self._names)

    def _encode_parts(self, text: str) -> list[int]:
        """The same part by part, where the tokenizer cannot be copied."""
        assert self._found is not None
        places = [place for match in self._found.finditer(text) for place in match.span()]
        ids: list[int] = []
        for start, stop in pairwise([0, *places, len(text)]):
            shown = re.sub(
                f"{HIDDEN}.", lambda match: self._swapped.get(match[0], match[0]), text[start:stop]
            )
            is_plain = text[start:stop] not in self._names
            ids += self._tokenizer.encode(
                shown, add_special_tokens=False, split_special_tokens=is_plain
            )
        if self._tokenizer.is_fast:  # the backend, which others ask too, keeps what was asked last
            backend = cast("TokenizersBackend", self._tokenizer).backend_tokenizer
            backend.encode_special_tokens = False
        return ids


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens, and those of the template that a tokenizer does not call special.

    The tags of a reply are none, though some tokenizers call them special: an environment shows
    them to the model, and the model writes them.
    """
    shown = "".join(_render_empty(tokenizer, roles) for roles in _PROBES)
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.content not in TAGS
        and (token.special or (token.content in shown and _BRACKETED.fullmatch(token.content)))
    ]


def _render_empty(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str]) -> str:
    """What the template writes around empty messages; nothing where it refuses them."""
    from jinja2.exceptions import TemplateError

    chat = [{"role": role, "content": ""} for role in roles]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return cast(str, text)
    except (TemplateError, TypeError, ValueError):
        return ""


def _any_of(texts: Mapping[str, str]) -> re.Pattern[str] | None:
    """Finds any of these texts; of several at one place the one that is named first."""
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _rename(backend: Tokenizer, names: Mapping[str, str]) -> Tokenizer | None:
    """A copy that knows tokens by other names; None when it would have other ids."""
    from tokenizers import Tokenizer

    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "normalized": False}
    _rename_in_model(data["model"], names)
    copy = Tokenizer.from_str(json.dumps(data | {"post_processor": None}))
    is_same = all(backend.token_to_id(t) == copy.token_to_id(n) for t, n in names.items())
    return copy if is_same else None


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """In its vocabulary too, where a model could find the token without being told."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): n for piece, n in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            (first, second)
            for first, second in model["merges"]
            if names.keys().isdisjoint((first, second, first + second))
        ]
