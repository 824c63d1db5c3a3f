"""Processes that play ahead: the same lessons in the same order, whatever happens to them."""

from __future__ import annotations

import json
import pickle
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moored.envs.worker import Worker
from moored.errors import EnvError, MooredError
from moored.models.load import load_tokenizer
from moored.rollout.render import Renderer
from moored.sft import ahead
from moored.sft.ahead import CHUNK, ONE_THREAD, LessonsAhead, make_lessons, num_workers
from moored.sft.options import SftConfig, load_sft_config, settle
from moored.sft.samples import (
    Batch,
    Lesson,
    Lessons,
    OwnLessons,
    PackedLessons,
    next_batch,
    pack_lessons,
)
from moored.sft.source import open_source

pytest.importorskip("transformers")

LESSONS = "tests.unit.sft.lessons"


def options(folder, env: object = f"{LESSONS}:Copy", **more) -> SftConfig:
    return settle(load_sft_config({"model": str(folder), "env": env, **more}))


class KeptWorker(Worker):
    """One that goes on when it is told to stop, since its imports take seconds."""

    def stop(self) -> None:
        pass

    def end(self) -> None:
        super().stop()


@pytest.fixture(scope="module")
def kept_workers():
    words = {"environ": ONE_THREAD, "is_quiet": False}
    workers = [KeptWorker("moored.sft.ahead:make_lessons", **words) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.end()


@pytest.fixture
def kept(kept_workers, monkeypatch):
    """Lessons come from processes that all tests have in common."""
    given = iter(kept_workers)
    monkeypatch.setattr(ahead, "Worker", lambda *_, **__: next(given))


def own_lessons(config: SftConfig) -> OwnLessons:
    assert config.max_context is not None
    renderer = Renderer(load_tokenizer(config.model))
    return OwnLessons(open_source(config), renderer, config.max_context)


def batches(lessons: Lessons, first: int, count: int) -> list[Batch]:
    found: list[Batch] = []
    for _ in range(count):
        found.append(next_batch(lessons, first, batch_tokens=400, max_context=60))
        first = found[-1].next_index
    return found


def content(batch: Batch) -> list[object]:
    """Everything an update reads, comparable."""
    arrays = ("ids_T", "loss_mask_T", "old_logprobs_T", "turn_ends_T", "rewards_T")
    samples = [
        [s.prompt.ids.tolist(), s.images, s.group, s.trajectory, s.is_truncated]
        + [(getattr(s, name).dtype, getattr(s, name).tolist()) for name in arrays]
        for s in batch.samples
    ]
    return [batch.next_index, batch.num_dialogues, batch.num_cut, samples]


def test_workers_change_no_batch_wherever_a_run_begins(kept, tiny_folder):
    mix = [f"{LESSONS}:Taught", {"name": f"{LESSONS}:Copy", "options": {"max_turns": 3}}]
    config = options(tiny_folder, mix, max_context=60, demonstrations={"grounded": 0.5})
    own = own_lessons(config)
    with closing(LessonsAhead(config, 2)) as lessons:
        for first in (0, 1000, 7):
            found, expected = batches(lessons, first, 12), batches(own, first, 12)
            assert found[-1].next_index > first + 4 * CHUNK
            assert sum(batch.num_cut for batch in found) > 0
            assert list(map(content, found)) == list(map(content, expected))
            assert found[0].samples[0].prompt.ids.dtype == np.int64


def play_until_it_fails(lessons: Lessons) -> tuple[int, str]:
    """The number of the lesson that could not be made, and why."""
    index = 0
    with pytest.raises(EnvError) as caught:
        for index in range(1000):
            lessons.lesson(index)
    return index, str(caught.value)


def test_a_failing_environment_says_the_same_after_the_same_lessons(kept, tiny_folder):
    config = options(tiny_folder, f"{LESSONS}:Fragile")
    expected = play_until_it_fails(own_lessons(config))
    assert expected[0] % CHUNK != 0 and "failed while its oracle played task" in expected[1]
    with closing(LessonsAhead(config, 1)) as lessons:
        assert play_until_it_fails(lessons) == expected


def test_an_environment_that_exits_is_named_with_its_text(kept, tiny_folder):
    config = options(tiny_folder, f"{LESSONS}:Leaving")
    expected = play_until_it_fails(own_lessons(config))
    assert expected[1].startswith(f"environment '{LESSONS}:Leaving' failed while its oracle played")
    assert expected[1].endswith(": SystemExit: the licence has expired")
    with closing(LessonsAhead(config, 1)) as lessons:
        assert play_until_it_fails(lessons) == expected


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"name": f"{LESSONS}:Leaving", "options": {"code": 5}}, "exit code 5"),
        (f"{LESSONS}:Deadly", "exit code -9"),
    ],
)
def test_a_process_that_is_lost_again_and_again_is_told(kept, tiny_folder, env, code):
    made = LessonsAhead(options(tiny_folder, env), 1)
    with closing(made) as lessons, pytest.raises(MooredError, match=code) as caught:
        lessons.lesson(3)
    assert "workers=0" in str(caught.value)


def test_a_process_that_is_lost_once_is_replaced(kept, tiny_folder, tmp_path):
    env = {"name": f"{LESSONS}:Deadly", "options": {"file": str(tmp_path / "killed")}}
    config = options(tiny_folder, env)
    with closing(LessonsAhead(config, 1)) as lessons:
        found = batches(lessons, 0, 3)
    assert (tmp_path / "killed").exists()
    assert list(map(content, found)) == list(map(content, batches(own_lessons(config), 0, 3)))


def test_close_ends_the_processes_in_the_middle_of_a_request(tiny_folder):
    lessons = LessonsAhead(options(tiny_folder, f"{LESSONS}:Slow"), 1)
    lessons.lesson(0)
    process = lessons._workers[0]._process
    assert process is not None and process.poll() is None
    lessons.close()
    assert process.poll() is not None


def test_processes_start_when_lessons_are_wanted_and_play_before_one_is_asked_for(tiny_folder):
    unused = LessonsAhead(options(tiny_folder), 1)
    assert unused._workers[0]._process is None
    unused.close()
    with closing(LessonsAhead(options(tiny_folder), 1)) as lessons:
        lessons.begin(7)
        chunk = lessons._chunks[0]
        assert chunk[0] == 7 and len(chunk[1].result(timeout=120.0)) == CHUNK
        lessons.lesson(7)
        assert lessons._chunks[0] is chunk


def test_dialogues_of_a_file_are_rendered_by_workers_too(tiny_folder, tmp_path):
    file = tmp_path / "dialogues.jsonl"
    rows = [{"prompt": f"Letter {x}.", "completion": f"Letter {x}."} for x in "ABCD"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = options(tiny_folder, [], dialogues=str(file))
    own = own_lessons(config)
    made = make_lessons(pickle.dumps(config), 5, 9)
    assert isinstance(made, PackedLessons)
    found = [lesson.samples[0].ids_T.tolist() for lesson in made.unpacked()]
    assert found == [own.lesson(index).samples[0].ids_T.tolist() for index in range(5, 14)]


def test_lessons_are_packed_unless_they_have_pictures(tiny_folder):
    own = own_lessons(options(tiny_folder))
    # A lesson of which no reply fits has no sample.
    lessons = [own.lesson(0), Lesson([], 2), own.lesson(1)]
    packed = pack_lessons(lessons)
    assert isinstance(packed, PackedLessons)
    found = packed.unpacked()
    assert [(len(each.samples), each.num_replies) for each in found] == [
        (len(each.samples), each.num_replies) for each in lessons
    ]
    assert found[2].samples[0].prompt == lessons[2].samples[0].prompt
    seen = Lesson([replace(lessons[0].samples[0], images=("picture",))], 1)
    for plain in ([seen], [Lesson([], 1)], []):
        assert pack_lessons(plain) == plain


@pytest.mark.parametrize(
    ("given", "gpu", "cores", "expected"),
    [
        ({}, None, 16, 0),
        ({}, "H200", 16, 4),
        ({}, "H200", 3, 2),
        ({}, "H200", 1, 0),
        ({"workers": 0}, "H200", 16, 0),
        ({"workers": 6}, None, 2, 6),
        ({"workers": 6, "engine": {"kind": "some.module:Engine"}}, "H200", 16, 0),
    ],
)
def test_there_are_workers_on_a_gpu_or_as_many_as_are_asked_for(
    tiny_folder, monkeypatch, given, gpu, cores, expected
):
    monkeypatch.setattr(ahead, "present_gpu", lambda device: gpu)
    monkeypatch.setattr(ahead, "num_cores", lambda: cores)
    config = load_sft_config({"model": str(tiny_folder), "env": "bandit", **given})
    assert num_workers(config, Renderer(load_tokenizer(str(tiny_folder)))) == expected


def test_a_renderer_that_only_this_process_has_gets_no_workers(tiny_folder):
    config = load_sft_config({"model": str(tiny_folder), "env": "bandit", "workers": 2})
    renderer: object = SimpleNamespace()
    assert num_workers(config, renderer) == 0  # pyright: ignore[reportArgumentType]
