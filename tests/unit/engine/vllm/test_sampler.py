"""The sampler's protocol, with a module that stands for vLLM."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moored.config import load_config  # noqa: E402
from moored.engine.base import (  # noqa: E402
    LockstepStream,
    Request,
    SamplingParams,
    write_replies,
)
from moored.engine.ray.replica import make_sampler as make_replica_sampler  # noqa: E402
from moored.engine.vllm.sampler import VllmSampler, VllmStream  # noqa: E402
from moored.engine.workers.team import WorkerLost  # noqa: E402
from moored.errors import MooredError  # noqa: E402
from moored.models.load import load_model  # noqa: E402
from moored.types import FinishReason, Prompt  # noqa: E402
from tests.tiny_model import tiny_model  # noqa: E402
from tests.unit.engine.vllm.fake_vllm import FakeEngine, install  # noqa: E402

PARAMS = SamplingParams(max_tokens=4, temperature=0.7, stop_ids=(12, 99))


def make_sampler(*words: str, streams: bool | None = None) -> tuple[VllmSampler, FakeEngine]:
    config = load_config({}, ["engine.device=cpu", *words])
    sampler = VllmSampler(tiny_model(vocab_size=32), config, streams=streams)
    return sampler, sampler._engine


def request(session: int, *ids: int) -> Request:
    return Request(session=session, prompt=Prompt(np.array(ids)), seed=40 + session)


@pytest.fixture
def llm(monkeypatch):
    return install(monkeypatch)


def test_ids_go_in_and_ids_log_probs_and_the_stop_token_come_out(llm):
    sampler, engine = make_sampler()
    sampler.version = 7
    stopped, cut = write_replies(sampler, [request(1, 10, 5), request(2, 20, 6, 7)], PARAMS)
    assert stopped.token_ids.tolist() == [10, 11, 12]
    assert stopped.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert stopped.finish_reason is FinishReason.STOP
    assert cut.token_ids.tolist() == [20, 21, 22, 23]
    assert cut.finish_reason is FinishReason.LENGTH
    assert (stopped.policy_version, cut.policy_version) == (7, 7)
    assert [ids for ids, _ in engine.asked] == [[10, 5], [20, 6, 7]]


def test_a_request_names_its_seed_and_temperature_and_nothing_else_ends_a_reply(llm):
    sampler, engine = make_sampler()
    write_replies(sampler, [request(3, 10)], PARAMS)
    ((_, asked),) = engine.asked
    assert (asked.seed, asked.temperature, asked.max_tokens) == (43, 0.7, 4)
    assert (asked.stop_token_ids, asked.ignore_eos) == ([12, 99], True)
    # Of the drawn token alone, and no text.
    assert (asked.logprobs, asked.detokenize) == (0, False)


def test_a_finished_reply_goes_on_at_once_while_others_are_written(llm):
    sampler, engine = make_sampler(streams=True)
    stream = sampler.stream(PARAMS)
    assert isinstance(stream, VllmStream) and not stream.is_lockstep
    stream.submit(request(1, 20))
    stream.submit(request(2, 11))
    ((session, _),) = stream.poll()
    assert session == 2 and len(engine.rows) == 1
    stream.submit(request(2, 11, 12, 13))
    # The first has two tokens, the second none: both end after two more steps.
    assert sorted(session for session, _ in stream.poll()) == [1, 2]
    assert stream.poll() == []


def test_two_streams_write_at_a_time_and_each_gets_its_own_replies(llm):
    sampler, _ = make_sampler(streams=True)
    first, second = sampler.stream(PARAMS), sampler.stream(PARAMS)
    first.submit(request(1, 20))
    second.submit(request(2, 30))
    ((_, reply),) = first.poll()
    assert reply.token_ids.tolist() == [20, 21, 22, 23]
    # It ended in the same step.
    ((_, reply),) = second.poll(0.0)
    assert reply.token_ids.tolist() == [30, 31, 32, 33]


def test_a_poll_returns_after_its_time_without_a_reply(llm):
    sampler, engine = make_sampler(streams=True)
    stream = sampler.stream(PARAMS)
    stream.submit(request(1, 20))
    assert stream.poll(0.0) == [] and len(engine.rows["0"].tokens) == 1


def test_on_a_cpu_replies_come_in_lockstep_and_the_cache_is_emptied_at_the_end(llm):
    sampler, engine = make_sampler()
    stream = sampler.stream(PARAMS)
    assert isinstance(stream, LockstepStream)
    stream.submit(request(1, 20))
    stream.submit(request(2, 11))
    assert [session for session, _ in stream.poll()] == [1, 2]
    assert engine.calls == []
    stream.close()
    assert engine.calls == ["reset"]


def test_the_cache_stays_while_other_dialogues_go_on(llm):
    sampler, engine = make_sampler()
    stream = sampler.stream(PARAMS)
    for session in (1, 2, 3):
        stream.submit(request(session, 20, session))
    stream.poll()
    stream.end([1])
    assert engine.calls == []
    stream.end([2, 3])
    assert engine.calls == ["reset"]


def test_closing_a_stream_drops_what_is_under_way_and_leaves_others(llm):
    sampler, engine = make_sampler(streams=True)
    first, second = sampler.stream(PARAMS), sampler.stream(PARAMS)
    first.submit(request(1, 20))
    second.submit(request(2, 30))
    first.close()
    # The cache is still in use.
    assert engine.calls == ["abort 1"] and len(engine.rows) == 1
    assert [session for session, _ in second.poll()] == [2]
    second.close()
    assert engine.calls == ["abort 1", "reset"]


def test_weights_are_taken_over_whole_and_cached_prefixes_forgotten(llm):
    sampler, engine = make_sampler()
    weights = tiny_model(vocab_size=32).state_dict()
    sampler.load_weights(iter(weights.items()), 3)
    # With the output layer, although it is tied: on a CPU vLLM has it packed apart.
    assert "lm_head.weight" in engine.weights[0]
    assert engine.weights[0].keys() == weights.keys()
    assert engine.calls == ["reload_weights", "reset"]
    assert write_replies(sampler, [request(1, 10)], PARAMS)[0].policy_version == 3


def test_on_a_gpu_weights_are_copied_to_where_recorded_graphs_read_them(llm):
    sampler, engine = make_sampler()
    sampler.is_cuda = True
    sampler.load_weights(tiny_model(vocab_size=32).state_dict().items(), 1)
    assert engine.calls == ["load_weights", "reset"] and len(engine.weights) == 1


def test_weights_that_arrive_while_replies_are_written_are_refused(llm):
    sampler, _ = make_sampler(streams=True)
    stream = sampler.stream(PARAMS)
    stream.submit(request(1, 20))
    with pytest.raises(MooredError, match="weights arrived while replies are under way"):
        sampler.load_weights([], 1)


def test_a_reply_that_vllm_gives_up_is_an_error_of_this_reply_alone(llm):
    sampler, engine = make_sampler()
    engine.finish_reason = "abort"
    (reply,) = write_replies(sampler, [request(1, 20)], PARAMS)
    assert reply.finish_reason is FinishReason.ERROR and len(reply.token_ids) == 0
    assert reply.error == "vLLM ended the reply with 'abort'"


def test_log_probs_that_are_not_finite_end_the_rollout(llm):
    sampler, engine = make_sampler()
    engine.factor = float("nan")
    with pytest.raises(MooredError, match="its weights are damaged"):
        write_replies(sampler, [request(1, 20)], PARAMS)


def test_a_prompt_that_leaves_no_room_for_the_reply_is_refused(llm):
    sampler, _ = make_sampler("rollout.max_context=300", "rollout.max_response_tokens=4")
    fits = request(1, *range(20, 316))
    assert len(write_replies(sampler, [fits], PARAMS)) == 1
    with pytest.raises(MooredError, match=r"297 tokens .* 4 do not fit vLLM's context of 300"):
        write_replies(sampler, [request(2, *range(20, 317))], PARAMS)


def test_a_session_has_one_request_under_way(llm):
    sampler, _ = make_sampler(streams=True)
    stream = sampler.stream(PARAMS)
    stream.submit(request(1, 20))
    with pytest.raises(MooredError, match="session 1 already has a request under way"):
        stream.submit(request(1, 20))


def test_vllm_is_made_with_the_log_probs_of_the_sampled_distribution(llm):
    make_sampler("rollout.max_context=640", "engine.vllm.cache_gib=0.5")
    (made,) = llm.made
    expected = {
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 640,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**29,
        "enforce_eager": True,
    }
    assert {name: made.options[name] for name in expected} == expected


def test_the_folder_that_vllm_reads_describes_the_model_and_is_gone_afterwards(llm, monkeypatch):
    seen = {}
    make = llm.__init__

    def read(self, model, **options):
        seen.update(json.loads((Path(model) / "config.json").read_text()))
        make(self, model, **options)

    monkeypatch.setattr(llm, "__init__", read)
    make_sampler()
    assert seen["architectures"] == ["LlamaForCausalLM"] and seen["vocab_size"] == 32
    assert not Path(llm.made[0].model).exists()


def test_a_folder_brings_its_weights(llm, tmp_path):
    VllmSampler(tmp_path, load_config({}, ["engine.device=cpu"]))
    assert llm.made[0].model == str(tmp_path) and "load_format" not in llm.made[0].options


def test_processes_of_tensor_parallelism_read_weights_from_a_folder_that_goes_away(
    llm, monkeypatch, tmp_path
):
    monkeypatch.setattr("moored.engine.vllm.files.FILE_BYTES", 1000)
    words = ["engine.vllm.tensor_parallel=2", f"engine.vllm.folder={tmp_path}"]
    sampler, engine = make_sampler(*words)
    options = llm.made[0].options
    assert options["tensor_parallel_size"] == 2
    assert options["distributed_executor_backend"] == "mp"
    given = {"a": torch.arange(3.0), "b": torch.ones(300), "tied": torch.ones(300)}
    given["tied"] = given["b"]
    sampler.load_weights(given.items(), 3)
    (read,) = engine.weights
    assert read.keys() == given.keys() and torch.equal(read["a"], given["a"])
    assert engine.folders[0].parent == tmp_path and not any(tmp_path.iterdir())
    ((loads,),) = engine.updates
    assert loads["load_config"]["load_format"] == "safetensors"
    assert engine.calls == ["update_config", "reload_weights", "reset"]
    assert sampler.version == 3


def test_processes_of_tensor_parallelism_do_not_hear_ctrl_c(llm, monkeypatch):
    held_back = []
    make = llm.__init__

    def note(self, model, **options):
        held_back.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        make(self, model, **options)

    monkeypatch.setattr(llm, "__init__", note)
    make_sampler()
    make_sampler("engine.vllm.tensor_parallel=2")
    assert held_back == [False, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_lost_process_of_tensor_parallelism_is_one_sentence(llm, monkeypatch):
    sampler, engine = make_sampler("engine.vllm.tensor_parallel=2")

    def fail(*args, **kwargs):
        raise RuntimeError("Executor failed.")

    engine.step = engine.collective_rpc = fail
    executor = SimpleNamespace(is_failed=True)
    engine.engine_core.engine_core = SimpleNamespace(model_executor=executor)
    lost = r"^vLLM lost a process of engine.vllm.tensor_parallel \(Executor failed.\); resume the"
    with pytest.raises(WorkerLost, match=lost):
        write_replies(sampler, [request(1, 10)], PARAMS)
    sampler.drop(["0"])
    with pytest.raises(WorkerLost, match=lost):
        sampler.load_weights([("a", torch.zeros(2))], 1)
    monkeypatch.setattr("moored.engine.vllm.sampler.NOTICE_S", 0.01)
    executor.is_failed = False
    with pytest.raises(MooredError, match=r"^vLLM does not take over the learner's weights: Exec"):
        sampler.load_weights([("a", torch.zeros(2))], 2)


def test_closing_ends_vllm_once(llm):
    sampler, engine = make_sampler()
    sampler.close()
    sampler.close()
    assert engine.calls == ["shutdown"]


def test_in_a_rank_vllm_leaves_the_process_group_alone(llm, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    kept = FakeEngine(256)
    detached: list[bool] = []
    vars(kept.engine_core)["_finalizer"] = SimpleNamespace(detach=lambda: detached.append(True))
    monkeypatch.setattr("tests.unit.engine.vllm.fake_vllm.FakeEngine", lambda length: kept)
    sampler, engine = make_sampler()
    assert engine is kept and detached == [True]
    sampler.close()
    assert engine.calls == []


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (
            "1 validation error for X\n  Value error, User-specified max_model_len (9) is "
            "greater than the derived. To allow overriding … [type=value_error]",
            "User-specified max_model_len (9) is greater than the derived; lower "
            "rollout.max_context",
        ),
        (
            "To serve at least one request, 0.5 GiB KV cache is needed. Try increasing …",
            "To serve at least one request, 0.5 GiB KV cache is needed; raise "
            "engine.vllm.memory_share (cache_gib on a CPU), or lower rollout.max_context",
        ),
        ("no such head size", "no such head size; set engine.sampler=auto to do without vLLM"),
    ],
)
def test_what_vllm_refuses_is_told_in_one_sentence(llm, refusal, told):
    llm.refusal = refusal
    with pytest.raises(MooredError) as caught:
        make_sampler()
    assert str(caught.value) == f"vLLM does not take this model: {told}"


def test_a_replica_of_ray_gives_vllm_weights_without_a_whole_model(llm, monkeypatch):
    def no_loading(*args, **kwargs):
        raise AssertionError("a whole model was loaded")

    wanted = load_model("nano", torch.device("cpu")).model.state_dict()
    monkeypatch.setattr("moored.models.load.load_model", no_loading)
    config = load_config({"model": "nano"}, ["engine.device=cpu", "engine.sampler=vllm"])
    sampler = make_replica_sampler(config)
    assert sampler.version == 0
    (found,) = llm.made[0].llm_engine.weights
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
