"""Drawn texts to token ids: a `PairSet` that can be cross-scored.

Text is tokenised as a whole and the reasoning found by character offsets, so that tokens are those
a model would have written. Ids stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moored.analysis.sample import Reasoning, StepDraw
from moored.diagnostics.pairs import Pair, PairSet
from moored.errors import MooredError, TooFewPromptsError
from moored.files.records import Chat, PromptLike
from moored.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"


class Encoder:
    """Turns prompts and reasonings into ids; without a tokenizer it takes ids only."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, vocabulary: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        """Ids the model knows; None when that cannot be asked."""

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

    def reasoning(self, reasoning: Reasoning) -> tuple[np.ndarray, int]:
        """Ids up to the end of the reasoning, and how many stand before it."""
        content, start, stop = reasoning.content, reasoning.start, reasoning.stop
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
        """What ids say; without a tokenizer, the ids."""
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return cast(str, self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def check_text(self, reasonings: Sequence[Reasoning]) -> None:
        """Raise when ids do not decode to the text recorded beside them."""
        known = [r for r in reasonings if r.text is not None and isinstance(r.content, np.ndarray)]
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

    def _matches(self, reasoning: Reasoning) -> bool:
        return self._decode(reasoning).strip(BROKEN).strip() in (reasoning.text or "")

    def _decode(self, reasoning: Reasoning) -> str:
        return self.text(np.asarray(reasoning.content)[reasoning.start : reasoning.stop])

    def _render(self, chat: Chat) -> str:
        from jinja2.exceptions import TemplateError

        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise MooredError(
                f"prompts are chat messages, but the tokenizer {tokenizer.name_or_path!r} has no "
                f"chat template; give the model that wrote the replies"
            )
        goes_on = chat[-1].get("role") == "assistant"
        try:
            text = tokenizer.apply_chat_template(
                cast(Any, chat),
                tokenize=False,
                add_generation_prompt=not goes_on,
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


def encode_step(
    step: StepDraw, encoder: Encoder, *, num_prompts: int, num_pairs: int, max_tokens: int | None
) -> PairSet:
    """The pairs of one step: `num_prompts` prompts, reasonings dealt out in turn."""
    chosen = step.chosen(num_prompts)
    if len(chosen) < num_prompts:
        raise TooFewPromptsError(too_few_prompts(step, len(chosen), num_prompts))
    prompts = [Prompt(encoder.prompt(drawn.prompt)) for drawn in chosen]
    stacks = [
        [(prompt, reasoning) for _, reasoning in drawn.reasonings]
        for prompt, drawn in zip(prompts, chosen, strict=True)
    ]
    dealt = [x for x in chain.from_iterable(zip_longest(*stacks)) if x is not None][:num_pairs]
    encoder.check_text([reasoning for _, reasoning in dealt])
    pairs = []
    for prompt, reasoning in dealt:
        ids, num_opening = encoder.reasoning(reasoning)
        ids = ids[: None if max_tokens is None else num_opening + max_tokens]
        if len(ids) > num_opening:
            pairs.append(Pair(prompt, ids, num_opening, 0, len(pairs), 0))
    return _pair_set(pairs, step)


def _pair_set(pairs: list[Pair], step: StepDraw) -> PairSet:
    by_key: dict[bytes, Prompt] = {}
    for pair in pairs:
        by_key.setdefault(pair.prompt.key, pair.prompt)
    places = {key: place for place, key in enumerate(by_key)}
    if len(places) < 2:
        raise TooFewPromptsError(too_few_prompts(step, len(places), 2))
    num_empty = step.num_without_reasoning + step.num_empty
    return PairSet(
        view="file",
        pairs=tuple(pairs),
        prompts=tuple(by_key.values()),
        columns=np.array([places[pair.prompt.key] for pair in pairs], dtype=np.intp),
        num_available=step.num_rows - num_empty,
        num_empty=num_empty,
    )


def too_few_prompts(step: StepDraw, found: int, wanted: int) -> str:
    """Why a step cannot be measured."""
    text = f"needs {wanted} distinct prompts with a reasoning, got {found} in {step.num_rows} rows"
    if step.num_without_reasoning or step.num_empty:
        text += f" ({step.num_without_reasoning} without tags, {step.num_empty} empty)"
    return text
