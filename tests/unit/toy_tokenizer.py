"""Small Hugging Face tokenizers made in memory: nothing is downloaded, nothing is written.

`make_tokenizer("chatml")` gives a byte-level BPE tokenizer with one of the chat templates below,
each in the manner of a model family. `fused` lets tokens run over tag borders; `tag_tokens` makes
each tag one token; `sentencepiece` marks spaces as Llama 2 and Mistral do.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

_CHATML_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
_CHATML_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)

TEMPLATES: dict[str, str] = {
    "chatml": _CHATML_TURNS + _CHATML_HEADER,
    "chatml_default_system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + _CHATML_TURNS
        + _CHATML_HEADER
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}" + _ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        "[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    # Spaces around a reply: the first is for the model to write.
    "llama2": (
        _ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }} "
        "{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # The system prompt moves along: it always stands in the last user message.
    "mistral_nemo": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST]"
        "{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # Only the next turn's header closes a reply.
    "glm": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    # Reasoning of earlier turns is left out.
    "qwen3": (
        "{% for m in messages %}{% set content = m.content %}"
        "{% if m.role == 'assistant' and not loop.last and '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}" + _CHATML_HEADER
    ),
    # The template opens the reasoning itself.
    "opens_think": _CHATML_TURNS
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "no_system": (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}" + _CHATML_HEADER
    ),
}
"""Name of a style -> its chat template."""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOKENS: dict[str, tuple[str, ...]] = {
    "llama3": (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
    ),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
    "mistral": ("<s>", "[INST]", "[/INST]", "</s>"),
    "llama2": ("<s>", "[INST]", "[/INST]", "</s>"),
    "mistral_nemo": ("<s>", "[INST]", "[/INST]", "</s>"),
    "glm": ("<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
}
"""Special tokens of a style, the end of text last; with a beginning of text, that one first."""
_WITH_BOS = ("llama3", "gemma", "mistral", "llama2", "mistral_nemo")

_CORPUS = [
    "<think>The player is at (1, 2), the box at (3, 4): push.</think><answer>Up || Left</answer>",
    "<think>\nI go right, then down.\n</think>\n<answer>Right || Down</answer>",
    "system user assistant model Turn 1 of 5. Reward: -0.1. Actions left: 10, at most 2 this turn.",
    "You push boxes onto targets. Reply as <think>your reasoning</think><answer>your answer"
    "</answer>. A malformed reply earns -0.1, moves nothing and uses up the turn.",
    "######\n#__P_#\n#_XO_#\n#____#\n#_√S_#\n######",
    "Größe, déjà vu, наука, 推箱子, √2 ≈ 1.414 🙂",
]


def make_tokenizer(
    style: str = "chatml",
    *,
    vocab_size: int = 640,
    fused: bool = False,
    tag_tokens: bool = False,
    sentencepiece: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of `style`, one of `TEMPLATES`."""
    special = list(_TOKENS.get(style, _CHATML_TOKENS))
    added = [*special, *(TAGS if tag_tokens else ())]
    if sentencepiece:
        core = _train_sentencepiece(vocab_size, added)
    else:
        core = _train_byte_level(vocab_size, added, use_regex=not fused)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=special[-1],
        bos_token=special[0] if style in _WITH_BOS else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer


def _train_byte_level(vocab_size: int, added: list[str], *, use_regex: bool) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    return core


def _train_sentencepiece(vocab_size: int, added: list[str]) -> Tokenizer:
    """Spaces become ▁, one is put before the text and stripped again; rare characters as bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    # Without the last line: its characters are spelled in bytes.
    core.train_from_iterator(_CORPUS[:-1], trainer)
    model = json.loads(core.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    core.model = models.BPE(
        vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(added)
    return core
