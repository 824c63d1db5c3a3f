"""Registries import late and answer typos with a close match."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest

from moored.errors import UnknownNameError
from moored.registry import Registry, import_object

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


def test_a_missing_dependency_inside_a_module_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        import_object("needs_more:thing")
