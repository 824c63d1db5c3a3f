"""Import layers: a module may import only what stands to its left, never a sibling.

`types errors names config reply json_http cores` <- `algo diagnostics envs runlog files` <-
`rollout training models engine/base engine/gpu engine/checkpoint` <- `engine/*` <-
`train recovery evaluate sft` <- `cli` <- `__main__`.
`plan` is for people: commands and studies alone ask it, no engine does.
`envs` read `files`, `analysis` reads `runlog` and `files`, and groups rows as `integrations` do;
`studies` start runs as processes of their own and read them with `analysis`; `integrations` use
`algo` and `diagnostics` alone.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moored"
BASE = {"types", "errors", "names", "reply", "json_http", "cores"}
BASE |= {"config", "config_engine", "config_rules", "config_text"}
MATHS = BASE | {"algo", "diagnostics", "envs", "runlog", "files"}
PARTS = MATHS | {"rollout", "training", "models", "engine.base"}
ENGINES = PARTS | {"engine"}
LOOPS = ENGINES | {"train", "recovery", "evaluate", "sft"}
ANALYSIS = BASE | {"runlog", "files", "algo", "diagnostics", "analysis"}

ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "algo": BASE,
    "diagnostics": BASE,
    "envs": BASE | {"files"},
    "runlog": BASE,
    "files": BASE | {"runlog"},
    **dict.fromkeys(PARTS - MATHS, PARTS),
    "engine": LOOPS,
    **dict.fromkeys(LOOPS - ENGINES, LOOPS),
    "analysis": ANALYSIS | {"engine", "engine.base", "models", "integrations"},
    "integrations": BASE | {"algo", "diagnostics"},
    "plan": PARTS,
    "presets": BASE,
    "studies": ANALYSIS | {"presets", "models", "plan"},
    "cli": LOOPS | {"analysis", "plan", "presets", "studies"},
    "__main__": {"cli", "engine"},
}
"""Layer of a module -> layers it may import."""

NO_ENGINE = (
    *("engine.base", "engine.checkpoint", "engine.gpu", "engine.fast.buckets"),
    *("engine.fsdp.whole", "engine.local.batches"),
)

HEAVY = {"torch", "transformers", "ray", "vllm", "peft", "trl", "verl"}
LIGHT = MATHS | {"plan", "integrations", "analysis", "studies"}
SUBCLASSES = {
    "analysis.scorers",
    "runlog.sinks",
    "integrations.trl",
    "integrations.trl_collapse",
    "integrations.trl_empty",
    "integrations.trl_scoring",
    "integrations.verl_collapse",
    "integrations.verl_trainer",
    "studies.ray_cluster",
}
"""Modules that extend or make objects of the heavy package they are named after."""


def layer_of(module: str) -> str:
    """The modules of `engine` that know no engine are a layer of their own."""
    is_base = any(f"{module}.".startswith(f"{name}.") for name in NO_ENGINE)
    return "engine.base" if is_base else module.split(".")[0]


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Imports and functions, with those inside of others."""
    wanted = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, wanted)]


def imports_of(file: Path) -> list[str]:
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports from the package root"
            found.append(node.module or "")
            # `from moored import cli` names a module too.
            if node.module == "moored":
                found += [f"moored.{alias.name}" for alias in node.names]
    return found


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_module_imports_only_lower_layers(file):
    layer = layer_of(module_name(file))
    assert layer in ALLOWED, f"give {layer} a place in ALLOWED"
    for name in imports_of(file):
        if name.startswith("moored.") and name != "moored.__version__":
            imported = layer_of(name.removeprefix("moored."))
            assert imported in ALLOWED[layer] | {layer}, f"{layer} must not import {name}"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_light_layers_never_import_heavy_packages(file):
    name = module_name(file)
    if layer_of(name) in LIGHT and name not in SUBCLASSES:
        heavy = {name.split(".")[0] for name in imports_of(file)} & HEAVY
        assert not heavy


def test_the_check_sees_a_violation(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from moored.algo import grpo\n    from moored import cli\n")
    assert imports_of(file) == ["moored.algo", "moored", "moored.cli"]


LONGEST_FUNCTION = 60
"""Lines, kernels excepted: they are one expression for a compiler."""


def test_no_function_is_longer_than_60_lines_but_kernels():
    long = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                is_jit = any(".jit" in ast.unparse(each) for each in node.decorator_list)
                is_kernel = is_jit or file.name.endswith("kernels.py")
                if num_lines > LONGEST_FUNCTION and not is_kernel:
                    long.append(f"{file.relative_to(PACKAGE)}: {node.name}, {num_lines} lines")
    assert not long
