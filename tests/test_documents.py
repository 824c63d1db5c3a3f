"""README and examples run as they are printed; documents name only what exists."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moored import __version__
from moored.config import Config
from moored.config_engine import Section
from moored.reply import format_reply
from moored.runlog.log import read_records
from moored.sft.options import SftConfig, SftEnvConfig
from tests.warm import run_script, run_warm

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        ROOT / "recipes" / "README.md",
    ]
)
named = pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())


def shown(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_readme_is_short_and_its_example_prints_what_it_says():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 88
    (example,) = blocks("README.md", "python")
    kept, reason = shown(run_warm([], code=example, cwd=ROOT)).splitlines()
    assert f"# {kept}: train on these prompts" in example
    assert reason.startswith("Std/Mean of RV is")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `moored …` in this process, in a folder of its own."""
    from moored.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def run_command(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["moored", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code, (words, capsys.readouterr().err)

    yield run_command
    # Modules of the folder: another test may have some of the same name.
    for name in set(sys.modules) - known:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).parent == tmp_path:
            del sys.modules[name]


SMALLER = {
    "moored train": "num_steps=1 rollout.num_groups=4 rollout.group_size=2 "
    "rollout.max_response_tokens=40 env.0.options.max_turns=1 collapse.every=0 evaluation.every=0 "
    "model=nano",
    "moored sft": "num_steps=1 batch_tokens=600 evaluation.num_tasks=2 evaluation.num_dialogues=2 "
    "evaluation.max_response_tokens=4",
    "moored sft --resume": "",
    "moored eval": "-n 2 --max-tokens 12",
    "moored diagnose rollouts.parquet": "--model nano",
}
"""What is added to a command so that it takes seconds and needs no download."""


def test_the_commands_of_the_readme_run(command, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "my_env.py").write_text(blocks("docs/write-your-own-environment.md", "python")[0])
    rows = [{"prompt": f"{k % 4}", "response": "a", "reward": k % 3} for k in range(16)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    lines = [line for line in lines if line.startswith("moored ")]
    assert len(lines) == 10
    # Training first: the other commands read what it leaves.
    for line in sorted(lines, key=lambda line: not line.startswith("moored train")):
        more = next((more for start, more in SMALLER.items() if line.startswith(start)), "")
        if "rollouts.parquet" in line:
            (stored,) = (tmp_path / "runs" / "sokoban-grpo" / "rollouts").iterdir()
            (tmp_path / "rollouts.parquet").write_bytes(stored.read_bytes())
        command([*shlex.split(line, comments=True)[1:], *more.split()])
    assert (tmp_path / "page.html").is_file()


def test_the_commands_of_the_page_on_own_environments_run(command, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    page = "docs/write-your-own-environment.md"
    monkeypatch.setattr(sys, "stdin", io.StringIO("drow\n"))
    (tmp_path / "my_env.py").write_text(blocks(page, "python")[0])
    (tmp_path / "mix.yaml").write_text(blocks(page, "yaml")[0])
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert [line.split()[1] for line in lines] == [
        *("play", "check-env", "train", "train", "eval", "diagnose")
    ]
    for line in lines:
        more = next((more for start, more in SMALLER.items() if line.startswith(start)), "")
        more += " num_steps=2" if "--resume" in line else ""
        command([*shlex.split(line, comments=True)[1:], *more.split()])
    assert [record["step"] for record in read_records(tmp_path / "runs" / "grpo")] == [1, 2]
    command(["config", "grpo", "mix.yaml"])


def test_the_first_commands_of_the_training_page_run_in_their_order(command, tmp_path):
    pytest.importorskip("transformers")
    lines = blocks("docs/training.md", "sh")[0].splitlines()
    assert len(lines) == 10
    for line in lines:
        more = next((more for start, more in SMALLER.items() if line.startswith(start)), "")
        more += " num_steps=2" if "--resume" in line else ""
        command([*shlex.split(line, comments=True)[1:], *more.split()])
    assert len(read_records(tmp_path / "runs" / "sokoban-grpo")) == 2


def test_the_commands_of_the_page_on_warm_starts_run_in_their_order(command, tmp_path):
    pytest.importorskip("transformers")
    lines = blocks("docs/sft.md", "sh")[0].splitlines()
    assert len(lines) == 6
    row = {"prompt": "Where?", "completion": format_reply("Here.", "Up")}
    (tmp_path / "lessons.jsonl").write_text(json.dumps(row) + "\n")
    for line in lines:
        more = max((start for start in SMALLER if line.startswith(start)), key=len)
        words = line.replace("org/name", "nano")
        # A Sudoku of one turn would need fewer blanks.
        fewer = {"env.0.options.max_turns=1": "rollout.num_groups=2", "tokens 12": "tokens 8"}
        options = SMALLER[more]
        for option, other in fewer.items():
            options = options.replace(option, other)
        command([*shlex.split(words, comments=True)[1:], *options.split()])
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"sft-nano", "sft-nano-2", "sft-nano-3", "grpo"}


def test_the_commands_of_the_page_on_plans_print_what_it_shows(command, capsys):
    lines = blocks("docs/plan.md", "sh")[0].splitlines()
    assert len(lines) == 4
    printed = ""
    for line in lines:
        command(shlex.split(line, comments=True)[1:])
        printed += capsys.readouterr().out
    (shown,) = blocks("docs/plan.md", "text")
    assert {line for line in shown.splitlines() if line != "…"} <= set(printed.splitlines())


def test_the_seams_of_the_architecture_page_can_be_used_as_shown(command, tmp_path):
    pytest.importorskip("transformers")
    (mine,) = blocks("docs/architecture.md", "python")
    (tmp_path / "mine.py").write_text(mine)
    (lines,) = blocks("docs/architecture.md", "sh")
    few = ["num_steps=1", "collapse.every=0", "evaluation.every=0", "rollout.max_response_tokens=8"]
    for line in lines.splitlines():
        command([*line.split()[1:], *few, "filter.keep_zero=true"])
    assert len(list((tmp_path / "runs").iterdir())) == len(lines.splitlines()) == 3


def test_the_index_of_the_documentation_links_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "results").glob("*.md")]
    names = [page.relative_to(ROOT / "docs").as_posix() for page in pages]
    assert [name for name in names if f"({name}" not in index] == ["README.md"]


@named
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file), target


def headings(page: Path) -> list[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found]


@named
def test_every_file_that_a_document_names_exists(page):
    """A name with a folder: from the root, inside the package, or next to the page."""
    text = page.read_text()
    names = re.findall(r"(?<![\w/.*-])((?:[\w-]+/)+[\w-]+\.(?:py|yaml|json|md|svg))\b", text)
    for name in names:
        if not name.startswith("runs/"):
            places = (ROOT, ROOT / "moored", page.parent)
            assert any((place / name).exists() for place in places), name


def test_every_torchrun_command_of_a_document_leaves_run_to_moored():
    """Without `--` before `moored` torchrun takes `--run` for an option of its own."""
    parse = pytest.importorskip("torch.distributed.run").parse_args
    found = []
    for page in DOCUMENTS:
        shell = "".join(blocks(page.relative_to(ROOT).as_posix(), "sh"))
        for line in shell.replace("\\\n", " ").splitlines():
            if line.startswith("torchrun "):
                own = [*shlex.split(line)[1:], "--run", "folder"]
                asked = parse(own)
                assert (asked.module, asked.training_script) == (True, "moored"), line
                assert asked.training_script_args == own[own.index("moored") + 1 :]
                found.append(page.name)
    assert found.count("torchrun.md") == 4


@named
def test_every_module_and_name_of_the_package_in_a_document_exists(page):
    for name in re.findall(r"(?<![\w.])moored(?:\.[A-Za-z_]\w*)+", page.read_text()):
        assert exists(name), name


def exists(name: str) -> bool:
    """True when `package.module.attribute` exists; read, not imported, because verl is slow."""
    place, parts = ROOT / "moored", name.split(".")[1:]
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    if not parts:
        return True
    file = place / "__init__.py" if place.is_dir() else place
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return bool({parts[0]} & {name for node in body for name in names_of(node)})


def names_of(node: ast.stmt) -> list[str]:
    """What a statement of a module defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def test_the_check_of_names_sees_one_that_is_not_there():
    assert exists("moored.algo.select_groups") and exists("moored.rollout.pool.EnvPool")
    assert not exists("moored.algo.select_grops") and not exists("moored.rollouts.pool")


VERL_OPTIONS = {"algorithm.adv_estimator", "rollout.n"}


@named
def test_every_option_that_a_document_names_exists(page):
    text = page.read_text()
    known = options_of(Config())
    if "moored sft" in text:
        for section, names in options_of(SftConfig(env=[SftEnvConfig(name="bandit")])).items():
            known[section] = known.get(section, set()) | names
    pattern = rf"(?<![\w./])({'|'.join(known)})\.(\w+)(?:=|`)"
    for section, option in re.findall(pattern, text):
        is_file = option in ("yaml", "jsonl")
        if not is_file and f"{section}.{option}" not in VERL_OPTIONS:
            assert option in known[section], f"{section}.{option}"


def options_of(config: Config | SftConfig) -> dict[str, set[str]]:
    """Names of the options of each section."""
    return {name: set(type(x).model_fields) for name, x in config if isinstance(x, Section)}


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(script):
    assert shown(run_script(script, cwd=ROOT)).strip()


def test_the_example_tells_health_from_collapse():
    text = shown(run_script(ROOT / "examples" / "00_select_and_diagnose.py", cwd=ROOT))
    assert "train on prompts [0, 2, 5]" in text
    assert "healthy: diverse" in text
    assert "collapsed: template_collapse" in text


def test_every_example_is_listed_and_numbered_without_a_gap():
    names = [path.name for path in sorted((ROOT / "examples").glob("*.py"))]
    assert [name[:3] for name in names] == [f"{number:02d}_" for number in range(len(names))]
    text = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"\[(\S+\.py)\]\(\1\)", text) == names


def test_the_newest_version_is_in_the_changelog_and_the_citation():
    version = __version__.partition(".dev")[0]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert "2604.06268" in citation["references"][0]["url"]
