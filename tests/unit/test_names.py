"""Registries import late and answer typos with a close match."""

from __future__ import annotations

import pickle
import sys
import zlib
from fractions import Fraction
from typing import Any

import pytest

from moored.errors import UnknownNameError
from moored.names import Registry, import_object

SHAPES = Registry("shape", {"circle": "fractions:Fraction", "square": "no_such_module:Square"})


def test_names_and_paths_resolve():
    assert SHAPES.get_object("circle") is Fraction
    assert SHAPES.get_object("fractions:Fraction") is Fraction
    assert list(SHAPES) == ["circle", "square"]


def test_nothing_is_imported_before_it_is_asked_for():
    Registry("shape", {"cube": "antigravity:x"})
    assert "antigravity" not in sys.modules


def test_a_typo_gets_a_close_match():
    with pytest.raises(UnknownNameError, match="did you mean 'circle'"):
        SHAPES.get_object("cirle")
    with pytest.raises(UnknownNameError, match="choose one of circle, square"):
        SHAPES.get_object("zzz")


def test_wrong_paths_say_which_half_is_wrong():
    with pytest.raises(UnknownNameError, match="no module named 'no_such_module'"):
        SHAPES.get_object("square")
    with pytest.raises(UnknownNameError, match="did you mean 'Fraction'"):
        import_object("fractions:Fractoin")
    with pytest.raises(UnknownNameError, match=r"package\.module:attribute"):
        import_object("fractions:")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import absent_dependency\n", r"ModuleNotFoundError at .*:1: .*; install absent_dep"),
        ("x = 1\ndef f(:\n", r"SyntaxError: .*faulty_\d+\.py, line 2"),
        ("\n\nx = 1 / 0\n", r"ZeroDivisionError at faulty_\d+\.py:3: division by zero"),
        ("import sys\nsys.exit(3)\n", r"SystemExit at faulty_\d+\.py:2: 3"),
        ("import json\njson.loads('{')\n", r"JSONDecodeError at faulty_\d+\.py:2: Expecting"),
        ("raise ValueError('two\\nlines')\n", "two lines; fix"),
        ("x = 1\0", "SyntaxError: source code string cannot contain null bytes"),
    ],
)
def test_a_module_that_fails_to_import_is_explained_in_one_line(
    tmp_path, monkeypatch, code, problem
):
    name = f"faulty_{abs(zlib.crc32(code.encode()))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnknownNameError, match=problem) as caught:
        import_object(f"{name}:thing")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_file_stands_for_its_module_and_pickles_find_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_game_in_a_folder", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "own_game_in_a_folder.py").write_text("class Game:\n    pass\n")
    game: Any = import_object("games/own_game_in_a_folder.py:Game")
    assert game.__module__ == "own_game_in_a_folder"
    assert type(pickle.loads(pickle.dumps(game()))) is game
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert import_object(f"{tmp_path}/games/own_game_in_a_folder.py:Game") is game


def test_a_file_that_is_not_there_or_has_the_name_of_another_module_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "json.py").write_text("Game = 1\n")
    with pytest.raises(UnknownNameError, match="give the file another name"):
        import_object(f"{tmp_path}/json.py:Game", kind="environment")
    with pytest.raises(UnknownNameError, match=r"there is no file 'games/none\.py'"):
        import_object("games/none.py:Game", kind="environment")
