"""A tiny random model whose tokenizer has one token for each word of `lessons`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moored.reply import TAGS

PIECES = r"</?\w+>|<\|\w+\|>|\w+|\s|[^\w\s]"
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*SPECIAL, "?", "system", "user", "assistant", "\n", " ", ".", *TAGS, "Copy", "Letter"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """Knows nothing: random weights, 512 positions."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = [*WORDS, *"ABCD"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
