"""Processes that play and render dialogues while the model is updated.

A dialogue is a function of its number, so it does not matter which process plays it: the numbers of
a run are the same with any number of workers.
"""

from __future__ import annotations

import pickle
import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

from moored.cores import num_cores
from moored.engine.gpu import present_gpu
from moored.envs.worker import Worker, WorkerLost
from moored.errors import MooredError
from moored.models.load import load_tokenizer
from moored.names import ENGINES
from moored.rollout.render import Renderer
from moored.sft.options import SftConfig
from moored.sft.samples import Lesson, OwnLessons, PackedLessons, ReplyRenderer, pack_lessons
from moored.sft.source import open_source

MOST_WORKERS = 4
"""Unless the option says otherwise: one plays 300,000 tokens per second in small games."""
CHUNK = 16
"""Dialogues of one request: where they are slow, the first step waits for that many."""
CHUNKS_AHEAD = 8
"""Requests per worker that are under way or done and not yet used."""
ATTEMPTS = 2
"""A worker may be lost by accident, e.g. to a signal that was meant for the whole job."""
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def num_workers(config: SftConfig, renderer: ReplyRenderer) -> int:
    """As the option `workers` says; none for a renderer that another process cannot make."""
    if config.engine.kind not in ENGINES or type(renderer) is not Renderer:
        return 0
    if config.workers is not None:
        return config.workers
    if present_gpu(config.engine.device) is None:
        return 0
    return max(0, min(MOST_WORKERS, num_cores() - 1))


class LessonsAhead:
    """Lessons that `count` processes make ahead, handed out in the order of their numbers.

    No process is started before `begin` or the first lesson, which may have any number. What a
    process raises is raised when the lesson is asked for that it was raised over, not earlier. All
    methods must be called from one thread.
    """

    def __init__(self, config: SftConfig, count: int) -> None:
        """`config` is settled."""
        self._config = pickle.dumps(config)
        self._workers = [
            Worker(f"{__name__}:make_lessons", environ=ONE_THREAD, is_quiet=False)
            for _ in range(count)
        ]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)
        self._chunks: deque[tuple[int, Future[list[Lesson]]]] = deque()
        """The first number of each, and lessons from there on: fewer than `CHUNK` when a later one
        cannot be made."""
        self._is_closed = False

    def lesson(self, index: int) -> Lesson:
        if not self._chunks or index < self._chunks[0][0]:
            self.begin(index)
        while index >= self._chunks[0][0] + CHUNK:
            self._chunks.popleft()
            self._want(self._chunks[-1][0] + CHUNK)
        first, made = self._chunks[0]
        if index - first < len(made.result()):
            return made.result()[index - first]
        # Its turn has come: asked for as the first of a chunk, it says what is wrong with it.
        self.begin(index)
        return self._chunks[0][1].result()[0]

    def begin(self, first: int) -> None:
        """Forget what was asked for, and ask for lessons from number `first` on."""
        for _, made in self._chunks:
            made.cancel()
        self._chunks.clear()
        for number in range(CHUNKS_AHEAD * len(self._workers)):
            self._want(first + number * CHUNK)

    def _want(self, first: int) -> None:
        self._chunks.append((first, self._threads.submit(self._make, first)))

    def _make(self, first: int) -> list[Lesson]:
        """In a thread: pass a request on to a process that is idle."""
        worker, lost = self._idle.get(), None
        try:
            for _ in range(ATTEMPTS):
                if self._is_closed:
                    break
                try:
                    made = worker.ask(self._config, first, CHUNK)
                    return made.unpacked() if isinstance(made, PackedLessons) else made
                except WorkerLost as error:
                    lost = error
        finally:
            self._idle.put(worker)
        raise MooredError(
            f"a process that plays dialogues was lost {ATTEMPTS} times over numbers {first} to "
            f"{first + CHUNK - 1} ({lost}); if the system killed it for its memory, lower workers, "
            f"or set workers=0; if the environment ended it, let it raise an error instead"
        ) from lost

    def close(self) -> None:
        """Kill the processes; what they were asked for is never answered."""
        self._is_closed = True
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)


def make_lessons(config: bytes, first: int, count: int) -> PackedLessons | list[Lesson]:
    """In a child: the lessons from number `first` on, up to one that cannot be made.

    `config` is pickled, as the key under which environments and tokenizer stay open. Raises what
    goes wrong over the first.
    """
    lessons, made = _open_lessons(config), []
    for index in range(first, first + count):
        try:
            made.append(lessons.lesson(index))
        except Exception:
            if not made:
                raise
            break
    return pack_lessons(made)


@lru_cache(maxsize=1)
def _open_lessons(pickled: bytes) -> OwnLessons:
    config: SftConfig = pickle.loads(pickled)
    assert config.max_context is not None
    renderer = Renderer(load_tokenizer(config.model))
    return OwnLessons(open_source(config), renderer, config.max_context)
