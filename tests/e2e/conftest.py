"""The toy model, TRL without a network, and commands in this process."""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from moored.cli.main import main
from tests.tiny_model import tiny_model

CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


REWRITING = CHAT.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}C D E {% endif %}{{ m.content }}"
)
"""Replies change once they are history, as Qwen3's template strips their reasoning."""


@pytest.fixture(scope="session")
def rewriting_folder(toy_folder, tmp_path_factory) -> Path:
    """The toy model with a chat template that rewrites history: each turn is its own sample."""
    folder = tmp_path_factory.mktemp("rewriting") / "model"
    shutil.copytree(toy_folder, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = REWRITING
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    """A tiny random model over nine words, saved in Hugging Face format."""
    folder = tmp_path_factory.mktemp("toy")
    words = ["pad", "end", "user", "assistant", "A", "B", "C", "D", "E"]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="pad"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="end", pad_token="pad", chat_template=CHAT
    )
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tiny_model(vocab_size=len(words), **sizes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trl_offline():
    """TRL neither reports its use nor looks for models on the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.base_trainer._BaseTrainer._send_telemetry", lambda self: None)
        gc.freeze()  # what TRL imports: it collects garbage before every training
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield


@pytest.fixture
def here(monkeypatch, capsys):
    """Runs a command in this process, which is quicker; returns what it shows."""

    def run(*arguments: str | Path, expect: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["moored", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        assert (left.value.code or 0) == expect, shown.err
        return shown.err if expect else shown.out

    return run
