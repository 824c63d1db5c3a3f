"""Token streams against what the chat template itself writes, and spans against the text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.errors import MooredError
from moored.reply import format_reply, parse_reply
from moored.types import Content, ImagePart, Message, TextPart

pytest.importorskip("transformers")

from moored.rollout.encode import ChunkEncoder
from moored.rollout.render import Renderer, Spans
from tests.unit.rollout.kinds import KINDS

STABLE = (
    "chatml",
    "chatml_default_system",
    "llama3",
    "gemma",
    "mistral",
    "glm",
    "opens_think",
    "no_system",
)
REWRITING = ("qwen3", "mistral_nemo")
FIRST = [Message("system", "You push boxes."), Message("user", "Turn 1 of 5.")]
REPLY = "<think>The box is at (1, 2).</think><answer>Up || Left</answer>"


def encode(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def template_text(tokenizer, messages) -> str:
    chat = [message.to_dict() for message in messages]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def sampled(renderer: Renderer, reply: str, *, ended: bool) -> np.ndarray:
    """Ids a model might have written for `reply`, given what the template wrote already."""
    prompt = renderer.tokenizer.decode(renderer.start(FIRST).ids)
    written = reply.removeprefix("<think>") if str(prompt).endswith("<think>\n") else reply
    # Behind another token, as in a dialogue: the first word of a text may be spelled differently.
    other = renderer.tokenizer.convert_ids_to_tokens(renderer.stop_ids[0])
    ids = encode(renderer.tokenizer, f"{other}{written}")[1:]
    return np.append(ids, renderer.stop_ids[0]) if ended else ids


STYLES = (*STABLE, *REWRITING, "llama2")
NO_SYSTEM_ROLE = ("gemma", "mistral", "llama2", "no_system")


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("style", STYLES)
def test_prompt_is_what_the_tokenizer_makes_of_the_dialogue(toy_tokenizer, style, kind):
    tokenizer = toy_tokenizer.make_tokenizer(style, **KINDS[kind])
    history = [*FIRST, Message("assistant", REPLY), Message("user", "  Größe √2\n 🙂  ")]
    chat = [message.to_dict() for message in history]
    if style in NO_SYSTEM_ROLE:
        chat[:2] = [{"role": "user", "content": "You push boxes.\n\nTurn 1 of 5."}]
    expected = tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=True, add_generation_prompt=True
    )["input_ids"]
    assert Renderer(tokenizer).start(history).ids.tolist() == expected


def test_special_tokens_that_swallow_spaces_do_not_change_the_ids(toy_tokenizer):
    from tokenizers import AddedToken

    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", " <|end|> ")
    tokenizer.add_special_tokens(
        {"eos_token": AddedToken("<|end|>", lstrip=True, rstrip=True, special=True)}
    )
    expected = encode(tokenizer, template_text(tokenizer, FIRST))
    assert Renderer(tokenizer).start(FIRST).ids.tolist() == expected.tolist()


def test_hand_written_chatml_dialogue(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    start = renderer.start([Message("system", "S"), Message("user", "A")])
    ids = sampled(renderer, "B", ended=True)
    extended = renderer.extend(start, ids, "B", "C", []).ids
    assert renderer.tokenizer.decode(extended) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
        "B<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("style", STYLES)
def test_a_reply_that_is_spelled_out_decodes_to_itself(toy_tokenizer, style, kind):
    renderer = Renderer(toy_tokenizer.make_tokenizer(style, **KINDS[kind]))
    ids = renderer.reply_ids(REPLY)
    assert ids[-1] == renderer.stop_ids[0] and not set(ids[:-1]) & set(renderer.stop_ids)
    if style != "llama2":  # whose model writes a space before its reply
        assert np.array_equal(ids, sampled(renderer, REPLY, ended=True))
    written = renderer.decode(ids)
    assert parse_reply(written) == parse_reply(REPLY)
    assert written.split() == REPLY.split() or style == "opens_think"


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize("style", STABLE)
def test_appending_two_turns_gives_the_text_of_the_whole_dialogue(
    toy_tokenizer, style, sentencepiece
):
    tokenizer = toy_tokenizer.make_tokenizer(style, sentencepiece=sentencepiece)
    renderer = Renderer(tokenizer)
    assert renderer.is_prefix_stable
    for ended in (True, False):
        stream, history = renderer.start(FIRST), list(FIRST)
        for observation in ("Turn 2 of 5.", "Turn 3 of 5."):
            ids = sampled(renderer, REPLY, ended=ended)
            reply = renderer.decode(ids)
            longer = renderer.extend(stream, ids, reply, observation, history)
            assert longer.ids[: len(stream.ids) + len(ids)].tolist() == [*stream.ids, *ids]
            stream = longer
            history += [Message("assistant", reply), Message("user", observation)]
        # A dialogue rendered at once takes the other path through the renderer: `start` alone.
        assert stream.ids.tolist() == renderer.start(history).ids.tolist()
        if style in ("chatml", "chatml_default_system", "llama3", "glm", "opens_think"):
            whole = template_text(tokenizer, history)
            assert tokenizer.decode(stream.ids) == tokenizer.decode(encode(tokenizer, whole))


def test_white_space_before_a_reply_is_the_models_to_write(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("llama2"))
    assert renderer.is_prefix_stable
    start, ids = renderer.start(FIRST), sampled(renderer, " Up", ended=True)
    extended = renderer.extend(start, ids, renderer.decode(ids), "Next.", FIRST).ids
    assert renderer.tokenizer.decode(extended) == (
        "<s>[INST] You push boxes.\n\nTurn 1 of 5. [/INST] Up</s><s>[INST] Next. [/INST]"
    )
    extended = renderer.extend(start, ids[:-1], renderer.decode(ids), "Next.", FIRST).ids
    assert " [/INST] Up </s><s>[INST] Next. [/INST]" in renderer.tokenizer.decode(extended)


def test_end_of_turn_is_supplied_after_a_cut_reply_and_never_doubled(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("llama3"))
    eot = renderer.stop_ids[0]
    assert renderer.tokenizer.convert_ids_to_tokens(eot) == "<|eot_id|>"
    start = renderer.start(FIRST)
    cut, whole = sampled(renderer, "Up", ended=False), sampled(renderer, "Up", ended=True)
    after_cut = renderer.extend(start, cut, "Up", "Next.", FIRST).ids
    after_whole = renderer.extend(start, whole, "Up", "Next.", FIRST).ids
    assert after_cut.tolist() == after_whole.tolist()
    # system, user, reply, user: four ends of turn.
    assert np.count_nonzero(after_cut == eot) == 4


def test_a_reply_that_ends_the_text_keeps_its_token_and_gets_the_end_of_turn(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    end_of_turn, end_of_text = renderer.stop_ids
    ids = np.append(sampled(renderer, "Up", ended=False), end_of_text)
    start = renderer.start(FIRST)
    extended = renderer.extend(start, ids, "Up", "Next.", FIRST).ids
    assert extended[len(start.ids) + len(ids) - 1 :][:2].tolist() == [end_of_text, end_of_turn]


def test_sampled_ids_are_kept_where_encoding_the_reply_would_give_others(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    letters = np.concatenate([encode(renderer.tokenizer, letter) for letter in "answer"])
    assert len(encode(renderer.tokenizer, "answer")) < len(letters)
    start = renderer.start(FIRST)
    extended = renderer.extend(start, letters, "answer", "Next.", FIRST).ids
    assert extended[len(start.ids) : len(start.ids) + 6].tolist() == letters.tolist()


@pytest.mark.parametrize("style", REWRITING)
def test_template_that_rewrites_history_is_detected_and_renders_anew(toy_tokenizer, style):
    tokenizer = toy_tokenizer.make_tokenizer(style)
    renderer = Renderer(tokenizer)
    assert not renderer.is_prefix_stable
    start, ids = renderer.start(FIRST), sampled(renderer, REPLY, ended=True)
    extended = renderer.extend(start, ids, REPLY, "Turn 2.", FIRST).ids
    history = [*FIRST, Message("assistant", REPLY), Message("user", "Turn 2.")]
    assert tokenizer.decode(extended) == template_text(tokenizer, history)
    stream = [*start.ids, *ids]
    assert extended[: len(stream)].tolist() != stream


def test_earlier_reasoning_is_gone_from_a_template_that_strips_it(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("qwen3"))
    start, ids = renderer.start(FIRST), sampled(renderer, REPLY, ended=True)
    extended = renderer.extend(start, ids, REPLY, "Turn 2.", FIRST).ids
    text = renderer.tokenizer.decode(extended)
    assert "The box is at" not in text
    assert "<answer>Up || Left</answer>" in text


@pytest.mark.parametrize(
    ("style", "tokens"),
    [
        ("chatml", ["<|im_end|>", "<|endoftext|>"]),
        ("llama3", ["<|eot_id|>", "<|end_of_text|>"]),
        ("gemma", ["<end_of_turn>", "<eos>"]),
        ("mistral", ["</s>"]),
        ("glm", ["<|user|>", "<|endoftext|>"]),
        ("qwen3", ["<|im_end|>", "<|endoftext|>"]),
    ],
)
def test_stop_ids_are_the_templates_end_of_turn_and_the_end_of_text(toy_tokenizer, style, tokens):
    tokenizer = toy_tokenizer.make_tokenizer(style)
    assert tokenizer.convert_ids_to_tokens(list(Renderer(tokenizer).stop_ids)) == tokens


@pytest.mark.parametrize("style", NO_SYSTEM_ROLE)
def test_system_text_goes_into_the_first_user_message_where_there_is_no_system_role(
    toy_tokenizer, style
):
    renderer = Renderer(toy_tokenizer.make_tokenizer(style))
    text = renderer.tokenizer.decode(renderer.start(FIRST).ids)
    assert text.count("You push boxes.\n\nTurn 1 of 5.") == 1


def test_a_dialogue_that_the_template_refuses_is_told_with_its_roles(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("mistral"))
    dialogue = [Message("system", "Walk."), Message("user", "Here."), Message("user", "Now.")]
    with pytest.raises(MooredError, match=r"system, user, user \(roles must alternate"):
        renderer.start(dialogue)


def test_special_tokens_that_the_model_names_end_a_reply_too(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    usual = Renderer(tokenizer).stop_ids
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    call = tokenizer.convert_tokens_to_ids("<|call|>")
    word = tokenizer.encode("a", add_special_tokens=False)[0]
    # `word` is what transformers puts there for a configuration that names none.
    renderer = Renderer(tokenizer, eos_ids=[usual[0], word, call])
    assert renderer.stop_ids == (*usual, call)
    assert renderer.decode(np.array([word, call])) == "a"


@pytest.mark.parametrize(
    ("form", "shown"),
    [("%d %b %Y", "26 Jul 2024"), ("%d %B %Y", "26 July 2024"), ("%Y-%m-%d", "2024-07-26")],
)
def test_a_template_that_writes_the_date_writes_the_same_every_day(toy_tokenizer, form, shown):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    own = tokenizer.chat_template
    # As Llama 3.2 asks for it.
    tokenizer.chat_template = (
        "{%- if not date_string is defined and strftime_now is defined %}"
        f"{{%- set date_string = strftime_now('{form}') %}}"
        f"{{%- endif -%}}{{{{ date_string }}}}{own}"
    )
    text = tokenizer.decode(Renderer(tokenizer).start(FIRST).ids)
    assert text.startswith(f"{shown}<|im_start|>")
    told = Renderer(tokenizer, template_options={"date_string": "Today"})
    assert tokenizer.decode(told.start(FIRST).ids).startswith("Today<|im_start|>")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        # In a macro as gpt-oss has it, as a number, and with directives that are rarer.
        (
            "{%- macro a() %}{{ 'Date: ' + strftime_now('%Y-%m-%d') }}{% endmacro %}{{ a() }}",
            "Date: 2024-07-26",
        ),
        ("{{ strftime_now('%d') | int - 1 }}", "25"),
        ("{{ strftime_now('%A, %-m/%e/%y, day %j, %I:%M %p, 100 %%') }}", None),
    ],
)
def test_the_date_is_fixed_however_a_template_asks_for_it(toy_tokenizer, asked, shown):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = asked + tokenizer.chat_template
    text = tokenizer.decode(Renderer(tokenizer).start(FIRST).ids)
    assert text.startswith((shown or "Friday, 7/26/24, day 208, 12:00 AM, 100 %") + "<|im_start|>")


@pytest.mark.parametrize(
    "beginning", ["\n", "  ", "\n\n  {% set a = 1 %}\n", " \n{{- '' }}", "Go. "]
)
def test_a_template_that_may_write_the_date_says_everything_else_as_before(
    toy_tokenizer, beginning
):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = f"{beginning}{tokenizer.chat_template.lstrip()}"
    own = Renderer(tokenizer).start(FIRST).ids
    tokenizer.chat_template += "{# strftime_now #}"
    assert Renderer(tokenizer).start(FIRST).ids.tolist() == own.tolist()


def test_of_several_templates_the_one_called_default_is_used_and_has_to_be_there(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    own = tokenizer.chat_template
    expected = Renderer(tokenizer).start(FIRST).ids
    tokenizer.chat_template = {"rag": "Read.", "default": own}
    assert Renderer(tokenizer).start(FIRST).ids.tolist() == expected.tolist()
    tokenizer.chat_template = {"tool_use": own, "rag": own}
    with pytest.raises(MooredError, match=r"several chat templates \(rag, tool_use\), and none"):
        Renderer(tokenizer)


def test_template_options_reach_the_template(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = "{{ greeting }}" + tokenizer.chat_template
    renderer = Renderer(tokenizer, template_options={"greeting": "Hello. "})
    assert tokenizer.decode(renderer.start(FIRST).ids).startswith("Hello. <|im_start|>system")


def test_text_parts_are_joined_and_images_refused(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    parts: Content = [TextPart(type="text", text="Turn 1"), TextPart(type="text", text=" of 5.")]
    as_parts = renderer.start([FIRST[0], Message("user", parts)])
    assert as_parts.ids.tolist() == renderer.start(FIRST).ids.tolist()
    picture: Content = [ImagePart(type="image", image=object())]
    with pytest.raises(MooredError, match="image"):
        renderer.start([Message("user", picture)])
    with pytest.raises(MooredError, match="image"):
        renderer.extend(as_parts, as_parts.ids[:1], "", picture, FIRST)


def test_ids_that_the_model_has_no_embedding_for_are_refused(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    largest = max(tokenizer.get_vocab().values())
    Renderer(tokenizer, vocabulary=largest + 1)
    message = f"has ids up to {largest}, but the model has embeddings for {largest} ids only"
    with pytest.raises(MooredError, match=message):
        Renderer(tokenizer, vocabulary=largest)


def test_a_special_token_that_no_text_becomes_needs_no_embedding(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    rows = 1 + max(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id == rows
    Renderer(tokenizer, vocabulary=rows)
    tokenizer.chat_template = f"<pad>{tokenizer.chat_template}"
    with pytest.raises(MooredError, match=rf"resize_token_embeddings\({rows + 1}\)"):
        Renderer(tokenizer, vocabulary=rows)


def test_a_tag_of_replies_is_text_though_it_is_a_special_token(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    rows = 1 + max(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    with pytest.raises(MooredError, match=f"embeddings for {rows} ids only"):
        Renderer(tokenizer, vocabulary=rows)


def test_tokenizer_without_chat_template_is_refused(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(MooredError, match="no chat template"):
        Renderer(tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('one message only') if messages | length > 1 }}x", "one message only"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
    ],
)
def test_template_without_turns_is_refused_at_construction(toy_tokenizer, template, message):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.chat_template = template
    with pytest.raises(MooredError, match=message):
        Renderer(tokenizer)


def test_tokenizer_that_cannot_end_a_reply_is_refused(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(MooredError, match="eos_token"):
        Renderer(tokenizer)


@pytest.mark.parametrize("tag_tokens", [False, True])
def test_decode_drops_the_stop_token_and_keeps_the_tags(toy_tokenizer, tag_tokens):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml", tag_tokens=tag_tokens))
    ids = sampled(renderer, REPLY, ended=True)
    assert (renderer.stop_ids[0] in ids) and renderer.decode(ids) == REPLY
    assert renderer.decode(ids[:-1]) == REPLY
    assert renderer.decode(ids[:0]) == ""


def test_tag_the_template_writes_itself_is_put_back(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("opens_think"))
    ids = encode(renderer.tokenizer, "one</think><answer>Up</answer>")
    text = renderer.decode(ids)
    assert text == "<think>\none</think><answer>Up</answer>"
    spans = renderer.spans(ids, text)
    assert spans.think is not None and spans.answer is not None
    assert spans.think[0] == 0
    assert renderer.tokenizer.decode(ids[slice(*spans.think)]) == "one"
    assert renderer.tokenizer.decode(ids[slice(*spans.answer)]) == "Up"


def test_spans_of_single_token_tags_are_the_tokens_between_them(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml", tag_tokens=True)
    renderer = Renderer(tokenizer)
    tags = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<answer>", "</answer>"])
    one, two = encode(tokenizer, "one").tolist(), encode(tokenizer, "Up").tolist()
    ids = np.array([tags[0], *one, tags[1], tags[2], *two, tags[3], renderer.stop_ids[0]])
    spans = renderer.spans(ids, renderer.decode(ids))
    begin = 1 + len(one) + 2
    assert spans == Spans((1, 1 + len(one)), (begin, begin + len(two)))


def test_empty_parts_have_empty_spans(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml", tag_tokens=True)
    ids = np.array(tokenizer.convert_tokens_to_ids(list(toy_tokenizer.TAGS)))
    renderer = Renderer(tokenizer)
    assert renderer.spans(ids, renderer.decode(ids)) == Spans((1, 1), (3, 3))


@pytest.mark.parametrize(
    "reply",
    [
        "no tags",
        "<think>a</think>",
        "<answer>a</answer><think>b</think>",
        "<think>a<think></think><answer>b</answer>",
        "<think>a</think>between<answer>b</answer>",
        "",
    ],
)
def test_malformed_replies_have_no_spans(toy_tokenizer, reply):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    assert renderer.spans(encode(renderer.tokenizer, reply), reply) == Spans(None, None)


def test_token_across_a_tag_border_belongs_to_the_tag(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml", fused=True)
    tokenizer.add_tokens([">x", "y</"])
    renderer = Renderer(tokenizer)
    ids = encode(tokenizer, "<think>xzy</think><answer>Up</answer>")
    spans = renderer.spans(ids, renderer.decode(ids))
    assert spans.think is not None
    assert tokenizer.decode(ids[slice(*spans.think)]) == "z"
    # One token holds the end of one tag and the beginning of the next: nothing is left.
    tokenizer.add_tokens(["></thi"])
    renderer = Renderer(tokenizer)
    ids = encode(tokenizer, "<think></think><answer>Up</answer>")
    think = renderer.spans(ids, renderer.decode(ids)).think
    assert think is not None and think[0] == think[1]


@pytest.mark.parametrize("kind", list(KINDS))
def test_spans_of_known_tokens_decode_nothing(toy_tokenizer, monkeypatch, kind):
    renderer = Renderer(toy_tokenizer.make_tokenizer(**KINDS[kind]))
    ids = encode(renderer.tokenizer, "<think>Größe √2 推 🙂</think><answer>Up</answer>")
    text = renderer.decode(ids)
    first = renderer.spans(ids, text)
    monkeypatch.setattr(renderer._decoder, "_tokenizer", None)
    assert renderer.spans(ids, text) == first


def test_spans_are_right_when_tokens_change_each_others_text(toy_tokenizer):
    from tokenizers import decoders

    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    core = tokenizer.backend_tokenizer
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("z w", "zw")])
    renderer = Renderer(tokenizer)
    ids = encode(tokenizer, "<think>z w q</think><answer>Up</answer>")
    text = renderer.decode(ids)
    assert text == "<think>zw q</think><answer>Up</answer>"
    spans = renderer.spans(ids, text)
    assert spans.think is not None and spans.answer is not None
    assert tokenizer.decode(ids[slice(*spans.think)]) == "zw q"
    assert tokenizer.decode(ids[slice(*spans.answer)]) == "Up"


INNER = st.text(alphabet=st.sampled_from("ab c\n<>/UpLeft|√推🙂éß▁\ufffdthinkanswer"), max_size=24)
OUTSIDE = st.sampled_from(["", " ", "\n", "so: ", "é", "🙂 "])


@pytest.fixture(scope="module")
def renderers(toy_tokenizer) -> dict[str, Renderer]:
    return {kind: Renderer(toy_tokenizer.make_tokenizer(**KINDS[kind])) for kind in KINDS}


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_span_text_is_inner_text_without_anything_of_the_tags(renderers, kind, data):
    renderer = renderers[kind]
    think, answer, before, after = (data.draw(s) for s in (INNER, INNER, OUTSIDE, OUTSIDE))
    gap = data.draw(st.sampled_from(["", "\n", "  "]))
    reply = f"{before}<think>{think}</think>{gap}<answer>{answer}</answer>{after}"
    # Cut anywhere and encoded in two parts: a model is free to write unusual tokens.
    cut = data.draw(st.integers(0, len(reply)))
    parts = [encode(renderer.tokenizer, part) for part in (reply[:cut], reply[cut:])]
    ids = np.concatenate(parts)
    text = renderer.decode(ids)
    spans = renderer.spans(ids, text)
    parsed = parse_reply(text)
    assert (spans.think is not None) == parsed.is_valid == (spans.answer is not None)
    if spans.think is None or spans.answer is None:
        return
    inside = text.partition("<think>")[2].partition("</think>")[0]
    answered = text.partition("<answer>")[2].partition("</answer>")[0]
    for (start, stop), inner, tags in (
        (spans.think, inside, ("<think>", "</think>")),
        (spans.answer, answered, ("<answer>", "</answer>")),
    ):
        head, tail = renderer.decode(ids[:start]), renderer.decode(ids[:stop])
        assert text.startswith(tail) and tail.startswith(head)
        assert tail.removeprefix(head) in inner
        assert tags[0] in head and tags[1] not in tail
        # One token more on either side would reach into a tag.
        assert tags[0] not in renderer.decode(ids[: start - 1])
        assert len(renderer.decode(ids[: stop + 1])) > text.index(tags[1])
    assert spans.think[1] <= spans.answer[0]


@settings(max_examples=60, deadline=None)
@given(think=INNER, answer=INNER)
def test_spans_cover_the_whole_inner_text_when_tags_are_single_tokens(renderers, think, answer):
    renderer = renderers["tag_tokens"]
    text = format_reply(think, answer)
    if not parse_reply(text).is_valid:
        return
    ids = encode(renderer.tokenizer, text)
    spans = renderer.spans(ids, text)
    assert spans.think is not None and spans.answer is not None
    assert renderer.tokenizer.decode(ids[slice(*spans.think)]) == think
    assert renderer.tokenizer.decode(ids[slice(*spans.answer)]) == answer


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spans_survive_bytes_that_are_no_text(renderers, data):
    renderer = renderers["fused"]
    vocabulary = [i for i in range(len(renderer.tokenizer)) if i not in renderer.stop_ids]
    noise = st.lists(st.sampled_from(vocabulary), max_size=6)
    pieces = []
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        pieces += [encode(renderer.tokenizer, tag), np.array(data.draw(noise), dtype=np.int64)]
    ids = np.concatenate(pieces)
    text = renderer.decode(ids)
    spans = renderer.spans(ids, text)
    assert (spans.answer is not None) == parse_reply(text).is_valid
    if spans.answer is not None:
        start, stop = spans.answer
        assert "<answer>" in renderer.decode(ids[:start])
        assert "</answer>" not in renderer.decode(ids[:stop])


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("style", STYLES)
def test_a_prompt_is_its_history_and_the_newest_observation(toy_tokenizer, style, kind):
    """Cut there, the history of one dialogue goes with the observation of another."""
    renderer = Renderer(toy_tokenizer.make_tokenizer(style, **KINDS[kind]))
    prompts, starts = [], []
    for observation in ("Turn 2 of 5.\n##_P", "\n 🙂 moved"):
        history = list(FIRST)
        prompt = renderer.start(history)
        assert renderer.observation_start(prompt, history) is not None
        ids = sampled(renderer, REPLY, ended=True)
        reply = renderer.decode(ids)
        prompt = renderer.extend(prompt, ids, reply, observation, history)
        history += [Message("assistant", reply), Message("user", observation)]
        prompts.append(prompt.ids)
        starts.append(renderer.observation_start(prompt, history))
    assert None not in starts
    assert prompts[0][: starts[0]].tolist() == prompts[1][: starts[1]].tolist()
    crossed = [*prompts[0][: starts[0]], *prompts[1][starts[1] :]]
    assert crossed == prompts[1].tolist()
    shown = renderer.tokenizer.decode(prompts[0][starts[0] :])
    assert "Turn 2 of 5." in shown and "The box" not in shown


def test_the_observation_of_a_first_prompt_is_the_user_message(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    prompt = renderer.start(FIRST)
    start = renderer.observation_start(prompt, FIRST)
    assert renderer.tokenizer.decode(prompt.ids[start:]) == (
        "<|im_start|>user\nTurn 1 of 5.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_observation_is_found_after_a_reply_that_was_cut_off(toy_tokenizer):
    for style in STABLE:
        renderer = Renderer(toy_tokenizer.make_tokenizer(style))
        start, ids = renderer.start(FIRST), sampled(renderer, REPLY, ended=False)
        reply = renderer.decode(ids)
        prompt = renderer.extend(start, ids, reply, "Next.", FIRST)
        dialogue = [*FIRST, Message("assistant", reply), Message("user", "Next.")]
        at = renderer.observation_start(prompt, dialogue)
        assert at is not None and at >= len(start.ids) + len(ids)
        assert "Next." in renderer.tokenizer.decode(prompt.ids[at:])


def test_a_prompt_of_another_dialogue_has_no_observation_here(toy_tokenizer):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    other = [Message("user", "Something else.")]
    assert renderer.observation_start(renderer.start(FIRST), other) is None


def test_observations_that_are_expected_are_encoded_once_and_together(toy_tokenizer, monkeypatch):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    encode, batches = ChunkEncoder.encode_chunks, []

    def noted(encoder: ChunkEncoder, chunks: Iterable[str]) -> list[np.ndarray]:
        batches.append(list(chunks))
        return encode(encoder, batches[-1])

    monkeypatch.setattr(ChunkEncoder, "encode_chunks", noted)
    renderer.expect(["Next.", "Then.", "Next."])
    end, header = "<|im_end|>\n", "<|im_start|>assistant\n"
    each = ([end, f"<|im_start|>user\n{text}", end, header] for text in ("Next.", "Then."))
    assert batches == [[chunk for chunks in each for chunk in chunks]]


def test_an_observation_that_was_expected_is_neither_cut_nor_encoded_again(
    toy_tokenizer, monkeypatch
):
    renderer = Renderer(toy_tokenizer.make_tokenizer("chatml"))
    start, ids = renderer.start(FIRST), sampled(renderer, REPLY, ended=True)
    reply = renderer.decode(ids)
    renderer.expect(["Next.", "Then."])
    monkeypatch.setattr(ChunkEncoder, "chunks", None)
    monkeypatch.setattr(ChunkEncoder, "encode_chunks", None)
    for observation in ("Next.", "Then."):
        prompt = renderer.extend(start, ids, reply, observation, FIRST)
        dialogue = [*FIRST, Message("assistant", reply), Message("user", observation)]
        at = renderer.observation_start(prompt, dialogue)
        shown = renderer.tokenizer.decode(prompt.ids[at:])
        assert f"<|im_start|>user\n{observation}" in shown and "boxes" not in shown
