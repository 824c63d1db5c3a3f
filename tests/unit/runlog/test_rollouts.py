"""Groups come back from disk as they were, and a failed write leaves nothing behind."""

from __future__ import annotations

import resource
import sys
from dataclasses import fields
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from moored.errors import MooredError, RunLogError
from moored.runlog.rollouts import SCHEMA, iter_groups, read_groups, write_groups
from moored.types import Content, Group, Prompt, StopReason, Trajectory, Turn, content_images

pq = pytest.importorskip("pyarrow.parquet")


def turn(prompt=(1, 2), sampled=(3, 4, 5), **options) -> Turn:
    images = options.pop("images", content_images(options.get("seen", "")))
    return Turn(
        prompt=Prompt(np.array(prompt, dtype=np.int64), images),
        completion_ids=np.array(sampled, dtype=np.int64),
        logprobs=np.linspace(-1.0, -0.1, len(sampled), dtype=np.float32),
        **{"reply": "né ♠", "seen": "#_P", **options},
    )


def group(*episodes: tuple[Turn, ...], group_id=7, stop=StopReason.DONE, **options) -> Group:
    trajectories = tuple(
        Trajectory(
            env="toy", task_seed=1 << 39, episode_seed=seed, turns=turns, stop=stop, **options
        )
        for seed, turns in enumerate(episodes)
    )
    return Group(group_id=group_id, env="toy", task_seed=1 << 39, trajectories=trajectories)


def many_kinds() -> list[Group]:
    """Several turns, spans and none, an error, an episode without a turn."""
    first = turn(think_span=(0, 1), answer_span=(1, 2), reward=0.1, policy_version=3)
    later = turn(
        (1, 2, 3, 4, 5, 6),
        (8,),
        reply="",
        is_valid=False,
        reward=-0.2,
        penalty=-0.3,
        observation_start=5,
    )
    failed = group((first,), (), group_id=8, stop=StopReason.ENV_ERROR)
    return [
        group((first, later), (turn(sampled=()),), success=True, metrics={"boxes": 2.0, "x": 0.5}),
        failed,
    ]


def stored(folder: Path, groups: list[Group], **options) -> Path:
    file = folder / "rollouts" / "step_000010.parquet"
    write_groups(file, groups, **{"step": 10, "kept": [True] * len(groups), **options})
    return file


def assert_same(a: object, b: object) -> None:
    """Equal fields all the way down, arrays with their types."""
    assert type(a) is type(b)
    if isinstance(a, Group | Trajectory | Turn):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple) and isinstance(b, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


def test_groups_come_back_as_they_were(tmp_path):
    groups = many_kinds()
    assert_same(tuple(read_groups(stored(tmp_path, groups))), tuple(groups))
    assert read_groups(stored(tmp_path, [])) == []


def test_a_row_is_a_turn_and_tells_all_about_it(tmp_path):
    rows = pq.read_table(stored(tmp_path, many_kinds(), kept=[True, False])).to_pylist()
    assert [(r["group_id"], r["episode"], r["turn"]) for r in rows] == [
        (7, 0, 0),
        (7, 0, 1),
        (7, 1, 0),
        (8, 0, 0),
        (8, 1, None),
    ]
    assert [r["kept"] for r in rows] == [True, True, True, False, False]
    # 0.1 - 0.2 for the first episode; an error has no reward.
    assert [r["trajectory_reward"] for r in rows] == [-0.1, -0.1, 0.0, None, None]
    second = rows[1]
    assert (second["schema"], second["step"], second["stop"]) == (SCHEMA, 10, "done")
    assert second["prompt_ids"] == [1, 2, 3, 4, 5, 6] and second["completion_ids"] == [8]
    assert (rows[0]["think_start"], rows[0]["think_end"]) == (0, 1)
    assert (rows[0]["answer_start"], second["answer_start"]) == (1, None)
    assert (second["turn_reward"], second["turn_penalty"]) == (-0.2, -0.3)
    assert dict(second["metrics"]) == {"boxes": 2.0, "x": 0.5}


def test_groups_can_be_read_one_at_a_time(tmp_path):
    file = stored(tmp_path, many_kinds())
    assert pq.ParquetFile(file).num_row_groups == 2
    assert [g.group_id for g in iter_groups(file)] == [7, 8]
    # A rewritten file may have other row groups, and lack episodes.
    table = pq.read_table(file)
    pq.write_table(table.filter(pq.filters_to_expression([("episode", "==", 1)])), file)
    assert [[t.num_turns for t in g.trajectories] for g in iter_groups(file)] == [[1], [0]]


def test_images_come_back_pixel_by_pixel_in_their_places(tmp_path):
    red, blue = Image.new("RGB", (2, 3), "red"), Image.new("L", (1, 1), 7)
    content: Content = [
        {"type": "image", "image": red},
        {"type": "text", "text": "left, "},
        {"type": "text", "text": "right"},
        {"type": "image", "image": blue},
    ]
    file = stored(tmp_path, [group((turn(seen=content),))])
    back = read_groups(file)[0].trajectories[0].turns[0].seen
    assert not isinstance(back, str)
    assert [part["type"] for part in back] == ["image", "text", "image"]
    assert [part["text"] for part in back if part["type"] == "text"] == ["left, right"]
    images = [cast(Image.Image, image) for image in content_images(back)]
    assert [(image.mode, image.size) for image in images] == [("RGB", (2, 3)), ("L", (1, 1))]
    assert [image.tobytes() for image in images] == [red.tobytes(), blue.tobytes()]
    assert pq.read_table(file).to_pylist()[0]["observation"] == "left, right"


def test_an_image_that_png_cannot_hold_is_stored_as_rgb(tmp_path):
    content: Content = [{"type": "image", "image": Image.new("CMYK", (1, 1), (0, 0, 0, 0))}]
    back = read_groups(stored(tmp_path, [group((turn(seen=content),))]))
    image = content_images(back[0].trajectories[0].turns[0].seen)[0]
    assert cast(Image.Image, image).getpixel((0, 0)) == (255, 255, 255)


def test_a_prompt_gets_back_the_images_of_all_turns_and_of_messages_that_no_turn_answers(tmp_path):
    rule, first, second = (Image.new("RGB", (1, 1), colour) for colour in ("red", "lime", "blue"))
    turns = (
        turn(seen=[{"type": "image", "image": first}], images=(rule, first)),
        turn((1, 2, 3, 4, 5, 6), images=(rule, first)),
        turn((1,) * 9, seen=[{"type": "image", "image": second}], images=(rule, first, second)),
    )
    back = read_groups(stored(tmp_path, [group(turns)]))[0].trajectories[0].turns
    assert [turn.prompt for turn in back] == [turn.prompt for turn in turns]
    assert [len(content_images(turn.seen)) for turn in back] == [1, 0, 1]
    assert back[1].seen == "#_P"


def test_a_full_disk_keeps_the_old_file_and_leaves_no_half_one(tmp_path):
    file = stored(tmp_path, many_kinds())
    before = file.read_bytes()
    noise = np.random.default_rng(0).integers(0, 1 << 30, 50_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(RunLogError, match=r"cannot write .*step_000010"):
            stored(tmp_path, [group((turn(prompt=noise),))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in file.parent.iterdir()] == ["step_000010.parquet"]
    assert file.read_bytes() == before


def test_files_that_are_no_rollouts_are_refused(tmp_path):
    with pytest.raises(MooredError, match="cannot read"):
        read_groups(tmp_path / "none.parquet")
    file = stored(tmp_path, many_kinds())
    table = pq.read_table(file)
    for bad, message in (
        (table.drop_columns(["reply"]), "no column 'reply'"),
        (table.set_column(0, "schema", table["group_id"]), "has schema 7"),
        (table.take([1, 0, 2, 3, 4]), "episode 0 of group 7 lacks turns"),
    ):
        pq.write_table(bad, file)
        with pytest.raises(RunLogError, match=message):
            read_groups(file)
    file.write_bytes(b"PAR1 but torn")
    with pytest.raises(MooredError, match="cannot read"):
        read_groups(file)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MooredError, match=r"pip install 'moored\[data\]'"):
        stored(tmp_path, many_kinds())


def test_files_of_runs_that_did_not_record_where_observations_begin_are_read(tmp_path):
    file = stored(tmp_path, many_kinds())
    pq.write_table(pq.read_table(file).drop_columns(["observation_start"]), file)
    turns = [turn for group in read_groups(file) for t in group.trajectories for turn in t.turns]
    assert [turn.observation_start for turn in turns] == [None] * 4
