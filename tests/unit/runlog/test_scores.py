"""Score matrices in a run directory: few, small, and the same after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from moored.errors import RunLogError
from moored.runlog.log import RunLog, step_of_file
from moored.runlog.scores import MOST, read_scores, stored_scores, write_scores
from moored.types import ScoreMatrix


def matrix(level: float = -0.5) -> ScoreMatrix:
    logp_MN = level - np.arange(6.0).reshape(3, 2)
    return ScoreMatrix(logp_MN=logp_MN, columns_M=np.array([0, 1, 1]), blocks_M=np.array([0, 0, 1]))


def write_looks(path, steps, *, every: int, num_steps: int) -> list[int]:
    path.mkdir(exist_ok=True)
    for step in steps:
        views = {"first_turn": matrix(), "mix/observation_swap": matrix()}
        write_scores(path, step, views, every=every, num_steps=num_steps)
    return [step_of_file(file) for file in stored_scores(path)]


def test_matrices_come_back_in_half_precision(tmp_path):
    stored = matrix(-1 / 3)
    write_scores(tmp_path, 5, {"first_turn": stored, "b/x": matrix()}, every=5, num_steps=10)
    (file,) = stored_scores(tmp_path)
    found = read_scores(file)
    assert list(found) == ["first_turn", "b/x"]
    assert found["first_turn"].logp_MN == pytest.approx(stored.logp_MN, rel=2**-11)
    assert found["first_turn"].columns_M.tolist() == [0, 1, 1]
    assert found["first_turn"].blocks_M.tolist() == [0, 0, 1]
    assert list(file.parent.iterdir()) == [file]


def test_a_run_keeps_its_first_look_the_newest_and_a_few_in_between(tmp_path):
    # 31 looks; every fourth stays: 20, 40, … 140.
    looks = [1, *range(5, 151, 5)]
    kept = write_looks(tmp_path / "a", looks, every=5, num_steps=150)
    assert kept == [1, 20, 40, 60, 80, 100, 120, 140, 150]
    often = write_looks(tmp_path / "b", range(1, 401), every=1, num_steps=400)
    assert often[0] == 1 and often[-1] == 400 and len(often) <= MOST + 2
    assert write_looks(tmp_path / "c", [1, 2, 3], every=1, num_steps=3) == [1, 2, 3]


def test_a_resumed_run_ends_with_the_same_looks(tmp_path):
    whole = write_looks(tmp_path / "a", [1, *range(5, 101, 5)], every=5, num_steps=100)
    log = RunLog(tmp_path / "b")
    write_looks(log.path, [1, *range(5, 71, 5)], every=5, num_steps=100)
    log.rewind(50)
    assert max(step_of_file(file) for file in stored_scores(log.path)) <= 50
    assert write_looks(log.path, range(55, 101, 5), every=5, num_steps=100) == whole
    for step in whole:
        name = f"scores/step_{step:06d}.npz"
        assert (tmp_path / "a" / name).read_bytes() == (log.path / name).read_bytes()


def test_a_look_without_a_matrix_stores_nothing(tmp_path):
    write_scores(tmp_path, 1, {}, every=1, num_steps=5)
    assert not list(tmp_path.iterdir())


def test_a_torn_file_and_one_of_another_version_are_named(tmp_path):
    write_scores(tmp_path, 1, {"first_turn": matrix()}, every=1, num_steps=5)
    (file,) = stored_scores(tmp_path)
    whole = file.read_bytes()
    for torn in (b"", b"PK torn", whole[: len(whole) // 2]):
        file.write_bytes(torn)
        with pytest.raises(RunLogError, match=r"cannot read .*step_000001\.npz"):
            read_scores(file)
    np.savez(file, schema=np.array(9), views=np.array([], dtype=str))
    with pytest.raises(RunLogError, match="has schema 9, this version reads 1"):
        read_scores(file)
