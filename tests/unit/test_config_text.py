"""Mistakes in YAML files are told in one line, with their place."""

from __future__ import annotations

import pytest

from moored.config_text import read_yaml
from moored.errors import ConfigError
from moored.presets import read_presets


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: 1\nrollout:\n\tnum_groups: 2\n", r"line 3, column 1: found character '\\t' .*; "
         "indent with spaces"),
        (b"seed: [1\nx: }\n", "line 2, column 2: expected ',' or ']', but got ':'; correct it"),
        (b"", "must hold keys and values, but it is empty"),
        (b"- 1\n", "must hold keys and values, but it holds a list"),
        (b"\xff\xfe", "is not text in UTF-8; save it again as such"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_yaml_is_told_in_one_line(tmp_path, content, message):
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read_yaml(file)
    assert "\n" not in str(raised.value)


def test_a_folder_in_place_of_a_file_is_called_one(tmp_path):
    (tmp_path / "a.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"a\.yaml' is a folder; give a preset or a \.yaml file"):
        read_presets([str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"did you mean '.*/a\.yaml/config\.yaml'"):
        read_presets([str(tmp_path / "a.yaml")])
