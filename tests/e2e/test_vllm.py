"""The real vLLM, in its own environment: `make test-vllm`. Skipped where it is not installed."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from urllib.request import urlopen

import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch  # noqa: E402

from moored.config import load_config  # noqa: E402
from moored.engine.base import Request, SamplingParams, new_session, write_replies  # noqa: E402
from moored.engine.local.engine import LocalEngine  # noqa: E402
from moored.engine.vllm.sampler import VllmSampler, VllmStream  # noqa: E402
from moored.engine.vllm.server import ServerSampler  # noqa: E402
from moored.presets import read_presets  # noqa: E402
from moored.train import build_run, resume, start, train  # noqa: E402
from moored.types import FinishReason, Message, Prompt, ScoreRequest  # noqa: E402

TEMPERATURE = 0.7
PARAMS = SamplingParams(max_tokens=24, temperature=TEMPERATURE)
DIALOGUE = [Message("user", f"Board {n}: #### #P_# #_O# ####. Which way do you go?") for n in "12"]


def options(*words: str):
    words = ("engine.sampler=vllm", "engine.device=cpu", *words)
    return load_config({}, [*words, "engine.vllm.cache_gib=0.25"])


@pytest.fixture(scope="module")
def engine():
    config = options(f"rollout.temperature={TEMPERATURE}", "rollout.max_context=1024")
    with closing(LocalEngine(config)) as made:
        yield made


def ask(engine: LocalEngine, seed: int, message: Message = DIALOGUE[0]) -> Request:
    return Request(session=new_session(), prompt=engine.renderer.start([message]), seed=seed)


def gap(engine: LocalEngine, prompt: Prompt, reply) -> float:
    """Largest difference of a token's log-probability between sampler and learner, in nats."""
    ((scored,),) = engine.scorer.score([ScoreRequest(prompt, [reply.token_ids])])
    return float(np.abs(scored - reply.logprobs).max())


def test_vllm_passes_the_check_before_a_run(engine):
    engine.check()


def test_weights_are_taken_over_in_place_the_tied_output_layer_too(engine):
    request = ask(engine, 1)
    assert engine.model.config.tie_word_embeddings
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.mul_(1.05)
    (stale,) = write_replies(engine.sampler, [request], PARAMS)
    assert gap(engine, request.prompt, stale) > 0.01
    engine.sampler.load_weights(engine.learner.weights(), 9)
    (fresh,) = write_replies(engine.sampler, [request], PARAMS)
    assert gap(engine, request.prompt, fresh) < 1e-3
    assert (stale.policy_version, fresh.policy_version) == (0, 9)


def test_earlier_turns_are_cached_prefixes_and_change_no_log_prob(engine):
    first = ask(engine, 2)
    stream = engine.sampler.stream(PARAMS)
    stream.submit(first)
    ((_, reply),) = stream.poll()
    before = engine.sampler.num_cached_tokens
    longer = np.concatenate([first.prompt.ids, reply.token_ids, first.prompt.ids])
    second = dataclasses.replace(first, prompt=Prompt(longer), seed=3)
    stream.submit(second)
    ((_, reply),) = stream.poll()
    assert engine.sampler.num_cached_tokens - before >= 32
    assert gap(engine, second.prompt, reply) < 1e-3
    stream.close()


def test_a_reply_follows_from_its_seed_whatever_else_is_written(engine):
    wanted = ask(engine, 2**62 + 5)
    (alone,) = write_replies(engine.sampler, [wanted], PARAMS)
    others = [ask(engine, seed, DIALOGUE[1]) for seed in range(7)]
    replies = write_replies(engine.sampler, [*others, wanted], PARAMS)
    assert replies[-1].token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(replies[-1].logprobs, alone.logprobs, atol=1e-4)
    assert len({tuple(reply.token_ids) for reply in replies[:7]}) > 1


def test_the_stop_token_ends_a_reply_and_is_part_of_it(engine):
    request = ask(engine, 4)
    (whole,) = write_replies(engine.sampler, [request], PARAMS)
    assert whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == 24
    stop = int(whole.token_ids[5])
    cut = list(whole.token_ids).index(stop) + 1
    stopping = dataclasses.replace(PARAMS, stop_ids=(stop,))
    (reply,) = write_replies(engine.sampler, [request], stopping)
    assert reply.finish_reason is FinishReason.STOP
    assert reply.token_ids.tolist() == whole.token_ids[:cut].tolist()


def test_in_a_stream_a_finished_reply_does_not_wait_for_others(engine):
    assert isinstance(engine.sampler, VllmSampler)
    requests = [ask(engine, seed) for seed in range(6)]
    whole = write_replies(engine.sampler, requests, PARAMS)
    stop = int(whole[0].token_ids[3])
    params = dataclasses.replace(PARAMS, stop_ids=(stop,))
    expected = write_replies(engine.sampler, requests, params)
    lengths = {len(reply.token_ids) for reply in expected}
    assert len(lengths) > 1
    with closing(VllmStream(engine.sampler, params)) as stream:
        for request in requests:
            stream.submit(request)
        polls = [stream.poll() for _ in lengths]
    found = {session: reply for poll in polls for session, reply in poll}
    assert all(polls) and len(found) == 6
    assert [len(reply.token_ids) for poll in polls for _, reply in poll] == sorted(
        len(reply.token_ids) for reply in expected
    )
    for request, reply in zip(requests, expected, strict=True):
        assert found[request.session].token_ids.tolist() == reply.token_ids.tolist()


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    words = ["num_steps=4", "checkpoint_every=2", "evaluation.every=2", "evaluation.num_tasks=4"]
    words += ["engine.sampler=vllm", "engine.device=cpu", "engine.vllm.cache_gib=0.25"]
    words += ["rollout.num_groups=2", "rollout.group_size=4", "filter.rule=none"]
    config = load_config(read_presets(["collapse"]), words)
    with closing(build_run(config, tmp_path / "whole")) as whole:
        start(whole)
        train(whole)
    with closing(build_run(config, tmp_path / "cut")) as first:
        start(first)
        train(first, lambda record: record.step == 3)
    with closing(build_run(config, tmp_path / "cut", resume=True)) as second:
        resume(second)
        train(second)
    for file in ("metrics.jsonl", "collapse.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_two_processes_of_a_divided_model_write_what_one_does_and_take_weights_over(engine):
    words = [f"rollout.temperature={TEMPERATURE}", "engine.vllm.tensor_parallel=2"]
    (whole,) = write_replies(engine.sampler, [ask(engine, 5)], PARAMS)
    with closing(LocalEngine(options(*words, "rollout.max_context=1024"))) as divided:
        divided.sampler.load_weights(engine.learner.weights(), 0)
        (reply,) = write_replies(divided.sampler, [ask(divided, 5)], PARAMS)
        assert reply.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(reply.logprobs, whole.logprobs, atol=1e-4)
        with torch.no_grad():
            for weight in divided.model.parameters():
                weight.mul_(1.05)
        divided.sampler.load_weights(divided.learner.weights(), 9)
        request = ask(divided, 6)
        (fresh,) = write_replies(divided.sampler, [request], PARAMS)
        assert gap(divided, request.prompt, fresh) < 1e-3 and fresh.policy_version == 9


@pytest.mark.parametrize("ways", [1, 2])
def test_a_server_takes_weights_over_as_files_and_ends_with_the_engine(ways):
    parallel = f"engine.vllm.tensor_parallel={ways}"
    config = options("engine.vllm.server=start", "rollout.max_context=512", parallel)
    with closing(LocalEngine(config)) as engine:
        engine.check()
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.mul_(1.05)
        engine.sampler.load_weights(engine.learner.weights(), 4)
        request = ask(engine, 1)
        params = dataclasses.replace(PARAMS, temperature=1.0)
        (reply,) = write_replies(engine.sampler, [request], params)
        assert reply.policy_version == 4
        assert gap(engine, request.prompt, reply) < 1e-3
        assert isinstance(engine.sampler, ServerSampler)
        url = f"{engine.sampler._client.url}/version"  # pyright: ignore
        assert b"version" in urlopen(url).read()
    with pytest.raises(OSError, match="refused"):
        urlopen(url)


def test_eval_plays_with_vllm(here, tmp_path):
    words = ("--env", "sokoban", "-n", "4", "--max-tokens", "60", "--temperature", "0")
    by_vllm = here("eval", "nano", *words, "--sampler", "vllm")
    # At temperature 0 every prompt has one reply, the same by either sampler.
    assert by_vllm == here("eval", "nano", *words)
