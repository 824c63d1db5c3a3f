"""Dialogues as samples: what is learnt, what it weighs, how batches are filled."""

from __future__ import annotations

import numpy as np
import pytest

from moored.config import load_config
from moored.errors import MooredError
from moored.reply import format_reply
from moored.sft.samples import OwnLessons, encode, next_batch, weighted
from moored.types import Message

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moored.engine.local.learner import LocalLearner  # noqa: E402
from moored.rollout.render import Renderer  # noqa: E402
from moored.training.losses import imitation  # noqa: E402

TWO_TURNS = (
    Message("system", "Copy."),
    Message("user", "Letter A."),
    Message("assistant", format_reply("Letter A.", "A")),
    Message("user", "Letter B."),
    Message("assistant", format_reply("Letter B.", "B")),
)


class Endless:
    """The same dialogues over and over."""

    num_held_out = 0

    def __init__(self, *dialogues):
        self.dialogues = dialogues

    def train(self, index):
        return self.dialogues[index % len(self.dialogues)]

    held_out = train

    def close(self):
        pass


@pytest.fixture(scope="module")
def renderer(tiny_folder):
    return Renderer(transformers.AutoTokenizer.from_pretrained(tiny_folder))


def make_learner(folder, **engine) -> LocalLearner:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = load_config({"optimizer": {"lr": 1e-3}, "engine": engine})
    return LocalLearner(model, config, loss=imitation)


def test_exactly_the_tokens_of_the_replies_are_learnt(renderer):
    (sample,) = encode(renderer, TWO_TURNS, 512)
    # <|im_start|> system \n Copy . <|im_end|> \n: 7; user with "Letter A.": 9; header: 3.
    assert len(sample.prompt.ids) == 7 + 9 + 3
    # <think> Letter _ A . </think> <answer> A </answer> <|im_end|>: 10; then \n, user, header.
    learnt = [True] * 10
    assert sample.loss_mask_T.tolist() == [*learnt, *[False] * (1 + 9 + 3), *learnt]
    text = renderer.tokenizer.decode(sample.ids_T[sample.loss_mask_T])
    assert text == "".join(m.text + "<|im_end|>" for m in TWO_TURNS if m.role == "assistant")
    whole = renderer.tokenizer.apply_chat_template(
        [message.to_dict() for message in TWO_TURNS], tokenize=False
    )
    ids = np.concatenate([sample.prompt.ids, sample.ids_T])
    assert renderer.tokenizer.decode(ids) + "\n" == whole


def test_the_loss_is_the_cross_entropy_of_the_reply_tokens(tiny_folder, renderer):
    learner = make_learner(tiny_folder)
    samples = [*encode(renderer, TWO_TURNS, 512), *encode(renderer, TWO_TURNS[:3], 512)]
    losses = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt.ids, sample.ids_T]))
        with torch.no_grad():
            logits = learner.model(input_ids=ids[None]).logits[0]
        start = len(sample.prompt.ids)
        found = torch.nn.functional.cross_entropy(
            logits[start - 1 : -1], ids[start:], reduction="none"
        )
        losses += found[torch.from_numpy(sample.loss_mask_T)].tolist()
    assert len(losses) == 30
    (stats,) = learner.step([weighted(samples)])
    assert stats["policy_loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("engine", [{"micro_batch_tokens": 16}, {"learner": "plain"}])
def test_packing_changes_neither_loss_nor_weights(tiny_folder, renderer, engine):
    samples = [*encode(renderer, TWO_TURNS, 512), *encode(renderer, TWO_TURNS[:3], 512)]
    results = []
    for options in ({}, engine):
        learner = make_learner(tiny_folder, **options)
        (stats,) = learner.step([weighted(samples)])
        results.append((stats["policy_loss"], dict(learner.weights())))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for name, weight in results[0][1].items():
        assert torch.allclose(weight, results[1][1][name], atol=2e-5), name


def test_a_template_that_rewrites_history_gives_a_sample_for_each_reply(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("qwen3"))
    samples = encode(renderer, TWO_TURNS, 4096)
    replies = [m.text for m in TWO_TURNS if m.role == "assistant"]
    assert [renderer.decode(s.ids_T) for s in samples] == replies
    assert all(s.loss_mask_T.all() for s in samples)
    shown = renderer.tokenizer.decode(samples[1].prompt.ids)
    assert "<think>" not in shown and "<answer>A</answer>" in shown


def test_a_long_dialogue_is_cut_after_the_last_reply_that_fits(renderer):
    whole = 19 + 10 + 13 + 10
    assert encode(renderer, TWO_TURNS, whole)[0].turn_ends_T.sum() == 2
    (cut,) = encode(renderer, TWO_TURNS, whole - 1)
    assert len(cut.ids_T) == 10
    assert encode(renderer, TWO_TURNS, 28) == []


def test_a_batch_takes_whole_dialogues_up_to_its_tokens_and_at_least_one(renderer):
    lessons = OwnLessons(Endless(TWO_TURNS[:3]), renderer, 512)  # 29 tokens
    take = {"max_context": 512}
    batch = next_batch(lessons, 4, batch_tokens=100, **take)
    assert (batch.num_dialogues, batch.next_index, batch.num_tokens) == (3, 7, 87)
    assert next_batch(lessons, 0, batch_tokens=58, **take).num_dialogues == 2
    assert next_batch(lessons, 0, batch_tokens=1, **take).num_dialogues == 1


def test_dialogues_that_are_too_long_are_counted_and_too_many_of_them_refused(renderer):
    source = Endless(TWO_TURNS, TWO_TURNS[:3])
    lessons = OwnLessons(source, renderer, 40)
    batch = next_batch(lessons, 0, batch_tokens=100, max_context=40)
    assert (batch.num_dialogues, batch.num_cut) == (3, 2)
    short = OwnLessons(source, renderer, 20)
    for limit, remedy in (
        (None, "20 tokens; raise it, or choose shorter dialogues"),
        (30, r"20 tokens; raise it \(to 30 at most\), or choose shorter dialogues"),
        (20, "20 tokens, the most that the model was made for; choose shorter dialogues"),
    ):
        said = f"not even the first reply of 100 dialogues in a row fits into .* = {remedy}"
        with pytest.raises(MooredError, match=said):
            next_batch(short, 0, batch_tokens=100, max_context=20, limit=limit)
