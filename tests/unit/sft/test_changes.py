"""Options that change when a warm start is resumed."""

from __future__ import annotations

import pytest

from moored.errors import ConfigError
from moored.runlog.changes import Change, flat_options
from moored.sft.changes import FREE, changes_since
from moored.sft.options import dump_sft_config, load_sft_config, settle


@pytest.fixture
def run(tmp_path):
    config = settle(load_sft_config({"env": "bandit", "workers": 4}))
    (tmp_path / "config.yaml").write_text(dump_sft_config(config))
    return tmp_path


def changed(run, *options: str) -> dict[str, Change]:
    return changes_since(run, load_sft_config(run / "config.yaml", options))


def test_what_changes_no_number_may_change(run):
    assert changed(run) == {}
    assert changed(run, "workers=2", "checkpoint_every=10", "seed=0", "optimizer.lr=null") == {
        "workers": Change(4, 2),
        "checkpoint_every": Change(50, 10),
    }


@pytest.mark.parametrize(
    "option", ["seed=1", "num_steps=3", "env=sudoku", "optimizer.lr=1", "engine.device=cpu"]
)
def test_what_may_change_a_number_is_refused(run, option):
    with pytest.raises(ConfigError) as refused:
        changed(run, "workers=2", option)
    name = option.partition("=")[0]
    assert str(refused.value).startswith(f"{name} cannot change when a warm start is resumed (")
    assert str(refused.value).endswith(f"or start a new one with model={run / 'model'}")


def test_every_free_option_exists(run):
    assert set(FREE) <= set(flat_options(load_sft_config(run / "config.yaml")))
