"""Processes that play and render dialogues while the model is updated.

A dialogue is a function of its number, so it does not matter which process plays it: the numbers of
a run are the same with any number of workers.
"""

from __future__ import annotations

import pickle
import queue
import signal
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

from moored.cores import num_cores
from moored.engine.gpu import present_gpu
from moored.envs.worker import Worker, WorkerLost
from moored.errors import MooredError
from moored.models.find import embedded_models
from moored.models.load import load_tokenizer, needs_torch_for_tokenizer
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
CLOSING_S = 5.0
"""How long `close` waits for threads whose workers it has killed."""


def num_workers(config: SftConfig, renderer: ReplyRenderer) -> int:
    """As the option `workers` says; none for a renderer that another process cannot make."""
    if config.engine.kind not in ENGINES or type(renderer) is not Renderer:
        return 0
    if config.workers is not None:
        return config.workers
    if present_gpu(config.engine.device) is None:
        return 0
    return max(0, min(MOST_WORKERS, num_cores() - 1))


@dataclass(slots=True, eq=False)
class _Chunk:
    first: int
    lessons: Future[list[Lesson]] = field(default_factory=Future)
    """From number `first` on; fewer than `CHUNK` when a later one cannot be played."""


class LessonsAhead:
    """Lessons that `count` processes make ahead, handed out in the order of their numbers.

    No process is started before `begin` or the first lesson, which may have any number. What a
    process raises is raised when the lesson is asked for that it was raised over, not earlier. All
    methods must be called from one thread.
    """

    def __init__(self, config: SftConfig, count: int) -> None:
        """`config` is settled."""
        self._config = pickle.dumps(config)
        self._wanted: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._chunks: deque[_Chunk] = deque()
        self._is_closed = False
        prepare = import_all if needs_torch_for_tokenizer(config.model) else import_light
        self._workers = [
            Worker(
                f"{__name__}:make_lessons",
                prepare=f"{__name__}:{prepare.__name__}",
                environ=ONE_THREAD,
                is_quiet=False,
            )
            for _ in range(count)
        ]
        self._threads: list[threading.Thread] = []

    def lesson(self, index: int) -> Lesson:
        if not self._chunks or index < self._chunks[0].first:
            self.begin(index)
        while index >= self._chunks[0].first + CHUNK:
            self._chunks.popleft()
            self._want(self._chunks[-1].first + CHUNK)
        chunk = self._chunks[0]
        place, lessons = index - chunk.first, chunk.lessons.result()
        if place < len(lessons):
            return lessons[place]
        # Its turn has come: asked for as the first of a chunk, it says what is wrong with it.
        self.begin(index)
        return self._chunks[0].lessons.result()[0]

    def begin(self, first: int) -> None:
        """Forget what was asked for, and ask for lessons from number `first` on."""
        if not self._threads:
            self._start_threads()
        for chunk in self._chunks:
            chunk.lessons.cancel()
        self._chunks.clear()
        for number in range(CHUNKS_AHEAD * len(self._workers)):
            self._want(first + number * CHUNK)

    def _start_threads(self) -> None:
        for worker in self._workers:
            # Daemons: an environment that hangs must not keep this process from its end.
            thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _want(self, first: int) -> None:
        chunk = _Chunk(first)
        self._chunks.append(chunk)
        self._wanted.put(chunk)

    def _serve(self, worker: Worker) -> None:
        """A thread: pass requests on to one process until the end."""
        try:
            with suppress(MooredError):  # the first request tries again, and says why
                worker.start()
            while (chunk := self._wanted.get()) is not None:
                if not chunk.lessons.set_running_or_notify_cancel():
                    continue
                try:
                    chunk.lessons.set_result(self._ask(worker, chunk.first))
                except Exception as error:
                    chunk.lessons.set_exception(error)
        finally:
            worker.stop()

    def _ask(self, worker: Worker, first: int) -> list[Lesson]:
        lost: WorkerLost | None = None
        for _ in range(ATTEMPTS):
            if self._is_closed:
                break
            try:
                made = worker.ask(self._config, first, CHUNK)
                return made.unpacked() if isinstance(made, PackedLessons) else made
            except WorkerLost as error:
                lost = error
        is_killed = lost is not None and lost.exit_code in (None, -signal.SIGKILL)
        remedy = (
            "the system may have killed it for its memory: lower workers, or set workers=0 to play "
            "in the process that trains"
            if is_killed
            else "the environment, or what it uses, ended it: let it raise an error instead"
        )
        raise MooredError(
            f"a process that plays dialogues was lost {ATTEMPTS} times over numbers {first} to "
            f"{first + CHUNK - 1} ({lost}); {remedy}"
        ) from lost

    def close(self) -> None:
        """Kill the processes; what they were asked for is never answered."""
        self._is_closed = True
        for chunk in self._chunks:
            chunk.lessons.cancel()
        for worker in self._workers:
            self._wanted.put(None)
            worker.stop()
        for thread in self._threads:
            thread.join(CLOSING_S)


def import_light() -> None:
    """In a child, before its first request: a process that replaces a lost one has it all, too.

    Reading any tokenizer imports what each needs: a second, and memory that both processes share.
    """
    load_tokenizer(min(embedded_models()))


def import_all() -> None:
    """Import what transformers needs to find a tokenizer by the model's configuration."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(
        min(embedded_models().values()), local_files_only=True, trust_remote_code=False
    )


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
