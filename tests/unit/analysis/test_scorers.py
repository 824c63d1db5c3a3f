"""Text to scores: what `diagnose` finds is what plain concatenation and re-running gives."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moored.analysis.diagnose import LookOptions, draw, groups_of, plan, predict_seconds  # noqa: E402
from moored.analysis.scorers import (  # noqa: E402
    Encoder,
    Scorer,
    Scorers,
    local_scorer,
    nearest_step,
)
from moored.diagnostics.pairs import PairSet, cross_score, first_turn_pairs  # noqa: E402
from moored.errors import MooredError  # noqa: E402
from moored.files.records import Exchange, ReadOptions, Record, find_reasoning  # noqa: E402
from moored.models.find import embedded_models  # noqa: E402
from moored.models.load import load_model  # noqa: E402
from moored.types import Prompt, ScoreRequest  # noqa: E402
from tests.tiny_model import tiny_model  # noqa: E402

WORDS = ["the", "player", "is", "at", "left", "wall", "box", "up", "so", "push", "é", "漢"]


@pytest.fixture(scope="module")
def nano() -> Scorer:
    torch.set_num_threads(1)
    return local_scorer("nano", "cpu", "float32")


def record(prompt, response: str) -> Record:
    think = find_reasoning(response, ReadOptions())
    return Record(step=None, prompt=prompt, response=response, think=think)


def pairs_of(rows, scorer: Scorer, num_prompts: int, **options) -> PairSet:
    """What a monitor draws of one look."""
    (look,) = draw(rows, LookOptions(num_prompts=num_prompts)).looks
    return first_turn_pairs(
        groups_of(look, scorer.encoder, num_prompts, **options),
        num_prompts=num_prompts,
    )


def test_scores_equal_concatenating_and_running_again(nano):
    rng = np.random.default_rng(0)
    rows = []
    for p, length in enumerate((3, 40, 11, 90)):
        prompt = f"room {p}: " + " ".join(rng.choice(WORDS, length))
        for _ in range(3):
            thought = " ".join(rng.choice(WORDS, rng.integers(1, 50)))
            rows.append(record(prompt, f"<think>\n{thought}\n</think><answer>up</answer>"))
    pairs = pairs_of(rows, nano, 4)
    found = cross_score(pairs, nano.score)
    model = load_model("nano", torch.device("cpu")).model.eval()
    naive = np.empty_like(found)
    for m, pair in enumerate(pairs.pairs):
        for j, prompt in enumerate(pairs.prompts):
            ids = torch.tensor(np.concatenate([prompt.ids, pair.continuation]))
            with torch.no_grad():
                logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
            each = logp[torch.arange(len(ids) - 1), ids[1:]]
            naive[m, j] = each[len(prompt.ids) - 1 + pair.num_opening :].double().sum()
    assert len({len(prompt.ids) for prompt in pairs.prompts}) == 4
    np.testing.assert_allclose(found, naive, atol=1e-4, rtol=0)


def test_the_stated_cost_counts_prompts_once_here_and_every_time_behind_a_server(nano):
    rows = [record(f"room {p}", "<think>up up</think>") for p in range(3) for _ in range(2)]
    pairs, options = pairs_of(rows, nano, 3), LookOptions(num_prompts=3)
    drawn = draw(rows, options)
    planned = plan(drawn, nano, options)
    prompts = sum(len(prompt.ids) for prompt in pairs.prompts)
    replies = sum(len(pair.continuation) for pair in pairs.pairs)
    assert len(pairs.prompts) == 3
    assert planned.token_forwards == prompts + 3 * replies
    server = Scorer(name="s", score=nano.score, encoder=nano.encoder, shares_prompt=False)
    assert plan(drawn, server, options).token_forwards == 6 * prompts + 3 * replies
    assert predict_seconds(planned, nano) > 0.0 and planned.num_requests == 3


def test_tags_are_context_and_only_the_inside_is_scored(nano, toy_tokenizer):
    text = "<think>é up</think><answer>"
    ids, num_opening = nano.encoder.reasoning(Exchange(prompt="", response=text, think=(7, 11)))
    tokenizer = load_model("nano", torch.device("cpu")).tokenizer
    assert tokenizer.decode(ids[:num_opening]) == "<think>"
    assert tokenizer.decode(ids[num_opening:]) == "é up"
    # Tokens that run over a border belong to the tag.
    fused = toy_tokenizer.make_tokenizer("chatml", fused=True)
    ids, num_opening = Encoder(fused).reasoning(Exchange(prompt="", response=text, think=(7, 11)))
    inner = fused.decode(ids[num_opening:])
    assert inner in "é up" and fused.decode(ids) in text


def test_chats_are_rendered_with_the_template_and_replies_go_on_from_it(nano):
    tokenizer = load_model("nano", torch.device("cpu")).tokenizer
    ids = nano.encoder.prompt([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    open_end = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
    assert str(tokenizer.decode(nano.encoder.prompt(open_end))).endswith("assistant\nI")


def test_prompts_of_a_dialogue_go_on_from_each_other_and_tell_what_is_new(nano):
    decode = load_model("nano", torch.device("cpu")).tokenizer.decode
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>I</think>"}]
    chat += [{"role": "user", "content": "you?"}]
    turns = [Exchange(prompt=chat[:1], response="a"), Exchange(prompt=chat, response="b")]
    (first, start), (second, begins) = nano.encoder.prompts(turns)
    assert start == 0 and np.array_equal(first, nano.encoder.prompt(chat[:1]))
    assert np.array_equal(second[: len(first)], first)
    assert decode(second) == decode(nano.encoder.prompt(chat))
    assert decode(second[begins:]) == "<|im_start|>user\nyou?<|im_end|>\n<|im_start|>assistant\n"
    # The history of another dialogue is not that of this one: nothing can be exchanged.
    other = Exchange(prompt=[{"role": "user", "content": "no"}, *chat[1:]], response="b")
    assert [where for _, where in nano.encoder.prompts([turns[0], other])] == [None, None]


def test_chat_messages_have_the_same_date_every_day(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    ids = Encoder(tokenizer).prompt([{"role": "user", "content": "hi"}])
    assert str(tokenizer.decode(ids)).startswith("26 Jul 2024<|im_start|>user")


def test_a_prompt_gets_the_bos_its_tokenizer_adds_and_never_two(toy_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = toy_tokenizer.make_tokenizer("llama3")
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    assert bos_id not in Encoder(tokenizer).prompt("hi")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bos_id)]
    )
    for text in ("hi", f"{bos}hi"):
        assert np.count_nonzero(Encoder(tokenizer).prompt(text) == bos_id) == 1


def written(ids: np.ndarray, text: str) -> Exchange:
    return Exchange(prompt="", response=ids, think=(0, len(ids)), text=text)


def test_ids_of_another_tokenizer_are_found_out(nano):
    with pytest.raises(MooredError, match="token id 5000, but the model knows 1024"):
        nano.encoder.prompt(np.array([5000]))
    right = load_model("nano", torch.device("cpu")).tokenizer.encode("go up now")
    nano.encoder.check_text([written(np.array(right), "I go up now!")])
    with pytest.raises(MooredError, match="another tokenizer"):
        nano.encoder.check_text([written(np.array(right) + 1, "go up now")])


def test_texts_without_a_tokenizer_and_texts_too_long_are_refused(nano):
    with pytest.raises(MooredError, match="--tokenizer"):
        Encoder(None).prompt("text")
    rows = [record(f"room {p}", f"<think>{'up ' * 2000}</think>") for p in range(2)]
    options = LookOptions(num_prompts=2)
    with pytest.raises(MooredError, match="--max-tokens"):
        plan(draw(rows, options), nano, options)
    plan(draw(rows, options), nano, replace(options, max_tokens=5))
    assert pairs_of(rows, nano, 2, max_tokens=5).lengths.tolist() == [5, 5]


def test_texts_longer_than_a_models_layers_look_back_are_refused(nano, tmp_path):
    """The scorer lets all layers look at everything; the model's own would not."""
    shutil.copytree(embedded_models()["nano"], tmp_path, dirs_exist_ok=True)
    tiny_model("mistral", vocab_size=1024, sliding_window=64).save_pretrained(tmp_path)
    rows = [record(f"room {p}", f"<think>{'up ' * 100}</think>") for p in range(2)]
    options = LookOptions(num_prompts=2)
    drawn = draw(rows, options)
    plan(drawn, nano, options)
    with pytest.raises(MooredError, match="do not fit into the 64 of"):
        plan(drawn, local_scorer(str(tmp_path), "cpu", "float32"), options)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("cohere", {"logit_scale": 0.25}, "differ from the model's by"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "ValueError"),
    ],
)
def test_a_model_that_the_engine_computes_otherwise_does_not_score(tmp_path, kind, options, why):
    shutil.copytree(embedded_models()["nano"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    tiny_model(kind, vocab_size=1024, scale=3.0, **options).save_pretrained(tmp_path)
    with pytest.raises(MooredError, match=f"'{kind}' do not work with this engine.*{why}"):
        local_scorer(str(tmp_path), "cpu", "float32")


def test_a_model_with_fewer_embeddings_than_the_tokenizer_has_ids_does_not_score(tmp_path):
    shutil.copytree(embedded_models()["nano"], tmp_path, dirs_exist_ok=True)
    tiny_model(vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(MooredError, match="model has embeddings for 300 ids only"):
        local_scorer(str(tmp_path), "cpu", "float32")


def test_scores_are_those_of_the_temperature_that_rollouts_were_sampled_at(nano):
    request = ScoreRequest(Prompt(np.array([5, 6, 7])), [np.array([8, 9])])
    cool = local_scorer("nano", "cpu", "float32", temperature=0.6)
    model = load_model("nano", torch.device("cpu")).model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:4]
    for scorer, temperature in ((nano, 1.0), (cool, 0.6)):
        logp = (logits / temperature).log_softmax(-1)[[0, 1], [8, 9]]
        np.testing.assert_allclose(scorer.score([request])[0][0], logp, atol=1e-5)


@pytest.mark.parametrize(
    ("step", "nearest"), [(1, 10), (10, 10), (19, 10), (20, 20), (99, 30), (None, 30)]
)
def test_a_step_is_scored_by_the_last_checkpoint_not_after_it_else_by_the_first(step, nearest):
    assert nearest_step([10, 20, 30], step) == nearest


def test_one_model_is_in_memory_at_a_time_and_loaded_once_for_its_steps(nano):
    loaded = []

    def load(step: int | None) -> Scorer:
        loaded.append(step)
        return nano

    scorers = Scorers("toy", 1.0, load, (0, 20))
    assert all(scorers.at(step) is nano for step in (1, 5, 19, 20, 30))
    assert loaded == [0, 20] and list(scorers._loaded) == [20]
