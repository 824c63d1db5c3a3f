"""The tokenizer of the embedded models: byte-level BPE of 1,024 tokens with a ChatML template.

Text that never changes in the prompts of an environment is one token per phrase, so that a prompt
costs few tokens; the parts of a task (grid symbols, digits, brackets, actions) are one token each;
all other words are BPE. Any text can be encoded and decodes exactly.

    python recipes/tokenizer.py [RECIPE]        prints what prompts and replies cost
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moored.reply import TAGS
from moored.sft.options import SftEnvConfig, load_sft_config
from moored.sft.source import open_source
from moored.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECIPE = Path(__file__).with_name("embedded.yaml")
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 1024
MAX_POSITIONS = 2048
NUM_SAMPLES = 3000
"""Dialogues the tokenizer is trained on; always the first of the recipe: all models share it."""

MIN_PHRASE_CHARS = 8
MIN_PHRASE_SHARE = 0.1
"""A phrase is seen in at least this share of an environment's dialogues."""

PIECES = "|".join(
    (
        r"\n",
        r"[0-9]",
        r" \|\| ",
        r", (?=[0-9])",
        r"[#_√,]",
        r" ?[()\[\]{}]",
        r"[OXPSG](?![a-z])",
        r" ?(?![OXPSG](?![a-z]))[A-Za-z]+",
        r"[ \t\r]+(?=[ \t\r])",
        r" ?[^\sA-Za-z0-9]",
    )
)
"""What BPE never merges across: symbols of the boards stand alone, words take their space along."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}"
    "{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One demonstrated episode, ending with a reply."""

    spec: SftEnvConfig
    messages: tuple[Message, ...]


def build_tokenizer(recipe: Path = RECIPE, num_tokens: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a recipe and wrap it for transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(sample_dialogues(recipe), num_tokens),
        chat_template=CHAT_TEMPLATE,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )


def sample_dialogues(recipe: Path = RECIPE) -> list[Dialogue]:
    """The dialogues the tokenizer is trained on, about as many of each environment."""
    config = load_sft_config(recipe)
    num_specs = Counter(spec.name for spec in config.env)
    dialogues = []
    for spec in config.env:
        source = open_source(config.model_copy(update={"env": [spec]}))
        count = NUM_SAMPLES // (len(num_specs) * num_specs[spec.name])
        dialogues += [Dialogue(spec, tuple(source.train(index))) for index in range(count)]
        source.close()
    return dialogues


def train_bpe(dialogues: Sequence[Dialogue], num_tokens: int = VOCAB_SIZE) -> Tokenizer:
    """Train BPE on what is left of the dialogues when phrases and tags are cut out."""
    phrases = constant_phrases(dialogues)
    added = [*TAGS, "√", *phrases]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(added),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cut = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    texts = [text for d in dialogues for m in d.messages for text in cut.split(m.text)]
    roles = [message.role for dialogue in dialogues for message in dialogue.messages]
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def constant_phrases(dialogues: Sequence[Dialogue]) -> list[str]:
    """Text all prompts of an environment share: whole lines, or what stands between numbers."""
    phrases: dict[str, None] = {}
    for env in dict.fromkeys(dialogue.spec.name for dialogue in dialogues):
        prompts = [_prompt_lines(d.messages) for d in dialogues if d.spec.name == env]
        line_counts = Counter(line for lines in prompts for line in set(lines))
        fixed = {line for line, count in line_counts.items() if count == len(prompts)}
        counts = Counter(part for lines in prompts for part in set(_parts(lines, fixed)))
        enough = MIN_PHRASE_SHARE * len(prompts)
        phrases |= dict.fromkeys(sorted(part for part in counts if counts[part] >= enough))
    return [text for text in phrases if len(text) >= MIN_PHRASE_CHARS and re.search("[a-z]", text)]


def _prompt_lines(messages: Sequence[Message]) -> list[str]:
    """Lines of the system and user messages, cut at the tags."""
    text = "\n".join(message.text for message in messages if message.role != "assistant")
    return re.split("|".join(("\n", *TAGS)), text)


def _parts(lines: Iterable[str], fixed: set[str]) -> list[str]:
    """Fixed lines whole, the others cut at their digits."""
    return [part for line in lines for part in ([line] if line in fixed else re.split(r"\d", line))]


def render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> list[int]:
    """Token ids of a prompt, the header of the reply included."""
    chat = [message.to_dict() for message in messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)  # pyright: ignore[reportArgumentType]
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)


def count_tokens(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> int:
    """Tokens of a prompt, the header of the reply included."""
    return len(render(tokenizer, messages))


def print_costs(recipe: Path) -> None:
    """Tokens of first prompts and replies, by environment and options."""
    tokenizer = build_tokenizer(recipe)
    dialogues = sample_dialogues(recipe)
    print(f"{len(tokenizer)} tokens, {len(constant_phrases(dialogues))} of them phrases")
    print(f"{'system':>6} {'prompt':>6} {'reply':>6}  task")
    for spec in load_sft_config(recipe).env:
        prompts = [d.messages for d in dialogues if d.spec == spec]
        system = count_tokens(tokenizer, prompts[0][:1])
        prompt = mean(count_tokens(tokenizer, messages[:2]) for messages in prompts)
        reply = mean(len(tokenizer.encode(messages[2].text + END)) for messages in prompts)
        print(f"{system:6} {prompt:6.0f} {reply:6.0f}  {spec.name} {spec.options}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What prompts and replies cost, in tokens.")
    parser.add_argument("recipe", type=Path, nargs="?", default=RECIPE)
    print_costs(parser.parse_args().recipe)
