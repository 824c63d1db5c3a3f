"""What the simulation rests on, measured here: latencies, calls, and rollouts to compare it with.

Environments are played with noised demonstrations; calls are those of Ray actors that sleep. A real
rollout goes through `roll_out` with the tokenizer of `nano`: its sampler writes no text, but waits
as long as a replica would, and its environment sleeps.
"""

from __future__ import annotations

import functools
import heapq
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np
import torch
from instant import InstantSampler
from simulation.events import Spread, spread_of
from simulation.model import Scenario

from moored.cli.options import read_config
from moored.config import RolloutConfig
from moored.engine.base import Request, Sampler, SamplingParams, Stream
from moored.envs.base import StepResult
from moored.envs.mix import EnvMix
from moored.models.load import load_model
from moored.reply import format_reply
from moored.rollout.episodes import Task, roll_out
from moored.rollout.pool import EnvPool
from moored.rollout.render import Renderer
from moored.sft.demonstrations import write_reply
from moored.types import Completion, FinishReason, Message

ENVS = ("sokoban", "webshop", "search", "code")
REPLY = format_reply("I wait and see what the clock says.", "wait")


def measure_env(name: str, num_steps: int) -> Spread:
    """Seconds of `step`, over episodes of a half-trained player."""
    rng, seconds = random.Random(0), []
    (make,) = EnvMix(read_config([f"env={name}"]).env).makers
    with EnvPool(timeout_s=None) as pool:
        env = pool.take(make)
        for task_seed in range(num_steps):
            env.reset(task_seed, episode_seed=rng.getrandbits(31))
            is_over = False
            while not is_over and (reply := write_reply(env, "noised", 0.3, rng)) is not None:
                start = time.perf_counter()
                is_over = env.step(reply).is_over
                seconds.append(time.perf_counter() - start)
            if len(seconds) >= num_steps:
                break
        pool.give_back(make, env)
    return spread_of(seconds)


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What a call of a Ray actor takes."""

    call_s: float
    """Of the driver's thread."""
    request_s: float
    """More for each request of 500 tokens and its reply."""
    round_trip_s: float


def measure_calls(num_actors: int = 16, wait_s: float = 0.02, seconds: float = 3.0) -> CallCosts:
    """Calls as `engine.kind=ray` makes them: one to each actor, made again when it comes back."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote(num_cpus=0)
        class Echo:
            def work(self, given: object, wait_s: float) -> object:
                time.sleep(wait_s)
                return given

        actors = [Echo.remote() for _ in range(num_actors)]
        ray.get([actor.work.remote(None, 0.0) for actor in actors])
        alone = [_round_trip(ray, actors[0]) for _ in range(200)]
        costs = {num: _thread_s(ray, actors, num, wait_s, seconds) for num in (0, 16)}
    finally:
        ray.shutdown()
    request_s = (costs[16] - costs[0]) / 16
    return CallCosts(costs[0], request_s, median(alone))


def _round_trip(ray, actor) -> float:
    start = time.perf_counter()
    ray.get(actor.work.remote(None, 0.0))
    return time.perf_counter() - start


def _thread_s(ray, actors, num_requests: int, wait_s: float, seconds: float) -> float:
    """Seconds of the driver's own thread for each call."""
    payload = [(k, np.zeros(500, dtype=np.int64)) for k in range(num_requests)]
    calls = {actor.work.remote(payload, wait_s): actor for actor in actors}
    num_calls, end, begin = 0, time.perf_counter() + seconds, time.thread_time()
    while time.perf_counter() < end:
        ray.wait(list(calls), timeout=1.0)
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in done:
            ray.get(call)
            actor = calls.pop(call)
            calls[actor.work.remote(payload, wait_s)] = actor
            num_calls += 1
    thread_s = time.thread_time() - begin
    ray.get(list(calls))
    return thread_s / num_calls


def measure_store(num_bytes: int = 400_000_000, repeats: int = 5) -> dict[str, float]:
    """Bytes a second into Ray's object store, and from the store of one node to another's."""
    import ray
    from ray.cluster_utils import Cluster

    size = 4 * num_bytes
    head = {"num_cpus": 1, "object_store_memory": size, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, object_store_memory=size, resources={"other": 1})
    try:
        ray.init(address=cluster.address, log_to_driver=False)

        @ray.remote(num_cpus=0, resources={"other": 1})
        def first(numbers: np.ndarray) -> int:
            return int(numbers[0])

        ray.get(first.remote(np.zeros(1)))
        puts, sends, numbers = [], [], np.ones(num_bytes, dtype=np.uint8)
        for _ in range(repeats):
            start = time.perf_counter()
            held = ray.put(numbers)
            puts.append(time.perf_counter() - start)
            ray.get(first.remote(held))
            sends.append(time.perf_counter() - start - puts[-1])
            del held
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {"put_bytes_s": num_bytes / median(puts), "send_bytes_s": num_bytes / median(sends)}


class WaitingStream(Stream):
    """A replica by the clock on the wall: a step of `step_s + row_s * rows` for each token."""

    is_lockstep = False

    def __init__(self, given: Scenario, reply: Completion, rng: np.random.Generator) -> None:
        self._given, self._reply, self._rng = given, reply, rng
        self._rows: list[tuple[float, int]] = []
        self._level, self._since = 0.0, time.perf_counter()

    def submit(self, request: Request) -> None:
        self._advance()
        tokens = float(self._given.reply_tokens.draw(self._rng, 1)[0])
        heapq.heappush(self._rows, (self._level + tokens, request.session))

    def poll(self, wait_s: float | None = None) -> list[tuple[int, Completion]]:
        self._advance()
        if not self._rows:
            return []
        left_s = max(0.0, self._rows[0][0] - self._level) * self._token_s()
        time.sleep(left_s if wait_s is None else min(left_s, wait_s))
        self._advance()
        ended = []
        while self._rows and self._rows[0][0] <= self._level:
            ended.append((heapq.heappop(self._rows)[1], self._reply))
        return ended

    def close(self) -> None:
        self._rows.clear()

    def _token_s(self) -> float:
        return self._given.step_s + self._given.row_s * len(self._rows)

    def _advance(self) -> None:
        """Up to the present, step by step where a row ends on the way."""
        now = time.perf_counter()
        if self._rows:
            self._level += (now - self._since) / self._token_s()
        self._since = now


class WaitingSampler:
    """Streams of one scenario."""

    def __init__(self, given: Scenario, reply: Completion, seed: int) -> None:
        self._given, self._reply = given, reply
        self._rng = np.random.default_rng(seed)

    def stream(self, params: SamplingParams) -> WaitingStream:
        return WaitingStream(self._given, self._reply, self._rng)


class SleepingEnv:
    """Answers after a time that is drawn from a distribution."""

    name: ClassVar[str] = "sleeping"
    is_stochastic = False

    def __init__(self, given: Scenario, rng: np.random.Generator) -> None:
        self.max_turns = given.turns
        self._env_s, self._rng, self._turn = given.env_s, rng, 0

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._turn = 0
        self._sleep()
        return [Message("user", "What time is it?")]

    def step(self, reply: str) -> StepResult:
        self._turn += 1
        self._sleep()
        is_over = self._turn == self.max_turns
        return StepResult(observation="Later than before.", reward=0.0, terminated=is_over)

    def oracle(self) -> str:
        return "wait"

    def close(self) -> None:
        """Nothing is held."""

    def _sleep(self) -> None:
        seconds = float(self._env_s.draw(self._rng, 1)[0])
        if seconds:
            time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Engine:
    """What `roll_out` needs."""

    sampler: Sampler
    renderer: Renderer


class RealRollouts:
    """Rollouts through the real driver, to compare simulated ones with."""

    def __init__(self) -> None:
        self.renderer = Renderer(load_model("nano", torch.device("cpu")).tokenizer)
        ids = self.renderer.reply_ids(REPLY)
        logprobs = np.full(len(ids), -1.0, dtype=np.float32)
        self.reply = Completion(ids, logprobs, FinishReason.STOP)

    def seconds(self, given: Scenario, seed: int) -> float:
        """Of one rollout of a scenario with one replica."""
        return self._roll_out(WaitingSampler(given, self.reply, seed), given, seed)

    def seconds_with(self, sampler: Sampler, given: Scenario, seed: int) -> float:
        """The same with some other sampler."""
        return self._roll_out(sampler, given, seed)

    def processor_s(self, given: Scenario, seed: int) -> float:
        """Of the processor, for a rollout in which nothing is waited for."""
        start = time.process_time()
        self._roll_out(InstantSampler([self.reply]), given, seed)
        return time.process_time() - start

    def driver_turn_s(self, turns: int = 4, num_episodes: int = 256) -> float:
        """What a turn costs the driver, where sampler and environments take no time."""
        given = still(turns, num_episodes)
        seconds = [self.processor_s(given, seed) for seed in range(6)]
        return median(seconds[1:]) / (turns + 0.5) / num_episodes

    def _roll_out(self, sampler: Sampler, given: Scenario, seed: int) -> float:
        make = functools.partial(SleepingEnv, given, np.random.default_rng([seed, 1]))
        task = Task(
            group_id=0,
            env="sleeping",
            make_env=make,
            task_seed=seed,
            episode_seeds=tuple(range(given.episodes)),
        )
        options = RolloutConfig(num_groups=1, group_size=given.episodes, max_context=4096)
        with EnvPool(workers=given.env_calls or given.workers, timeout_s=None) as pool:
            start = time.perf_counter()
            roll_out(
                [task],
                engine=Engine(sampler, self.renderer),
                options=options,
                seed=(seed,),
                pool=pool,
            )
            return time.perf_counter() - start


def still(turns: int, num_episodes: int) -> Scenario:
    """Nothing takes any time."""
    return Scenario(
        workers=1,
        replicas=1,
        episodes=num_episodes,
        turns=turns,
        num_steps=1,
        reply_tokens=Spread(median=1.0),
        env_s=Spread(median=0.0),
        driver_turn_s=0.0,
        step_s=0.0,
        row_s=0.0,
    )
