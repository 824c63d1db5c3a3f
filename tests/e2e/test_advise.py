"""`moored advise` as a user meets it: text, JSON, one line for a mistake, no torch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.warm import run_warm

# RV 1/4 in the first two groups, 0 in the others, which fail, fail and succeed.
REWARDS = {"a": (1, 0), "b": (0, 1), "c": (0, 0), "d": (0, 0), "e": (1, 1)}


def moored(*words: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    code = "import sys; from moored.cli.main import main\ntry:\n    main()\nfinally:\n    print("
    code += "sorted({'torch', 'transformers', 'pyarrow'} & set(sys.modules)), file=sys.stderr)"
    done = run_warm([*map(str, words)], code=code, env={"COLUMNS": "120"}, slim=True)
    assert done.returncode == expect, done.stderr
    return done


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    file = tmp_path / "rollouts.jsonl"
    lines = [
        json.dumps({"prompt": f"task {name}", "reward": reward})
        for name, rewards in REWARDS.items()
        for reward in rewards
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    """Eight steps; in each one of eight groups holds a success, others differ by a move."""
    rows = [
        {"step": step, "prompt": f"task {task}", "reward": reward, "success": reward > 0}
        for step in range(8)
        for task in range(8)
        for reward in ((-0.1, -0.2) if task else (10, 0))
    ]
    file = tmp_path / "solved.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_where_few_successes_are_outvoted_advice_names_filter_and_division(solved):
    done = moored("advise", solved)
    text = " ".join(done.stdout.split())
    assert text.startswith("Filter, or do not divide advantages by the group's std: nonzero keeps")
    # 7 of 8 groups; 7 * 0.1 against 10 without the division.
    assert "Outcome-free share 0.87 with division by the group's std, 0.07 without" in text
    assert "Settings and reasons filter.rule=nonzero filter.value=0 filter.eps=" in text
    assert "algorithm.advantage=dr_grpo leaves out the division" in text
    found = json.loads(moored("advise", solved, "--json").stdout)
    assert found["recommendation"] == "filter"
    assert found["outcome_free"]["plain"] == pytest.approx(0.7 / 10.7)
    assert found["outcome_free"]["num_mixed"] == 8
    assert found["groups_needed"] is None


@pytest.mark.parametrize(("algorithm", "divides"), [("grpo", True), ("dr_grpo", False)])
def test_a_run_is_judged_by_the_advantages_that_it_has(solved, tmp_path, algorithm, divides):
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"algorithm: {{name: {algorithm}}}\n")
    (folder / "metrics.jsonl").write_text("")
    solved.rename(folder / "rollouts" / "solved.jsonl")
    found = json.loads(moored("advise", folder, "--json").stdout)
    assert found["outcome_free"]["divides"] is divides
    assert ("do not divide" in found["headline"]) is divides


def test_advice_is_told_with_bars_shares_and_examples(rollouts):
    done = moored("advise", rollouts, "--update-share", 0.5)
    text = done.stdout
    assert "10 trajectories, 5 groups of 2, 1 step" in text
    assert f"0 {'█' * 40} 3" in text
    assert f"0.219 – 0.25 {'█' * 27} 2" in text
    assert "Std/Mean 1.22" in text  # sqrt(0.6 / 0.4)
    assert "0.5           20%             50%            80%          40%" in text
    assert "too easy     1 (20%)\n    task e" in text
    assert "too hard     2 (40%)\n    task c\n    task d" in text
    assert "reward-blind unknown, the file has no responses" in text
    assert text.startswith("Cannot tell: 5 groups are too few, about 8 would do\n")
    assert "Outcome-free share unknown: it needs a column of successes, or --success-reward" in text
    # A reason longer than a table may be is not cut off in a pipe.
    assert "5 groups say too little; give at least 8" in text
    assert done.stderr.strip() == "[]"  # neither torch nor pyarrow was imported


def test_json_holds_the_same(rollouts):
    found = json.loads(moored("advise", rollouts, "--json", "--examples", 1).stdout)
    assert found["recommendation"] == "cannot_tell"
    assert (found["settings"], found["outcome_free"], found["groups_needed"]) == (None, None, 8)
    assert found["histogram"]["num_zero"] == 3
    assert sum(found["histogram"]["counts"]) == 2
    assert found["causes"]["too_hard"] == {"num_groups": 2, "share": 0.4, "prompts": ["task c"]}
    assert found["effects"][0]["rho"] == 0.5
    assert found["effects"][0]["step_saved"] is None


def test_a_folder_is_read_as_its_files_are(rollouts):
    whole, folder = (moored("advise", path, "--json") for path in (rollouts, rollouts.parent))
    assert folder.stdout == whole.stdout
    assert folder.stderr.strip() == "[]"


def test_a_success_reward_moves_groups_between_causes(rollouts):
    found = json.loads(moored("advise", rollouts, "--json", "--success-reward", 2).stdout)
    assert found["causes"]["too_hard"]["num_groups"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", "accuracy"], "has no column 'accuracy'"),
        (["--reward", "reward=much"], "--reward takes COLUMN or COLUMN=WEIGHT"),
        (["--step", "4"], "there is no step 4"),
    ],
)
def test_mistakes_are_one_helpful_line(rollouts, words, message):
    done = moored("advise", rollouts, *words, expect=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_trajectories_that_are_not_grouped_are_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("group,reward\n1,0\n2,1\n")
    assert "two rewards to compare" in moored("advise", file, expect=2).stderr
