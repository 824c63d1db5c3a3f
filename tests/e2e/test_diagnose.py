"""`moored diagnose` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.models.find import embedded_models
from moored.runlog.log import read_records
from tests.warm import run_warm

ROW = '{"prompt": "x", "response": "y"}\n'
IDS = (
    '{"prompt": [9], "response": [9999], "think_start": 0, "think_end": 1}\n'
    '{"prompt": [8], "response": [1], "think_start": 0, "think_end": 1}\n'
)


def moored(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_warm(arguments, env={"COLUMNS": "130"})
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done


TEMPERATURE = 0.6


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of `nano` that measured both its steps, and stored their rollouts."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("diagnose") / "run"
    options = ["log.rollouts_every=1", "rollout.num_groups=4", "evaluation.every=0"]
    options += ["collapse.every=1", "collapse.num_pairs=64", "checkpoint_every=1"]
    options += ["rollout.group_size=2", "algorithm.name=grpo"]
    options += [f"rollout.temperature={TEMPERATURE}"]
    moored("train", "smoke", *options, "--run", folder)
    return folder


def looks_of(found: dict) -> list[dict]:
    (series,) = found["environments"]
    return series["looks"]


def test_a_run_is_diagnosed_by_what_training_measured_without_torch(run):
    code = "import sys; from moored.cli.main import main\ntry:\n    main()\nfinally:\n"
    code += "    print('torch' in sys.modules, file=sys.stderr)"
    done = run_warm(["diagnose", run, "--json"], code=code, slim=True)
    assert done.stderr.split() == ["False"]
    found = json.loads(done.stdout)
    logged = read_records(run, "collapse")
    assert found["temperature"] == TEMPERATURE
    for look, record in zip(looks_of(found), logged, strict=True):
        (entry,) = record["environments"].values()  # pyright: ignore
        report = record["reports"][entry["view"]]  # pyright: ignore
        assert look["step"] == record["step"] and look["regime"] == record["regime"]
        assert look["report"]["mi_estimate"] == report["mi_estimate"]
    shown = moored("diagnose", run).stdout
    assert f"measured by training (collapse.jsonl), at temperature {TEMPERATURE}" in shown


def test_the_extra_for_reports_is_enough_to_read_a_run(run, tmp_path):
    code = "import sys; from moored.errors import EXTRA_OF_PACKAGE\n"
    code += "hidden = EXTRA_OF_PACKAGE.keys() - {'pyarrow', 'plotly'}\n"
    code += "sys.modules.update(dict.fromkeys(hidden))\n"
    code += "from moored.cli.main import main; main()"
    for words in (["advise", run], ["diagnose", run], ["report", run, "-o", tmp_path / "r.html"]):
        done = run_warm(words, code=code, slim=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").stat().st_size > 10_000


@dataclass(frozen=True)
class Rescored:
    """What `--rescore` printed and wrote."""

    found: dict
    stderr: str
    page: str


@pytest.fixture(scope="module")
def rescored(run, tmp_path_factory) -> Rescored:
    page = tmp_path_factory.mktemp("page") / "page.html"
    options = ("--rescore", "--window", "1", "--draws", "50", "--json", "--html", page)
    done = moored("diagnose", run, *options)
    return Rescored(json.loads(done.stdout), done.stderr, page.read_text(encoding="utf-8"))


def test_a_run_is_scored_afresh_with_the_nearest_checkpoint_at_its_own_temperature(run, rescored):
    done, found = rescored, rescored.found
    assert "scoring 2 looks" in done.stderr and f"at temperature {TEMPERATURE}" in done.stderr
    (series,), logged = found["environments"], read_records(run, "collapse")
    looks, firsts = series["looks"], series["other_views"]["first_turn"]
    assert series["view"] == "episode_swap"
    start = "the model the run started from"
    assert [look["model"] for look in looks] == [start, "checkpoint 1"]
    assert found["source"] == f"scored with {start} (step 1), checkpoint 1 (step 2)"
    for look, first, record in zip(looks, firsts, logged, strict=True):
        # All reasonings are drawn, and scored by the weights that wrote them.
        before = record["reports"]["first_turn"]["mi_estimate"]  # pyright: ignore
        assert first["report"]["mi_estimate"] == pytest.approx(before, abs=1e-6)
        assert first["report"]["num_prompts"] == look["report"]["num_prompts"] == 4
        assert look["rewards"]["num_groups"] == 4


def test_too_few_prompts_are_pooled_over_steps_and_labelled_by_them(run):
    (look,) = looks_of(json.loads(moored("diagnose", run, "--rescore", "--json").stdout))
    assert (look["first_step"], look["step"], look["num_steps"]) == (1, 2, 2)
    assert look["report"]["num_prompts"] == 8


def test_one_file_with_another_model_shows_every_metric_and_turn(run):
    file = run / "rollouts" / "step_000001.parquet"
    shown = moored("diagnose", file, "--model", "nano", "--by-turn").stdout
    assert f"scored with nano, at temperature {TEMPERATURE}" in shown
    assert any(line.split()[:2] == ["turn", "M"] for line in shown.splitlines())
    for label in ("MI per token", "ceiling of both", "H(Z|X) per sequence", "95 % interval"):
        assert label in shown


def test_the_page_of_a_run_has_its_own_curves_and_close_ups_of_first_and_last(run, tmp_path):
    page = tmp_path / "page.html"
    done = moored("diagnose", run, "--json", "--html", page)
    found, text = json.loads(done.stdout), page.read_text(encoding="utf-8")
    for look in looks_of(found):
        assert f"<td>{look['report']['conditional_entropy_est']:.3f}</td>" in text
    assert text.count('"type":"rect","x0"') >= 8  # frames of 4 prompts in two heat maps
    assert f"moored diagnose {run} --json --html {page}" in text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_page_of_rescored_rollouts_has_turns_of_the_last_look(rescored):
    assert "scoring 2 looks and each turn of the last" in rescored.stderr
    (series,) = rescored.found["environments"]
    assert [look["turn"] for look in series["turns"]] == [1, 2]
    assert f"{rescored.found['token_forwards']:,} token-forwards" in rescored.page
    assert "By turn of the episode" in rescored.page


def test_rescoring_one_turn_says_that_training_judged_all_turns(run, rescored):
    options = ("--rescore", "--turn", "1", "--draws", "20", "--json")
    found = json.loads(moored("diagnose", run, *options).stdout)
    assert found["environments"][0]["view"] == "first_turn"
    assert rescored.found["warnings"] == []
    (warning,) = found["warnings"]
    assert warning.startswith("only turn 1 is scored afresh; training judged all turns by")


def test_every_step_of_a_foreign_folder_is_scored_by_its_nearest_checkpoint(tmp_path):
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").symlink_to(embedded_models()["nano"])
    rows = [
        {"prompt": f"Room {p}. What now?", "response": f"<think>room {p}</think>up", "step": step}
        for step in (1, 2, 3, 4)
        for p in range(8)
    ]
    (tmp_path / "completions").mkdir()
    file = tmp_path / "completions" / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    options = ("--json", "--draws", "20")
    for path, more in ((tmp_path, ()), (file, ("--model", f"{tmp_path}/checkpoint-{{step}}"))):
        found = json.loads(moored("diagnose", path, *more, *options).stdout)
        assert [Path(look["model"]).name for look in looks_of(found)] == [
            *("checkpoint-2", "checkpoint-2", "checkpoint-2", "checkpoint-4")
        ]
        assert found["warnings"] == [] and found["temperature"] == 1.0
    one = json.loads(moored("diagnose", file, "--model", "nano", *options).stdout)
    (warning,) = one["warnings"]
    assert warning.startswith("one model scores all steps, 1 to 4")


def refusal(monkeypatch, capsys, *arguments: str | Path) -> str:
    """What a command that cannot work says; in this process, to be quick."""
    monkeypatch.setattr(sys, "argv", ["moored", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    return capsys.readouterr().err


def test_plain_lines_with_a_torn_end_and_a_bad_row_are_diagnosed(tmp_path, monkeypatch, capsys):
    rows = [
        {"prompt": f"Room {p}. What now?", "response": f"<think>room {p}, so {p}</think>up"}
        for p in range(4)
        for _ in range(4)
    ]
    text = "\n".join(map(json.dumps, rows))
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{text}\n{{"prompt": "Room 9"}}\n{{"prompt": "Room')
    said = refusal(monkeypatch, capsys, "diagnose", file, "--model", "nano")
    assert "line 17 has no 'response'" in said
    found = json.loads(moored("diagnose", file, "--model", "nano", "--skip-bad", "--json").stdout)
    assert (found["num_bad_rows"], found["num_torn_rows"]) == (1, 1)
    assert looks_of(found)[0]["step"] is None


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", ["--model", "nano"], "is empty"),
        ('{"question": 1}\n', ["--model", "nano"], "holds question, but needs"),
        (ROW, ["--model", "nano", "--columns", "prompt"], "--columns takes WHAT=COLUMN"),
        (ROW, ["--model", "no/checkpoint-{step}"], "no folder is called 'no/checkpoint-{step}'"),
        (ROW, ["--endpoint", "http://127.0.0.1:9/v1"], "the model that the server knows"),
        (ROW, ["--model", "nano"], "no response holds"),
        (ROW, ["--model", "nano", "--whole"], "needs 2 distinct prompts"),
        (ROW, [], "--model"),
        (ROW, ["--model", "nano", "--reader", "tlr"], "did you mean 'trl'"),
        (ROW, ["--model", "nano", "--pairs", "4", "--prompts", "8"], "at least --prompts"),
        (ROW, ["--model", "nano", "--by-turn"], "needs episodes of several turns"),
        (ROW, ["--model", "nano", "--by-turn", "--turn", "2"], "give one of them"),
        ("", ["--html", "no/where/page.html"], "folder 'no/where' does not exist"),
        ("", ["--html", "."], "needs a file, got the folder"),
        (IDS, ["--model", "nano"], "token id 9999, but the model knows 1024"),
    ],
)
def test_bad_files_are_one_helpful_line(tmp_path, monkeypatch, capsys, content, arguments, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    said = refusal(monkeypatch, capsys, "diagnose", file, *arguments)
    assert message in said.replace("\n", " ")
