"""The maths imports without torch, transformers and other heavy packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moored.errors import EXTRA_OF_PACKAGE, explain_failure
from moored.runlog.sinks import SINKS

ROOT = Path(__file__).parent.parent
HEAVY = ["torch", "transformers", "PIL", "pyarrow", "gymnasium", "trl", "verl"]

PROBE = """
import sys
import moored.algo, moored.diagnostics, moored.envs, moored.runlog.log, moored.config
for name in moored.envs.ENVIRONMENTS:
    moored.envs.ENVIRONMENTS.get_object(name)
print(",".join(name for name in {heavy!r} if name in sys.modules))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout.strip()


def test_importing_the_maths_pulls_in_nothing_heavy():
    assert run(PROBE.format(heavy=HEAVY)) == ""


def test_the_probe_sees_a_heavy_import():
    assert run("import PIL\n" + PROBE.format(heavy=HEAVY)) == "PIL"


def test_base_dependencies_are_the_slim_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    light = {"httpx2", "jinja2", "numpy", "pydantic", "pyyaml", "rapidfuzz", "rich", "typer"}
    assert names == light


def test_every_extra_has_a_user_and_every_hint_an_extra():
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    sources = [*(ROOT / "moored").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    hinted = {
        name for names in re.findall(r"moored\[([a-z,]+)\]", text) for name in names.split(",")
    }
    # The hint of a sink is made from its name.
    assert hinted | set(SINKS) | {"dev"} == extras


def test_what_readme_says_reads_runs_without_torch_has_what_that_needs():
    (extra,) = re.findall(
        r"`pip install '\.\[(\w+)\]'` does without torch", (ROOT / "README.md").read_text()
    )
    assert packages_of(extra) == {"pyarrow", "plotly"}
    assert "torch" in packages_of("train")


def packages_of(extra: str) -> set[str]:
    """What an extra installs, with the extras in it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = set()
    for requirement in extras[extra]:
        name, more = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # pyright: ignore
        if name == "moored":
            found |= set().union(*map(packages_of, more.split(",")))
        else:
            found.add(name)
    return found


WALK = """
import contextlib, io, json, sys, traceback
packages, commands = json.loads(sys.argv[1])
for name in packages:
    sys.modules[name] = None  # as if it were not installed
from moored.cli.main import main
found = []
for words in commands:
    sys.argv, out, err = ["moored", *words], io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            code = "traceback"
            traceback.print_exc()
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
COMMANDS = ["train", "eval", "diagnose", "advise", "compare", "play", "envs", "check-env", "models"]
COMMANDS += ["presets", "config"]
WORKS = [
    *([command, "--help"] for command in COMMANDS),
    ["envs"],
    ["models"],
    ["presets"],
    ["config", "smoke"],
    ["config", "smoke", "optimizer.lora_rank=4"],
    ["play", "sokoban", "--oracle"],
    ["play", "metamath", "--oracle"],
    ["play", "webshop", "--oracle"],
    ["advise", "rollouts.jsonl"],
]
AT_SERVER = ["--endpoint", "http://localhost:1/v1"]
NEEDS = [
    ("train", ["train", "smoke"]),
    ("train", ["train", "smoke", "env=bandit", "optimizer.lora_rank=4", "--run", "mine"]),
    ("train", ["eval", "nano", "--env", "bandit"]),
    ("train", ["diagnose", "rollouts.jsonl", "--model", "nano"]),
    ("train", ["diagnose", "rollouts.jsonl", "--model", "x", *AT_SERVER, "--tokenizer", "nano"]),
    ("data", ["advise", "rollouts.parquet"]),
    ("data", ["diagnose", "rollouts.parquet", "--model", "nano"]),
    ("data", ["play", "metamath", "-o", "source=rollouts.parquet"]),
    ("images", ["play", "sokoban", "--image", "--oracle"]),
    ("images", ["play", "frozen_lake", "-o", "view=image"]),
    ("math", ["play", "metamath", "-o", "math_verify=true"]),
    ("gym", ["play", "gymnasium", "-o", "env=CartPole-v1"]),
    ("gym", ["play", "reasoning_gym"]),
    ("serve", ["play", "webshop", "--web"]),
    ("gym", ["train", "smoke", "env=reasoning_gym"]),
    ("search", ["play", "search", "--oracle"]),
    ("search", ["train", "search"]),
    ("dense", ["play", "search", "-o", "retriever=dense", "-o", "embedding_model=x"]),
    ("serve", ["serve-search"]),
    ("smollm", ["train", "smoke", "model=smollm2"]),
    *((sink, ["train", "smoke", f"log.sinks=[{sink}]"]) for sink in SINKS),
]
ROW = {"prompt": "a", "response": "<think>b</think><answer>c</answer>", "reward": 1, "step": 1}


def walk(tmp_path: Path, packages: list[str], commands: list[list[str]]) -> list[list]:
    """Exit code, output and errors of commands where packages are missing."""
    rows = [{**ROW, "prompt": f"p{i % 2}", "reward": i % 3} for i in range(8)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rollouts.parquet").write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")
    arguments = json.dumps([packages, commands])
    done = subprocess.run(
        [sys.executable, "-c", WALK, arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_command_that_needs_no_extra_works_without_any(tmp_path):
    for words, (code, _, err) in zip(
        WORKS, walk(tmp_path, list(EXTRA_OF_PACKAGE), WORKS), strict=True
    ):
        assert (code, err) == (0, ""), words


def test_a_missing_extra_is_one_line_that_says_what_to_install(tmp_path):
    commands = [words for _, words in NEEDS]
    found = walk(tmp_path, list(EXTRA_OF_PACKAGE), commands)
    for (extra, words), (code, _, err) in zip(NEEDS, found, strict=True):
        assert code == 2, (words, err)
        assert err.startswith("moored: ") and err.count("\n") == 1, (words, err)
        assert f"pip install 'moored[{extra}]'" in err, (words, err)
    assert not any((tmp_path / "runs").glob("*")) and not (tmp_path / "mine").exists()


def test_a_package_of_an_extra_missing_alone_is_told_before_the_run_begins(tmp_path):
    wanted = {"transformers": "train", "safetensors": "train", "pyarrow": "data"}
    for package, extra in wanted.items():
        ((code, _, err),) = walk(tmp_path, [package], [["train", "smoke", "num_steps=1"]])
        assert code == 2 and err.count("\n") == 1, err
        assert package in err and f"pip install 'moored[{extra}]'" in err
        assert not any((tmp_path / "runs").glob("*"))


def test_every_package_of_an_extra_has_its_hint():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(EXTRA_OF_PACKAGE.values()) == set(extras) - {"dev"}


def test_a_package_that_is_missing_deep_inside_is_told_too():
    error = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet")
    assert explain_failure(error) == (
        "pyarrow cannot be imported (No module named 'pyarrow'); run: pip install 'moored[data]'"
    )
    assert explain_failure(ModuleNotFoundError("No module named 'x'", name="x")) is None


def test_memory_that_runs_out_anywhere_on_a_gpu_is_one_sentence():
    torch = pytest.importorskip("torch")
    told = explain_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …"))
    assert told is not None and told.startswith("out of GPU memory; lower")
