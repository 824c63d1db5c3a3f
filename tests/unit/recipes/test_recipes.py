"""The recipe of the embedded models: demonstrations, tokenizer, training."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moored.envs.base import split_of_seed
from moored.envs.mix import make_env
from moored.reply import parse_reply
from moored.sft.demonstrations import TraceMix
from recipes.demonstrations import MIX, ONE_TURN, TaskSpec, make_dialogue, short_answer

ROOT = Path(__file__).parents[3]
NUM_DIALOGUES = 400
DIGEST = "cb624a3c6ff70028a876f4d2e1739c4848408eaf3cffb94345e52e9dcceb887e"
CLEAN = TraceMix(grounded=1.0, noised=0.0)


@pytest.fixture(scope="module")
def dialogues():
    return [make_dialogue(7, index) for index in range(NUM_DIALOGUES)]


def test_demonstrations_are_the_same_bytes_in_another_process():
    code = (
        "import hashlib; from recipes.demonstrations import make_dialogue\n"
        "text = str([make_dialogue(3, i) for i in range(40)])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )
    text = str([make_dialogue(3, i) for i in range(40)])
    assert done.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_demonstrations_need_neither_yaml_nor_torch():
    blocked = ["yaml", "rich", "typer", "torch", "transformers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from recipes import corpus, demonstrations, tokenizer, warm_start\n"
        "print(len(demonstrations.make_dialogue(0, 0).messages) >= 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "True", done.stderr


def test_only_train_tasks_are_demonstrated(dialogues):
    assert {split_of_seed(dialogue.task_seed) for dialogue in dialogues} == {"train"}


def test_every_reply_has_the_asked_form(dialogues):
    replies = [m.text for d in dialogues for m in d.messages if m.role == "assistant"]
    assert all(parse_reply(reply).is_valid for reply in replies)


def test_dialogues_alternate_and_end_with_a_reply(dialogues):
    for dialogue in dialogues:
        roles = [message.role for message in dialogue.messages]
        num_turns = len(roles) // 2
        assert roles == ["system", *["user", "assistant"] * num_turns]


def test_kinds_come_in_the_stated_shares():
    traces = TraceMix(grounded=0.3, noised=0.9)
    mix = (TaskSpec("bandit", 1, traces=traces),)
    counts = Counter(make_dialogue(0, index, mix).kind for index in range(2000))
    for kind, share in traces.shares.items():
        assert counts[kind] / 2000 == pytest.approx(share, abs=0.04)


def test_the_mix_covers_five_environments_and_both_protocols():
    known = {"sokoban", "frozen_lake", "countdown", "bandit", "metamath"}
    assert {spec.env for spec in MIX} == known
    for env in ("sokoban", "frozen_lake"):
        turns = {make_env(spec.env, **spec.options).max_turns for spec in MIX if spec.env == env}
        assert {1, 5} <= turns


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("sokoban", ONE_TURN),
        ("sokoban", {}),
        ("frozen_lake", {"slip": 0.0, **ONE_TURN}),
        ("frozen_lake", {"slip": 0.0}),
        ("countdown", {}),
        ("bandit", {}),
        ("metamath", {"level": 1}),
    ],
)
def test_replaying_a_grounded_demonstration_succeeds(env, options):
    mix = (TaskSpec(env, 1, options, CLEAN),)
    game = make_env(env, **options)
    for index in range(15):
        dialogue = make_dialogue(0, index, mix)
        game.reset(dialogue.task_seed)
        results = [game.step(m.text) for m in dialogue.messages if m.role == "assistant"]
        assert results[-1].success


def test_a_lake_plan_is_cut_at_the_goal():
    lake = make_env("frozen_lake", map=["FFFH", "SFFF", "FFHG", "FFFF"], slip=0.5, **ONE_TURN)
    lake.reset(0)
    # On slippery ice the oracle goes on: it may not be there yet.
    assert len(lake.oracle().split(" || ")) == 10
    assert len(short_answer(lake).split(" || ")) < 10


def test_the_demonstrations_are_those_the_embedded_models_were_made_from():
    """Fails when a change of prompts or replies makes other dialogues: then say so in the card."""
    told = [
        (d.spec.env, d.task_seed, d.kind, [m.text for m in d.messages])
        for d in (make_dialogue(0, index) for index in range(200))
    ]
    assert hashlib.sha256(repr(told).encode()).hexdigest() == DIGEST


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("transformers")
    from recipes.tokenizer import build_tokenizer

    return build_tokenizer()


@pytest.mark.parametrize("text", [*"#_√OXPSG\n0123456789()[],", "Up", "Down", " || ", " Left"])
def test_what_tasks_are_made_of_is_one_token(tokenizer, text):
    assert len(tokenizer.encode(text)) == 1


def test_grid_symbols_digits_and_actions_stand_alone_in_context(tokenizer):
    symbols = {*"#_√OXPSG\n0123456789()", ", ", " || ", "Up", "Down", "Left", "Right"}
    for text in ("######\n#P__##\n#√XOSG", "(10, 25)", "Up || Down || Left || Right"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert set(pieces) <= symbols


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_prompts_and_replies_come_back_exactly(tokenizer, dialogues):
    for message in (m for d in dialogues[:100] for m in d.messages):
        assert tokenizer.decode(tokenizer.encode(message.text)) == message.text


def test_decoding_keeps_tags_and_drops_specials(tokenizer):
    reply = "<think>First.</think><answer>Up</answer>"
    ids = tokenizer.encode(reply + "<|im_end|><|pad|>")
    assert len(ids) == 4 + 2 + 1 + 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == reply


def test_a_sokoban_prompt_is_cheap_for_a_small_vocabulary(tokenizer):
    from recipes.tokenizer import count_tokens

    messages = make_env("sokoban", **ONE_TURN).reset(5)
    assert count_tokens(tokenizer, messages[:1]) <= 48
    assert count_tokens(tokenizer, messages) <= 140
    assert len(tokenizer) == 1024


def test_an_option_not_trained_on_costs_no_more_than_its_digits(tokenizer):
    from recipes.tokenizer import count_tokens

    usual = make_env("sokoban").reset(5)
    other = make_env("sokoban", format_penalty=-0.25, max_turns=12).reset(5)
    # -0.25 has one digit more; 12 has one more in the rules and one in "Turn 1 of 12".
    assert count_tokens(tokenizer, other) == count_tokens(tokenizer, usual) + 3


def test_the_chat_template_is_prefix_stable_and_adds_no_system_message(tokenizer, dialogues):
    longest = max(dialogues, key=lambda dialogue: len(dialogue.messages))
    chat = [message.to_dict() for message in longest.messages]

    def render(count: int, *, add: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(
            chat[:count], tokenize=False, add_generation_prompt=add
        )
        return tokenizer.encode(text, add_special_tokens=False)

    whole = render(len(chat))
    for count in range(1, len(chat)):
        part = render(count, add=chat[count]["role"] == "assistant")
        assert whole[: len(part)] == part
    alone = tokenizer.apply_chat_template(chat[1:2], tokenize=False)
    assert alone == f"<|im_start|>user\n{chat[1]['content']}<|im_end|>\n"


@pytest.mark.parametrize("name", ["nano", "mini"])
def test_embedded_models_know_the_prompts(name):
    """Fails when prompts have changed much since the model was made: then make it again."""
    folder = ROOT / "moored" / "models" / name
    transformers = pytest.importorskip("transformers")
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{name} is not made yet")
    from recipes.tokenizer import count_tokens

    embedded = transformers.AutoTokenizer.from_pretrained(folder)
    costs = {
        str(spec): count_tokens(embedded, make_env(spec.env, **spec.options).reset(0)[:1])
        for spec in MIX
    }
    assert max(costs.values()) <= 64, costs


def test_the_template_takes_text_parts(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|im_start|>user\nab<|im_end|>\n"


def test_a_saved_tokenizer_loads_as_it_was(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<think>Player at (1, 2).</think><answer>Up || Down</answer><|im_end|>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token, loaded.eos_token) == ("<|pad|>", "<|im_end|>")


def test_training_the_tokenizer_again_gives_the_same_file(dialogues):
    pytest.importorskip("tokenizers")
    from recipes.tokenizer import train_bpe

    assert train_bpe(dialogues).to_str() == train_bpe(dialogues).to_str()


def test_the_encoder_writes_what_the_chat_template_writes(tokenizer, dialogues):
    from recipes.corpus import Encoder

    encoder = Encoder(tokenizer.backend_tokenizer)
    for dialogue in dialogues[:60]:
        ids, is_target = encoder.encode(dialogue.messages)
        chat = [message.to_dict() for message in dialogue.messages]
        assert ids == tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False))
        learnt = tokenizer.decode([i for i, learn in zip(ids, is_target, strict=True) if learn])
        replies = [m.text + "<|im_end|>" for m in dialogue.messages if m.role == "assistant"]
        assert learnt == "".join(replies)


def test_the_corpus_does_not_depend_on_the_number_of_workers(tokenizer):
    from recipes.corpus import make_corpus

    one, two = (
        make_corpus(tokenizer.backend_tokenizer, 300, 1, num_workers=workers) for workers in (1, 2)
    )
    assert np.array_equal(one.ids, two.ids)
    assert np.array_equal(one.is_target, two.is_target)
    assert len(one.lengths) == 300 and one.lengths.sum() == len(one.ids)


def test_an_epoch_takes_every_dialogue_within_the_budget():
    pytest.importorskip("torch")
    from recipes.finetune import batch_widths, split_epoch

    lengths = np.random.default_rng(0).integers(50, 700, size=5000)
    epoch = split_epoch(lengths, batch_widths(lengths), 4096, np.random.default_rng(1))
    counts = np.bincount(np.concatenate([rows for _, rows in epoch]), minlength=5000)
    assert counts.min() == 1 and counts.mean() < 1.05
    assert all(lengths[rows].max() <= width for width, rows in epoch)
    assert all(width * len(rows) <= 4096 for width, rows in epoch)
    assert len({(width, len(rows)) for width, rows in epoch}) <= 16
    assert sum(width * len(rows) for width, rows in epoch) < 1.1 * lengths.sum()


def test_labels_are_the_replies_alone(tokenizer):
    pytest.importorskip("torch")
    from recipes.corpus import make_corpus
    from recipes.finetune import IGNORED, batches

    corpus = make_corpus(tokenizer.backend_tokenizer, 40, 2, num_workers=1)
    ids, labels = next(batches(corpus, 4096, 0, "cpu"))
    assert ids.shape == labels.shape
    assert ((labels == ids) | (labels == IGNORED)).all()
    for row in labels:
        text = tokenizer.decode(row[row != IGNORED].tolist())
        assert text.startswith("<think>") and text.endswith("</answer><|im_end|>")


def test_padding_changes_no_gradient(tokenizer):
    torch = pytest.importorskip("torch")
    from recipes.finetune import build_model
    from recipes.gradients import CAUSAL, IGNORED, add_gradients
    from recipes.sizes import Size

    model = build_model(Size(16, 2, 2, 32, 1e-2, 1, 1), tokenizer, seed=0)
    model.set_attn_implementation(CAUSAL)
    ids = torch.randint(0, 1000, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = IGNORED
    found = []
    for num_pad in (0, 5):
        model.zero_grad()
        padded = (
            torch.nn.functional.pad(ids, (0, num_pad)),
            torch.nn.functional.pad(labels, (0, num_pad), value=IGNORED),
        )
        loss = add_gradients(model, *padded)
        found.append([loss, *(torch.clone(parameter.grad) for parameter in model.parameters())])
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(plain, padded)


def test_the_schedule_warms_up_and_ends_low():
    pytest.importorskip("torch")
    from recipes.finetune import schedule

    assert schedule(0, 0.0) == pytest.approx(0.01)
    assert schedule(500, 0.5) == pytest.approx(0.51)
    assert schedule(999, 1.0) == pytest.approx(0.02)


def test_the_command_makes_a_loadable_model_and_a_card(tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes import finetune, start_rates, warm_start
    from recipes.sizes import Size

    tiny = Size(16, 1, 2, 32, learning_rate=1e-2, num_steps=20, num_dialogues=60, batch_tokens=2048)
    monkeypatch.setattr(warm_start, "build_tokenizer", lambda: tokenizer)
    monkeypatch.setitem(warm_start.SIZES, "nano", tiny)
    monkeypatch.setattr(start_rates, "MAX_REPLY_TOKENS", 6)
    monkeypatch.setattr(finetune, "WARMUP_STEPS", 5)
    out = tmp_path / "nano"
    argv = ["warm_start.py", "nano", "--out", str(out), "--workers", "1", "--tasks", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--device", "cpu"])
    warm_start.main()
    loss = float(capsys.readouterr().out.split("\nloss ")[1].split()[0])
    assert loss < np.log(1024) - 0.5
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(out)) == 1024
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "`python recipes/warm_start.py nano --out moored/models/nano --seed 0`" in card
    assert "| sokoban | max_turns=1, max_actions_per_turn=10 | 30% | 3% | 27% | 70% |" in card
    assert str(tmp_path) not in "".join(file.read_text() for file in out.glob("*.json"))
