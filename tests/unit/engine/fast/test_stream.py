"""Continuous batching: the same replies as in lockstep, in whatever order requests arrive.

On a CPU the stream runs the plain operations; the same tests run on a GPU where there is one.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from moored.engine.base import Request, SamplingParams, write_all, write_replies
from moored.engine.fast import stream as slot_stream
from moored.engine.fast.capture import Fetch
from moored.engine.fast.sampler import SlotSampler
from moored.engine.fast.slots import Slots
from moored.errors import MooredError
from moored.types import Completion, FinishReason, Prompt
from tests.tiny_model import tiny_model

VOCABULARY = 64
STOPS = (1, 2)
PARAMS = SamplingParams(max_tokens=20, stop_ids=STOPS)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    made = tiny_model(hidden_size=64, intermediate_size=96)
    with torch.no_grad():  # far from a fresh model, so that mistakes show
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08).mul_(2.0)
    return made.eval().to(request.param)


def make_sampler(model, streams: bool = True, max_context: int = 256) -> SlotSampler:
    return SlotSampler(model, dtype=torch.float32, max_context=max_context, streams=streams)


def first_prompts(num: int) -> list[Prompt]:
    """A shared prompt, and several of their own."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, VOCABULARY, size=9)
    own = [rng.integers(3, VOCABULARY, size=5 + i) for i in range(num)]
    return [Prompt(own[i] if i % 4 == 1 else shared) for i in range(num)]


def next_prompt(request: Request, completion: Completion) -> Prompt:
    """A few tokens of an observation that depends on nothing but the session and the turn."""
    seed = [request.session, len(request.prompt.ids)]
    seen = np.random.default_rng(seed).integers(3, VOCABULARY, size=1 + seed[1] % 5)
    return Prompt(np.concatenate([request.prompt.ids, completion.token_ids, seen]))


def in_lockstep(sampler, num: int, turns: int, params=PARAMS) -> dict[tuple[int, int], Completion]:
    """(session, turn) -> reply, all sessions together."""
    prompts, found = dict(enumerate(first_prompts(num))), {}
    for turn in range(turns):
        requests = [Request(session=s, prompt=p, seed=100 * turn + s) for s, p in prompts.items()]
        for request, completion in zip(requests, sampler.generate(requests, params), strict=True):
            found[request.session, turn] = completion
            prompts[request.session] = next_prompt(request, completion)
    return found


def as_stream(sampler, num: int, turns: int, params=PARAMS, held_back=()):
    """The same over a stream: a session goes on at once; `held_back` ones begin one by one."""
    stream = sampler.stream(params)
    requests = {s: Request(session=s, prompt=p, seed=s) for s, p in enumerate(first_prompts(num))}
    turn_of, found, late = dict.fromkeys(requests, 0), {}, list(held_back)
    for session, request in requests.items():
        if session not in late:
            stream.submit(request)
    while len(found) < num * turns:
        if late:
            stream.submit(requests[late.pop()])
        for session, completion in stream.poll():
            turn = turn_of[session]
            found[session, turn] = completion
            turn_of[session] = turn + 1
            if turn + 1 < turns:
                prompt = next_prompt(requests[session], completion)
                requests[session] = Request(
                    session=session, prompt=prompt, seed=100 * (turn + 1) + session
                )
                stream.submit(requests[session])
            else:
                stream.end([session])
    assert stream.poll() == []
    stream.close()
    return found


def assert_same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for key, reply in ours.items():
        np.testing.assert_array_equal(reply.token_ids, theirs[key].token_ids)
        np.testing.assert_allclose(reply.logprobs, theirs[key].logprobs, rtol=1e-5, atol=1e-5)
        assert reply.finish_reason is theirs[key].finish_reason


@pytest.mark.parametrize("held_back", [(), (3, 7, 1, 11, 0), tuple(range(12))], ids=len)
def test_replies_equal_those_in_lockstep_in_any_order_of_arrival(model, held_back):
    expected = in_lockstep(make_sampler(model), 12, turns=3)
    assert len({len(reply.token_ids) for reply in expected.values()}) > 3
    assert_same(as_stream(make_sampler(model), 12, 3, held_back=held_back), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_temperature_is_that_of_the_stream(model, temperature):
    params = SamplingParams(max_tokens=20, temperature=temperature, stop_ids=STOPS)
    expected = in_lockstep(make_sampler(model), 6, 2, params)
    sampler = make_sampler(model)
    as_stream(sampler, 6, 2)
    assert_same(as_stream(sampler, 6, 2, params), expected)


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9, 10])
def test_a_reply_ends_after_max_tokens(model, max_tokens):
    params = SamplingParams(max_tokens=max_tokens)
    found = as_stream(make_sampler(model), 5, 2, params)
    assert {len(reply.token_ids) for reply in found.values()} == {max_tokens}
    assert {reply.finish_reason for reply in found.values()} == {FinishReason.LENGTH}
    assert_same(found, in_lockstep(make_sampler(model), 5, 2, params))


def test_more_requests_than_slots_wait_for_their_turn(model, monkeypatch):
    expected = in_lockstep(make_sampler(model), 12, turns=3)
    sampler = make_sampler(model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 5)
    assert_same(as_stream(sampler, 12, 3), expected)
    assert sampler.slots.num_rows == 5


def test_no_dialogue_is_computed_again_where_others_wait_for_slots(model, monkeypatch):
    sampler = make_sampler(model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 5)
    entered, enter = [], slot_stream.SlotStream._enter

    def note(self, jobs, members):
        entered.extend(len(job.ids) for job in jobs)
        enter(self, jobs, members)

    monkeypatch.setattr(slot_stream.SlotStream, "_enter", note)
    as_stream(sampler, 12, 3)
    # First prompts have 5 to 16 tokens; of later turns only what is new is computed.
    assert len(entered) <= 3 * 12 and max(entered) <= 16


def test_new_sessions_get_the_slots_of_waiting_ones_when_nothing_else_is_written(
    model, monkeypatch
):
    expected = in_lockstep(make_sampler(model), 4, turns=1)
    sampler = make_sampler(model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 2)
    stream = sampler.stream(PARAMS)
    for session, prompt in enumerate(first_prompts(4)):
        stream.submit(Request(session=session, prompt=prompt, seed=session))
    found = {}
    while len(found) < 4:  # the environments of the first two never answer
        found |= {(session, 0): reply for session, reply in stream.poll()}
    assert_same(found, expected)
    assert sorted(sampler.slots.sessions) == [2, 3]


def test_sessions_keep_their_slots_while_their_environments_take_a_moment(model, monkeypatch):
    sampler = make_sampler(model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 2)
    stream = sampler.stream(PARAMS)
    for session, prompt in enumerate(first_prompts(3)):
        stream.submit(Request(session=session, prompt=prompt, seed=session))
    found = []
    while len(found) < 2:
        found += stream.poll(wait_s=0.0)
    for _ in range(3):
        assert stream.poll(wait_s=0.0) == []
    assert sorted(sampler.slots.sessions) == [0, 1]
    monkeypatch.setattr(slot_stream, "PATIENCE_S", 0.0)
    while len(found) < 3:
        found += stream.poll(wait_s=0.0)
    assert 2 in sampler.slots.sessions
    stream.close()


def test_patience_begins_anew_with_every_wait(model, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(slot_stream.time, "monotonic", lambda: now_s[0])
    sampler = make_sampler(model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 2)
    stream = sampler.stream(PARAMS)
    prompts = first_prompts(6)

    def replies(num: int) -> set[int]:
        found: set[int] = set()
        while len(found) < num:
            found |= {session for session, _ in stream.poll(wait_s=0.0)}
        return found

    def submit(*sessions: int) -> None:
        for session in sessions:
            stream.submit(Request(session=session, prompt=prompts[session], seed=session))

    submit(0, 1, 2, 3)
    assert replies(2) == {0, 1} and stream.poll(wait_s=0.0) == []
    now_s[0] += slot_stream.PATIENCE_S
    assert replies(2) == {2, 3}
    now_s[0] += 60.0  # nothing waits meanwhile
    submit(4, 5)
    assert stream.poll(wait_s=0.0) == [] and sorted(sampler.slots.sessions) == [2, 3]
    now_s[0] += slot_stream.PATIENCE_S
    assert replies(2) == {4, 5}
    stream.close()


def test_a_session_that_comes_back_with_another_prompt_does_not_wait_for_the_others(model):
    sampler = make_sampler(model)
    stream = sampler.stream(SamplingParams(max_tokens=120, stop_ids=STOPS))
    for session, prompt in enumerate(first_prompts(8)):
        stream.submit(Request(session=session, prompt=prompt, seed=session))
    (session, _), *others = stream.poll()
    assert sampler.slots.num_rows == 8 and len(others) < 7
    stream.submit(Request(session=session, prompt=Prompt(np.arange(30, 40)), seed=1))
    stream.poll(wait_s=0.0)
    assert sampler.slots.sessions[session].is_writing
    stream.close()


def test_a_batch_that_waits_for_slots_goes_on_as_rows_end(model, monkeypatch):
    steps = []
    # Chunks of a GPU would be as long as the host makes it wait.
    monkeypatch.setattr(slot_stream.SlotStream, "_adapt", lambda *_, **__: None)

    def count(sampler):
        monkeypatch.setattr(sampler, "_max_rows", lambda *_: 2)
        advance = sampler.advance
        steps.append(0)

        def counted(num_rows, num_steps):
            steps[-1] += num_steps
            advance(num_rows, num_steps)

        monkeypatch.setattr(sampler, "advance", counted)
        return sampler

    requests = [Request(session=s, prompt=p, seed=s) for s, p in enumerate(first_prompts(12))]
    stream = slot_stream.SlotStream(count(make_sampler(model)), PARAMS, come_back=False)
    kept = write_all(stream, requests)
    ended = write_replies(count(make_sampler(model)), requests, PARAMS)
    assert_same(dict(enumerate(kept)), dict(enumerate(ended)))
    assert steps[0] == steps[1]


def test_a_session_cannot_end_before_its_reply(model):
    stream = make_sampler(model).stream(PARAMS)
    stream.submit(Request(session=0, prompt=first_prompts(1)[0], seed=0))
    with pytest.raises(MooredError, match="cannot end"):
        stream.end([0])
    stream.close()


def test_the_slot_of_an_ended_session_is_free(model):
    sampler = make_sampler(model)
    stream = sampler.stream(PARAMS)
    for session, prompt in enumerate(first_prompts(2)):
        stream.submit(Request(session=session, prompt=prompt, seed=session))
    found = []
    while len(found) < 2:
        found += stream.poll()
    stream.end([0])
    assert list(sampler.slots.sessions) == [1]
    stream.close()
    assert not sampler.slots.sessions


LENGTHS_OF_CHUNKS = [(1, 1), (3, 3), (8, 8), (11, 11), (32, 32), (2, 32)]
"""Fewest and most decoding steps; a graph has 8 of them, or one."""


@pytest.mark.parametrize("num_steps", LENGTHS_OF_CHUNKS, ids=str)
def test_replies_do_not_depend_on_the_length_of_chunks(model, monkeypatch, num_steps):
    params = SamplingParams(max_tokens=45, stop_ids=STOPS)
    expected = in_lockstep(make_sampler(model), 12, 3, params)
    assert max(len(reply.token_ids) for reply in expected.values()) > 33
    monkeypatch.setattr(slot_stream, "FEWEST_STEPS", num_steps[0])
    monkeypatch.setattr(slot_stream, "MOST_STEPS", num_steps[1])
    assert_same(as_stream(make_sampler(model), 12, 3, params, held_back=(3, 7, 1)), expected)


def test_chunks_are_longer_while_the_device_is_done_before_the_host_asks(model, monkeypatch):
    was_done = iter([True] * 3 + [False] * 4 + [True] * 3)
    monkeypatch.setattr(Fetch, "is_done", property(lambda _: next(was_done)))
    sampler, launched = make_sampler(model), []
    stream = sampler.stream(SamplingParams(max_tokens=140))
    stream.submit(Request(session=0, prompt=first_prompts(1)[0], seed=0))
    monkeypatch.setattr(
        sampler,
        "advance",
        lambda num_rows, num_steps, advance=sampler.advance: (
            launched.append(num_steps),
            advance(num_rows, num_steps),
        ),
    )
    ((_, reply),) = stream.poll()
    # Two chunks are under way before the first answer. The first token comes without a step.
    assert launched == [8, 8, 16, 32, 32, 16, 8, 8, 8, 3]
    assert len(reply.token_ids) == 140 == 1 + sum(launched)


@pytest.mark.parametrize(
    ("before", "was_done", "waited_s", "after"),
    [
        (8, True, 0.0, 16),
        (32, True, 0.0, 32),
        (2, True, 0.0, 4),
        (16, False, 1.0, 8),
        (8, False, 0.021, 4),
        (8, False, 0.019, 8),
        (2, False, 0.021, 1),
        (1, False, 1.0, 1),
        (1, False, 0.005, 1),
        (1, False, 0.003, 2),
        (4, False, 0.003, 8),
        (8, False, 0.003, 8),
    ],
)
def test_chunks_have_few_steps_only_while_these_take_long(before, was_done, waited_s, after):
    stream = slot_stream.SlotStream(make_sampler(tiny_model()), PARAMS)
    stream._num_steps = before
    stream._adapt(was_done=was_done, waited_s=waited_s)
    assert stream._num_steps == after


def test_replies_come_with_the_copy_that_says_which_rows_ended(model, monkeypatch):
    sampler, fetched = make_sampler(model), []
    fetch = sampler.fetch
    monkeypatch.setattr(sampler, "fetch", lambda *given: (fetched.append(given), fetch(*given))[1])
    monkeypatch.setattr(slot_stream, "MOST_STEPS", 8)
    found = as_stream(sampler, 3, 1, SamplingParams(max_tokens=20))
    assert len(found) == 3
    # 1 + 8 + 8 + 3 tokens; of each row no more is copied than it can have.
    assert fetched == [(3, 9), (3, 17), (3, 20)]


def test_memory_that_is_read_later_is_not_written_by_idle_rows(model):
    """Replies of one token end before any step: their lanes must let go of their slots."""
    sampler = make_sampler(model)
    as_stream(sampler, 10, 2, SamplingParams(max_tokens=1))
    assert_same(as_stream(sampler, 5, 3), in_lockstep(make_sampler(model), 5, 3))


def test_a_stream_after_a_batch_has_its_slots_for_itself(model):
    """Rows that a batch left in their lanes would go on writing to slots of others."""
    sampler = make_sampler(model)
    batch = [Request(session=s, prompt=p, seed=s) for s, p in enumerate(first_prompts(8))]
    sampler.generate(batch, SamplingParams(max_tokens=2))
    sampler.end_sessions(range(8))
    request = Request(session=8, prompt=Prompt(np.arange(3, 43)), seed=8)
    expected = make_sampler(model).generate([request], PARAMS)
    assert_same({0: write_replies(sampler, [request], PARAMS)[0]}, {0: expected[0]})


def test_rows_move_together_when_fewer_lanes_would_do(model, monkeypatch):
    monkeypatch.setattr(slot_stream, "MOST_STEPS", 8)
    sampler = make_sampler(model)
    prompts = first_prompts(40)
    requests = [Request(session=s, prompt=p, seed=s) for s, p in enumerate(prompts)]
    params = SamplingParams(max_tokens=60, stop_ids=STOPS)
    expected = make_sampler(model).generate(requests, params)
    stream = slot_stream.SlotStream(sampler, params)
    for request in requests:
        stream.submit(request)
    found = dict(stream.poll())
    orders, order = [], sampler.state.order
    computed, advance = [], sampler.advance

    def watched(rows, num_live):
        orders.append(num_live)
        order(rows, num_live)

    def counted(num_rows, num_steps):
        computed.append((num_rows, sum(row is not None for row in stream._lanes)))
        advance(num_rows, num_steps)

    monkeypatch.setattr(sampler.state, "order", watched)
    monkeypatch.setattr(sampler, "advance", counted)
    while len(found) < 40:
        found.update(stream.poll())
    assert len(orders) > 2
    # Never more lanes than the smallest graph for the rows that run.
    assert all(num_rows == sampler.padded(num_live) for num_rows, num_live in computed)
    assert_same(found, dict(enumerate(expected)))


def test_prompts_are_computed_in_parts_where_they_are_many(model, monkeypatch):
    expected = in_lockstep(make_sampler(model), 9, turns=2)
    monkeypatch.setattr(slot_stream, "PREFILL_TOKENS", 20)
    assert_same(as_stream(make_sampler(model), 9, 2), expected)


def test_slots_made_anew_for_a_longer_prompt_lose_no_reply(model):
    long = Prompt(np.random.default_rng(5).integers(3, VOCABULARY, size=100))
    short = [Request(session=s, prompt=p, seed=s) for s, p in enumerate(first_prompts(6))]
    late = Request(session=9, prompt=long, seed=9)
    params = SamplingParams(max_tokens=20)
    expected = make_sampler(model).generate([*short, late], params)
    sampler = make_sampler(model, max_context=48)
    stream = sampler.stream(params)
    for request in short:
        stream.submit(request)
    assert stream.poll(wait_s=0.0) == []
    stream.submit(late)
    found = {}
    while len(found) < 7:
        found.update(stream.poll())
    assert_same(found, {r.session: c for r, c in zip([*short, late], expected, strict=True)})


def test_a_shared_first_prompt_is_computed_once(model, monkeypatch):
    computed = []
    sampler = make_sampler(model)
    forward = sampler.decoder.forward
    monkeypatch.setattr(
        sampler.decoder,
        "forward",
        lambda cache, ids, rows, wanted=None: (
            computed.append(rows.counts.tolist()) or forward(cache, ids, rows, wanted)
        ),
    )
    prompt = Prompt(np.arange(3, 23))
    requests = [Request(session=s, prompt=prompt, seed=s) for s in range(16)]
    write_replies(sampler, requests, SamplingParams(max_tokens=1))
    (counts,) = computed
    assert sorted(counts, reverse=True)[:2] == [20, 1]  # the rest is padding


def test_sessions_that_come_later_join_a_prompt_that_is_there(model, monkeypatch):
    prompt = Prompt(np.arange(3, 23))
    requests = [Request(session=s, prompt=prompt, seed=s) for s in range(7)]
    expected = make_sampler(model).generate(requests, PARAMS)
    entered, enter = [], slot_stream.SlotStream._enter

    def note(self, jobs, members):
        entered.append([len(job.ids) for job in jobs])
        enter(self, jobs, members)

    monkeypatch.setattr(slot_stream.SlotStream, "_enter", note)
    stream, found = make_sampler(model).stream(PARAMS), {}
    for part in (requests[:4], requests[4:6], requests[6:]):
        for request in part:
            stream.submit(request)
        while len(found) <= part[-1].session:
            found.update(stream.poll())
        if part[-1].session == 5:
            stream.end(range(6))  # with its last session the prompt goes too
    assert entered == [[20], [1, 1], [20]]
    assert_same(found, dict(enumerate(expected)))


@pytest.mark.parametrize("num_steps", [8, 32], ids=["one by one", "all that write end together"])
def test_a_prompt_of_a_group_that_mostly_waits_is_computed_once(model, monkeypatch, num_steps):
    monkeypatch.setattr(slot_stream, "FEWEST_STEPS", num_steps)
    monkeypatch.setattr(slot_stream.SlotStream, "_adapt", lambda *_, **__: None)
    prompt = Prompt(np.arange(3, 23))
    requests = [Request(session=s, prompt=prompt, seed=s) for s in range(9)]
    expected = make_sampler(model).generate(requests, PARAMS)
    sampler, entered = make_sampler(model), []
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 4)
    first = Request(session=9, prompt=first_prompts(2)[1], seed=9)
    enter = slot_stream.SlotStream._enter

    def note(self, jobs, members):
        entered.extend(len(job.ids) for job in jobs)
        enter(self, jobs, members)

    monkeypatch.setattr(slot_stream.SlotStream, "_enter", note)
    stream, found = sampler.stream(PARAMS), {}
    for request in (first, *requests):
        stream.submit(request)
    while len(found) < 10:
        ended = stream.poll()
        found.update(ended)
        stream.end([session for session, _ in ended])
    assert sorted(entered, reverse=True)[:2] == [20, len(first.prompt.ids)]
    assert set(entered) == {20, len(first.prompt.ids), 1}
    assert_same({s: found[s] for s in range(9)}, dict(enumerate(expected)))


def test_only_who_waits_for_the_same_prompt_shares_it():
    slots = Slots(8)
    alone, shared = Prompt(np.arange(9)), Prompt(np.arange(5))
    requests = [Request(session=0, prompt=alone, seed=0), Request(session=1, prompt=shared, seed=0)]
    waiting = [Request(session=s, prompt=shared, seed=0) for s in range(2, 5)]
    jobs, owners = slots.place(requests, waiting=waiting)
    assert owners == [0, 1] and [job.session.slot for job in jobs] == [0, 8]
    assert slots.sessions[0].prefix_length == 0 and slots.sessions[1].prefix_length == 5
    slots.place([Request(session=5, prompt=Prompt(np.arange(7)), seed=0)], waiting=waiting[:1])
    assert slots.sessions[5].prefix_length == 0


def test_a_sampler_is_freed_with_its_closed_streams(model):
    sampler = make_sampler(model)
    in_lockstep(sampler, 4, 1)
    as_stream(sampler, 4, 1)
    gone = weakref.ref(sampler)
    gc.disable()
    try:
        del sampler
        assert gone() is None
    finally:
        gc.enable()


def test_a_closed_stream_forgets_its_sessions_and_what_was_under_way(model):
    sampler = make_sampler(model)
    stream = sampler.stream(SamplingParams(max_tokens=40))
    for session, prompt in enumerate(first_prompts(10)):
        stream.submit(Request(session=session, prompt=prompt, seed=session))
    assert stream.poll(wait_s=0.0) == []
    stream.close()
    assert sampler.slots.num_free == (12, 3) and stream.poll() == []
    assert_same(as_stream(sampler, 10, 2), in_lockstep(make_sampler(model), 10, 2))
    assert sampler.slots.num_free == (12, 3)


def test_new_weights_are_used_from_the_next_reply_on_and_sessions_are_dropped(model):
    sampler, other = make_sampler(model), make_sampler(model)
    stream = sampler.stream(PARAMS)
    request = Request(session=0, prompt=first_prompts(1)[0], seed=0)
    stream.submit(request)
    ((_, reply),) = stream.poll()
    other_weights = {name: tensor * 0.9 for name, tensor in model.state_dict().items()}
    sampler.load_weights(other_weights.items(), 3)
    other.load_weights(other_weights.items(), 3)
    again = Request(session=0, prompt=next_prompt(request, reply), seed=1)
    stream.submit(again)
    with pytest.raises(MooredError, match="while replies are under way"):
        sampler.load_weights(other_weights.items(), 4)
    ((_, found),) = stream.poll()
    (expected,) = other.generate([again], PARAMS)
    assert found.policy_version == 3
    assert_same({0: found}, {0: expected})


def test_slots_for_which_there_is_no_memory_are_made_when_there_is(model, monkeypatch):
    sampler = make_sampler(model, max_context=48)
    stream = sampler.stream(SamplingParams(max_tokens=20))
    short = [Request(session=s, prompt=p, seed=s) for s, p in enumerate(first_prompts(6))]
    for request in short:
        stream.submit(request)
    stream.poll(wait_s=0.0)

    def fail(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sampler.decoder, "new_cache", fail)
        stream.submit(Request(session=9, prompt=Prompt(np.arange(100) % 60 + 3), seed=9))
        with pytest.raises(MooredError, match="out of GPU memory in sampling"):
            stream.poll()
    stream.close()
    assert_same(as_stream(sampler, 6, 2), in_lockstep(make_sampler(model), 6, 2))


def test_a_cache_that_cannot_be_used_is_not_held(model, monkeypatch):
    """The next try would find no room beside it, and `release` would not give it back."""
    sampler = make_sampler(model)

    def fail(*_):
        raise torch.OutOfMemoryError

    for part in ("State", "entries_size"):
        with monkeypatch.context() as patch:
            patch.setattr(f"moored.engine.fast.sampler.{part}", fail)
            with pytest.raises(MooredError, match="out of GPU memory in sampling"):
                in_lockstep(sampler, 6, turns=1)
        assert not hasattr(sampler, "cache")
    assert_same(as_stream(sampler, 6, 2), in_lockstep(make_sampler(model), 6, 2))


def test_slots_are_no_longer_for_a_prompt_that_had_no_room(model, monkeypatch):
    sampler = make_sampler(model, max_context=48)
    long = Request(session=9, prompt=Prompt(np.arange(100) % 60 + 3), seed=9)

    def fail(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sampler.decoder, "new_cache", fail)
        with pytest.raises(MooredError, match="out of GPU memory in sampling"):
            sampler.generate([long], PARAMS)
    sampler.generate([Request(session=0, prompt=first_prompts(1)[0], seed=0)], PARAMS)
    assert sampler.cache.shape[4] == 48


def test_a_call_that_fails_leaves_no_reply_under_way(model, monkeypatch):
    sampler = make_sampler(model)
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: 5)
    broken = {name: tensor * torch.nan for name, tensor in model.state_dict().items()}
    sampler.load_weights(broken.items(), 1)
    with pytest.raises(MooredError, match="not finite"):
        in_lockstep(sampler, 12, turns=1)
    sampler.load_weights(model.state_dict().items(), 2)
    assert_same(as_stream(sampler, 6, 2), in_lockstep(make_sampler(model), 6, 2))


def test_one_stream_writes_at_a_time(model):
    sampler = make_sampler(model)
    first, second = sampler.stream(PARAMS), sampler.stream(PARAMS)
    prompt = first_prompts(1)[0]
    first.submit(Request(session=0, prompt=prompt, seed=0))
    first.poll(wait_s=0.0)
    second.submit(Request(session=1, prompt=prompt, seed=0))
    with pytest.raises(MooredError, match="another stream has replies under way"):
        second.poll()
    first.close()
    assert [session for session, _ in second.poll()] == [1]


def test_a_session_has_one_request_under_way_and_a_prompt_a_token(model):
    stream = make_sampler(model).stream(PARAMS)
    request = Request(session=0, prompt=first_prompts(1)[0], seed=0)
    stream.submit(request)
    with pytest.raises(MooredError, match="session 0 already has a request"):
        stream.submit(request)
    with pytest.raises(MooredError, match="at least one token"):
        stream.submit(Request(session=1, prompt=Prompt(np.zeros(0, dtype=np.int64)), seed=0))


def test_weights_that_are_not_finite_are_reported(model):
    sampler = make_sampler(model)
    broken = {name: tensor * torch.nan for name, tensor in model.state_dict().items()}
    sampler.load_weights(broken.items(), 1)
    request = Request(session=0, prompt=first_prompts(1)[0], seed=0)
    with pytest.raises(MooredError, match="not finite"):
        write_replies(sampler, [request], PARAMS)


def test_a_sampler_without_streams_writes_in_lockstep(model):
    assert make_sampler(model, streams=False).stream(PARAMS).is_lockstep
    assert not make_sampler(model).stream(PARAMS).is_lockstep
    default = SlotSampler(model, dtype=torch.float32, max_context=64)
    assert default.stream(PARAMS).is_lockstep is (model.device.type == "cpu")


def test_a_sampler_that_gave_its_memory_back_writes_the_same_replies(model):
    sampler = make_sampler(model)
    params = SamplingParams(max_tokens=12, temperature=1.0)
    requests = [Request(session=i, prompt=p, seed=i) for i, p in enumerate(first_prompts(6))]
    before = write_replies(sampler, requests, params)
    sampler.release()
    assert not hasattr(sampler, "cache")
    after = write_replies(sampler, requests, params)
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
    sampler.release()
    sampler.release()


class LentTensor:
    """`FixedMemory` on any device: what is lent comes back as zeros, or not at all."""

    def __init__(self, shape, dtype, device):
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.num_bytes, self.is_there, self.has_room = self.tensor.nbytes, True, True

    def give_back(self):
        self.tensor.fill_(torch.nan)
        self.is_there = False

    def take(self):
        if not self.has_room:
            raise torch.OutOfMemoryError
        self.tensor.zero_()
        self.is_there = True

    def close(self):
        self.give_back()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_sampler_that_lent_its_memory_writes_the_same_replies(model, monkeypatch, has_room):
    monkeypatch.setattr("moored.engine.fast.sampler.FixedMemory", LentTensor)
    sampler = make_sampler(model)
    sampler.lends = True
    params = SamplingParams(max_tokens=12, temperature=1.0)
    requests = [Request(session=i, prompt=p, seed=i) for i, p in enumerate(first_prompts(6))]
    before = write_replies(sampler, requests, params)
    cache, graphs = sampler.cache, dict(sampler._graphs)
    assert sampler.uncounted_bytes == cache.nbytes
    sampler.release()
    sampler.release()
    assert cache.isnan().all() and not sampler.slots.sessions
    assert isinstance(sampler._memory, LentTensor)
    sampler._memory.has_room = has_room
    after = write_replies(sampler, requests, params)
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
    assert (sampler.cache is cache) is has_room
    assert (sampler._graphs == graphs) is (has_room or not graphs)


@pytest.mark.parametrize(("rows_that_fit", "num_slots"), [(3, 3), (15, 16), (20, 16)])
def test_a_cache_that_came_before_the_moments_of_the_optimiser_leaves_room_for_others(
    model, monkeypatch, rows_that_fit, num_slots
):
    monkeypatch.setattr("moored.engine.fast.sampler.FixedMemory", LentTensor)
    sampler = make_sampler(model)
    sampler.lends = True
    held, most = [100], [16]
    monkeypatch.setattr(sampler, "_count_held", lambda: held[0])
    monkeypatch.setattr(sampler, "_max_rows", lambda *_: most[0])
    requests = [Request(session=i, prompt=p, seed=i) for i, p in enumerate(first_prompts(16))]
    write_replies(sampler, requests, PARAMS)
    first = sampler.cache
    assert sampler.slots.num_rows == 16
    sampler.release()
    held[0], most[0] = (
        300,
        rows_that_fit,
    )  # after the first update; 15 rows are within the tolerance
    write_replies(sampler, requests, PARAMS)
    assert sampler.slots.num_rows == num_slots
    assert (sampler.cache is first) is (num_slots == 16)
    kept = sampler.cache
    for _ in range(2):  # nobody holds more than at the last look: nothing is made anew
        sampler.release()
        most[0] = 1
        write_replies(sampler, requests, PARAMS)
        assert sampler.cache is kept


def test_a_sampler_on_a_gpu_lends_its_cache_and_keeps_what_it_recorded(model):
    if model.device.type == "cpu":
        pytest.skip("a processor has nothing to lend")
    sampler = SlotSampler(model, dtype=torch.float32, max_context=64, lends=True)
    params = SamplingParams(max_tokens=12, temperature=1.0)
    requests = [Request(session=i, prompt=p, seed=i) for i, p in enumerate(first_prompts(6))]
    before = write_replies(sampler, requests, params)
    graphs = dict(sampler._graphs)
    assert graphs and sampler.uncounted_bytes >= sampler.cache.nbytes
    for _ in range(3):
        sampler.release()
        assert sampler.uncounted_bytes == 0
        after = write_replies(sampler, requests, params)
        for one, other in zip(before, after, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.logprobs, other.logprobs)
    assert sampler._graphs == graphs


def test_memory_is_not_given_back_while_replies_are_under_way(model):
    sampler = make_sampler(model)
    stream = sampler.stream(SamplingParams(max_tokens=12, temperature=1.0))
    stream.submit(Request(session=0, prompt=first_prompts(1)[0], seed=0))
    stream.poll(0.0)
    with pytest.raises(MooredError, match="replies are under way"):
        sampler.release()
    stream.close()
    sampler.release()
