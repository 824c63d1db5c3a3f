"""`moored config` and `moored presets` show what would run."""

from __future__ import annotations

import json

import pytest

from moored.cli.config import config_command
from moored.cli.presets import presets_command
from moored.config import load_config
from moored.errors import UnknownNameError
from moored.models.rates import with_rates
from moored.presets import preset_names, read_presets


def test_the_printed_configuration_reads_back_as_the_same(tmp_path, capsys):
    words = ["smoke", "grpo", "filter.value=0.5"]
    config_command(words)
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    wanted = with_rates(load_config(read_presets(["smoke", "grpo"]), ["filter.value=0.5"]))
    assert load_config(file) == wanted
    config_command(words, as_json=True)
    assert json.loads(capsys.readouterr().out) == wanted.model_dump(mode="json")


def test_a_configuration_that_could_not_run_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'sokoban'"):
        config_command(["smoke", "env=sokobam"])


def test_every_preset_is_listed_with_what_its_first_line_says(capsys):
    presets_command()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    assert "no_filter          Train on every group." in lines
    presets_command(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert list(found) == preset_names()
    assert all(text and not text.startswith("env:") for text in found.values())
