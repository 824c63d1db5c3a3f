"""`moored config` and `moored presets` show what would run."""

from __future__ import annotations

import json
import re

import pytest

from moored.cli.config import config_command
from moored.cli.option_docs import all_options
from moored.cli.presets import presets_command
from moored.config import load_config
from moored.errors import ConfigError, UnknownNameError
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


def test_presets_are_listed_by_kind_each_with_its_first_line(capsys):
    presets_command()
    out = capsys.readouterr().out
    blocks = {block.partition(":")[0]: block.splitlines()[1:] for block in out.split("\n\n")}
    assert "  no_filter          Train on every group." in blocks["Filters"]
    assert [line.split()[0] for line in blocks["Filters"]] == ["no_filter", "trajectory_filter"]
    assert "  grpo " in "\n".join(blocks["Algorithms"])
    listed = [line.split()[0] for lines in blocks.values() for line in lines if line[:2] == "  "]
    assert sorted(listed) == preset_names()
    presets_command(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert list(found) == preset_names()
    assert found["sokoban"]["kind"] == "environment"
    assert all(row["summary"] and not row["summary"].startswith("env:") for row in found.values())


def test_config_alone_lists_every_option_with_its_meaning(capsys):
    config_command()
    out = capsys.readouterr().out
    for option in all_options().values():
        key = option.name.rpartition(".")[2]
        assert re.search(rf"^[- ]*{key}:", out, re.MULTILINE), option.name
    assert "  num_groups: 8  # P: prompts per step." in out.splitlines()
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("option", all_options().values(), ids=lambda option: option.name)
def test_every_option_says_what_it_means(option):
    assert len(option.doc) > 5
    assert option.doc.endswith(".")


def test_an_option_is_explained_with_kind_default_and_value(capsys):
    config_command(["smoke", "filter.eps=0.5", "filter.eps", "rollout.num_groups"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "filter.eps=0.5"
    assert lines[2] == "  a number, at least 0; default 0.0"
    assert lines[3] == "rollout.num_groups=2"
    assert lines[5] == "  a whole number, at least 1; default 8"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("filter.action", "one of 'drop', 'mask', 'refill', 'soft'"),
        ("engine.kind", "one of local, torchrun, ray, endpoint, or module:attribute"),
        ("collapse.ema_decay", "a number, at least 0, below 1"),
        ("env", "a list of environments"),
        ("optimizer.lr", "a number or null, above 0"),
    ],
)
def test_the_kind_of_an_option_names_choices_and_bounds(name, kind):
    assert all_options()[name].kind == kind


def test_a_section_is_explained_with_all_its_options(capsys):
    config_command(["stop"])
    out = capsys.readouterr().out
    assert out.startswith("stop: When a run ends early.\n")
    names = ["low_variance", "min_success", "alarm"]
    assert [line.partition("=")[0] for line in out.splitlines() if line.startswith("stop.")] == [
        f"stop.{name}" for name in names
    ]


@pytest.mark.parametrize("name", ["filter.valeu", "filtr.value"])
def test_a_misspelt_option_is_corrected(name):
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; did you mean 'filter.value'"):
        config_command([name])
