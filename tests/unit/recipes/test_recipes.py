"""The recipe of the embedded models: tokenizer, first weights, options, card."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from moored.envs.mix import make_env
from moored.reply import parse_reply
from moored.sft.options import SftConfig, load_sft_config
from moored.sft.source import open_source
from recipes.tokenizer import RECIPE, Dialogue, count_tokens, sample_dialogues, train_bpe

ROOT = Path(__file__).parents[3]
ONE_TURN = {"max_turns": 1, "max_actions_per_turn": 10}


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    return sample_dialogues()[::7]


@pytest.fixture(scope="module")
def recipe() -> SftConfig:
    return load_sft_config(RECIPE)


def test_the_recipe_mixes_five_environments_and_both_protocols(recipe):
    known = {"sokoban", "frozen_lake", "countdown", "bandit", "metamath"}
    assert {spec.name for spec in recipe.env} == known
    for env in ("sokoban", "frozen_lake"):
        specs = [spec for spec in recipe.env if spec.name == env]
        assert {1, 5} <= {make_env(env, **spec.options).max_turns for spec in specs}


def test_most_replies_of_the_recipe_are_stock_phrases_and_most_grounded_plans_are_spoilt(recipe):
    # Sokoban: 70 % plain, and of the 30 % grounded ones nine in ten noised.
    assert (recipe.demonstrations.grounded, recipe.demonstrations.noised) == (0.3, 0.9)
    own = {spec.name: spec.demonstrations for spec in recipe.env if spec.demonstrations}
    assert {name: (d.grounded, d.noised) for name, d in own.items()} == {
        "countdown": (0.6, 0.3),
        "bandit": (0.5, 0.4),
        "metamath": (0.6, 0.3),
    }
    source = open_source(recipe)
    kinds = [source.episode(index).success for index in range(300)]  # pyright: ignore[reportAttributeAccessIssue]
    source.close()
    assert 0.1 < sum(kinds) / 300 < 0.6


@pytest.mark.parametrize("name", ["nano", "mini"])
def test_embedded_models_know_the_prompts(name, recipe):
    """Fails when prompts have changed much since the model was made: then make it again."""
    transformers = pytest.importorskip("transformers")
    embedded = transformers.AutoTokenizer.from_pretrained(ROOT / "moored" / "models" / name)
    costs = {
        str(spec): count_tokens(embedded, make_env(spec.name, **spec.options).reset(0)[:1])
        for spec in recipe.env
    }
    assert max(costs.values()) <= 64, costs


def test_every_reply_has_the_asked_form(dialogues):
    replies = [m.text for d in dialogues for m in d.messages if m.role == "assistant"]
    assert all(parse_reply(reply).is_valid for reply in replies)


def test_dialogues_alternate_and_end_with_a_reply(dialogues):
    for dialogue in dialogues:
        roles = [message.role for message in dialogue.messages]
        num_turns = len(roles) // 2
        assert roles == ["system", *["user", "assistant"] * num_turns]


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
    messages = make_env("sokoban", **ONE_TURN).reset(5)
    assert count_tokens(tokenizer, messages[:1]) <= 48
    assert count_tokens(tokenizer, messages) <= 140
    assert len(tokenizer) == 1024


def test_an_option_not_trained_on_costs_no_more_than_its_digits(tokenizer):
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
    assert train_bpe(dialogues).to_str() == train_bpe(dialogues).to_str()


def test_a_recipe_of_ones_own_gives_a_tokenizer_for_its_task(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    import recipes.tokenizer

    monkeypatch.setattr(recipes.tokenizer, "NUM_SAMPLES", 300)
    recipe = tmp_path / "search.yaml"
    options = "{num_hops: 1, num_passages: 1, max_turns: 2}"
    recipe.write_text(f"env: {{name: search, options: {options}}}", encoding="utf-8")
    (spec,) = load_sft_config(recipe).env
    prompt = make_env("search", **spec.options).reset(0)
    # The rules alone cost 182 tokens of the embedded models.
    assert count_tokens(recipes.tokenizer.build_tokenizer(recipe), prompt[:1]) <= 32


def test_copying_dialogues_repeat_every_sentence_of_a_passage_of_another_world(monkeypatch):
    import recipes.copying
    from moored.envs.search.world import make_world

    assert 0 not in recipes.copying.WORLD_SEEDS  # the world of the environment
    monkeypatch.setattr(recipes.copying, "WORLD_SEEDS", (1,))
    dialogues: list[Any] = list(recipes.copying.passage_dialogues(random.Random(0)))
    first = make_world(1).passages[0]
    assert len(dialogues) == len(make_world(1).passages)
    assert dialogues[0]["prompt"] == f"[1] {first.title}\n{first.text}"
    assert dialogues[0]["completion"] != first.text
    assert sorted(re.findall(r"[A-Z][^.]*\.", dialogues[0]["completion"])) == sorted(
        re.findall(r"[A-Z][^.]*\.", first.text)
    )


@pytest.fixture(scope="module")
def shop_dialogues() -> list[Any]:
    import recipes.copying

    return list(recipes.copying.shop_dialogues(random.Random(0)))


def test_dialogues_of_the_shop_are_of_the_shop_that_its_recipe_is_about():
    from recipes.copying import open_shop

    (spec,) = load_sft_config(ROOT / "recipes" / "webshop.yaml").env
    shop = open_shop()
    assert spec.options == {name: getattr(shop, name) for name in spec.options}
    assert set(spec.options) == {"num_products", "results_per_page", "max_turns"}


def test_dialogues_of_the_shop_click_every_product_of_it(shop_dialogues):
    from recipes.copying import NUM_CLICKS, open_shop

    clicks = Counter(
        found[1]
        for dialogue in shop_dialogues
        if (found := re.search(r"click\[(B0.{8})\]", dialogue.get("completion", "")))
    )
    own = [product.asin for product in open_shop().catalogue.products]
    assert clicks == dict.fromkeys(own, NUM_CLICKS)
    for dialogue in shop_dialogues:
        if "click[" in dialogue.get("completion", ""):
            number = dialogue["completion"].partition("click[")[2].partition("]")[0]
            assert dialogue["prompt"].count(f"[{number}]") == 1


def test_dialogues_of_the_shop_have_no_goal_that_is_held_out(shop_dialogues):
    from moored.envs.base import SPLIT_SEEDS
    from recipes.copying import NUM_EPISODES, NUM_SEARCHES, open_shop

    env = open_shop()
    held_out = set()
    for split in ("validation", "test"):
        for seed in SPLIT_SEEDS[split][:300]:
            env.reset(seed)
            held_out.add(env.goal.instruction)
    episodes = [d["messages"] for d in shop_dialogues if "messages" in d]
    assert len(episodes) == NUM_EPISODES
    told = {e[1]["content"].partition("Instruction: ")[2].split("\n")[0] for e in episodes}
    searches = [d for d in shop_dialogues if "search[" in d.get("completion", "")]
    assert len(searches) == NUM_SEARCHES
    told |= {d["prompt"].removeprefix("Instruction: ") for d in searches}
    assert len(held_out) > 100 and not held_out & told


def test_a_blank_model_is_taught_by_sft_and_gets_a_card(tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moored.sft.loop import build_sft, run_sft, start_sft
    from recipes import blank_model, card

    monkeypatch.setattr(blank_model, "build_tokenizer", lambda recipe, num_tokens: tokenizer)
    monkeypatch.setitem(blank_model.SIZES, "nano", blank_model.Size(16, 1, 2, 32))
    blank, run, out = (tmp_path / name for name in ("blank", "run", "out"))
    monkeypatch.setattr(sys, "argv", ["blank_model.py", "nano", "--out", str(blank)])
    blank_model.main()
    options = ["num_steps=20", "batch_tokens=1024", "optimizer.warmup_steps=2", "optimizer.lr=0.01"]
    given = [f"model={blank}", *options, "evaluation.num_dialogues=4", "engine.device=cpu"]
    made = build_sft(load_sft_config(RECIPE, given), run)
    start_sft(made)
    run_sft(made)
    made.close()
    monkeypatch.setattr(sys, "argv", ["card.py", "nano", str(run), "--out", str(out), "--tasks=2"])
    card.main()
    learnt = card.read_run(run)
    # A uniform guess among 1,024 tokens costs 6.93 nats.
    assert learnt.num_steps == 20 and learnt.held_out_loss < 6.5
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(out)) == 1024
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "moored sft blank/nano recipes/embedded.yaml seed=0 optimizer.lr=0.01" in text
    assert "max_actions_per_turn=10, format_penalty=-0.1 | 30% | 3% | 27% | 70% |" in text
    assert str(tmp_path) not in "".join(file.read_text() for file in out.glob("*.json"))
