"""Options that change when a run is resumed."""

from __future__ import annotations

import pytest

from moored.config import dump_config, load_config
from moored.errors import ConfigError
from moored.runlog.changes import FIXED, Change, changes_since, flat_options, is_moved


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(load_config(None, ["num_steps=9"])))
    return tmp_path


def changed(run, *options: str) -> dict[str, Change]:
    return changes_since(run, load_config(run / "config.yaml", options))


def test_what_changed_is_named_with_both_values(run):
    assert changed(run) == {}
    assert changed(run, "num_steps=12", "optimizer.lr=1e-5", "seed=0") == {
        "num_steps": Change(9, 12),
        "optimizer.lr": Change(None, 1e-5),
    }


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("seed=1", "tasks and samples of every step derive from it"),
        ("model=mini", "the weights come from the checkpoint"),
        ("env=bandit", "would not be about the same tasks"),
        ("env.0.options.max_turns=3", "would not be about the same tasks"),
        ("algorithm.name=grpo", "what this algorithm trains"),
        ("optimizer.lora_rank=4", "weights of this shape"),
        ("rollout.num_groups=4", "MI depends on the number of prompts"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(run, option, why):
    with pytest.raises(ConfigError) as refused:
        changed(run, option)
    name = option.partition("=")[0]
    name = "env" if name.startswith("env.") else name
    assert str(refused.value).startswith(f"{name} cannot change when a run is resumed (")
    assert why in str(refused.value)
    assert str(refused.value).endswith(f"or start a new run with model={run / 'model'}")


def test_every_fixed_option_exists():
    assert set(FIXED) <= set(flat_options(load_config()))


def test_a_path_may_change_where_its_file_was_moved(tmp_path):
    for name in ("old", "new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").touch()
    old, new = tmp_path / "old" / "rows.jsonl", tmp_path / "new" / "rows.jsonl"
    before = [{"name": "metamath", "options": {"source": str(old), "size": 3}}]
    after = [{"name": "metamath", "options": {"source": str(new), "size": 3}}]
    assert not is_moved(before, after)  # that is another file
    old.unlink()
    assert is_moved(before, after)
    assert not is_moved(before, [{"name": "metamath", "options": {"source": str(new), "size": 4}}])
    assert not is_moved(before, [*after, {"name": "bandit", "options": {}}])
    assert not is_moved(str(old), str(tmp_path / "gone"))
    assert not is_moved("org/name", str(new))  # a hub id is not a path that is gone
    assert is_moved(f"{tmp_path}/gone/a.py:B", f"{new.rename(tmp_path / 'a.py')}:B")


def test_a_relative_path_of_an_older_run_is_one_from_here(tmp_path, monkeypatch):
    (tmp_path / "tuned").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_moved("tuned", str(tmp_path / "tuned"))
    assert not is_moved("nano", str(tmp_path / "tuned"))
