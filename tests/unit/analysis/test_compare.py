"""Comparing the ends of runs: what is averaged, over what the intervals are, what differs."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from moored.analysis.compare import TaskReplies, compare_runs, half_width, read_ends
from moored.cli import compare
from moored.cli.compare import compare_command
from moored.errors import MooredError


def look(mi: float, *envs: str) -> dict[str, object]:
    """What collapse.jsonl holds of one look."""
    views = {env: f"{env}/swap" for env in envs} or {"sokoban": "swap"}
    return {
        "verdict": "cannot_tell",
        "alarm": None,
        "environments": {env: {"view": view} for env, view in views.items()},
        "reports": {"trajectory": {"mi_estimate": 9.0}}
        | {view: {"mi_estimate": mi + index} for index, view in enumerate(views.values())},
    }


def write_run(
    path: Path,
    successes: list[float],
    *,
    looks: dict[int, float] | None = None,
    config: str = "seed: 0\n",
    **last_look: object,
) -> Path:
    """A run directory with one success rate per step; rewards are twice as large."""
    path.mkdir()
    (path / "config.yaml").write_text(config)
    steps = [
        {"step": step, "rollout/success_rate": rate, "rollout/reward_mean": 2 * rate}
        for step, rate in enumerate(successes, start=1)
    ]
    found = [{"step": step, **look(mi)} for step, mi in (looks or {}).items()]
    if found:
        found[-1] |= last_look
    for name, records in (("metrics", steps), ("collapse", found)):
        lines = [json.dumps({"schema": 1, **record}) + "\n" for record in records]
        (path / f"{name}.jsonl").write_text("".join(lines))
    return path


def test_the_first_and_last_steps_are_averaged_and_their_number_is_said(tmp_path, capsys):
    run = write_run(tmp_path / "a", [0.0, 0.2, 0.9, 0.9, 0.4, 0.8], looks={1: 0.5, 5: 0.1, 6: 0.3})
    (arm,) = compare_runs([run], last=2).arms
    figures = arm.figures()
    assert (figures["success"].start, figures["success"].end) == (0.1, pytest.approx(0.6))
    assert figures["reward"].end == pytest.approx(1.2)
    assert figures["MI"].start == 0.5 and figures["MI"].end == pytest.approx(0.2)
    compare_command([run], last=2)
    shown = capsys.readouterr().out
    assert "Means over the first and the last 2 steps of each run" in shown
    assert "interval over steps. Steps of one run are not independent" in shown


def test_episodes_that_were_lost_are_counted_where_a_run_has_any(tmp_path, capsys):
    good, bad = (write_run(tmp_path / name, [0.5] * 4, config=f"env: {name}\n") for name in "ab")
    compare_command([good, bad])
    assert "error" not in capsys.readouterr().out
    with (bad / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "step": 5, "rollout/error_count": 3.0}\n')
    compare_command([good, bad])
    assert "neither success nor reward: A 0, B 3." in capsys.readouterr().out
    compare_command([good, bad], as_json=True)
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert [arm["lost_episodes"] for arm in arms] == [[0], [3]]
    assert read_ends(bad, until=4).num_lost == 0


def test_the_interval_is_students():
    # Two values 0 and 2: mean 1, standard deviation √2, so ± 12.706 · √2 / √2.
    assert half_width([0.0, 2.0]) == pytest.approx(12.706)
    assert half_width([1.0]) is None
    assert half_width([0.0, 1.0] * 50) == pytest.approx(2.042 * math.sqrt(100 / 396) / 10)


def test_runs_that_differ_in_their_seed_only_share_an_interval_over_seeds(tmp_path, capsys):
    rates = {"a": 0.1, "b": 0.3, "c": 0.9}
    configs = {"a": "seed: 0\n", "b": "seed: 1\n", "c": "seed: 0\nfilter: {rule: none}\n"}
    runs = [write_run(tmp_path / n, [rate] * 4, config=configs[n]) for n, rate in rates.items()]
    found = compare_runs(runs)
    assert [[run.path.name for run in arm.runs] for arm in found.arms] == [["a", "b"], ["c"]]
    success = found.arms[0].figures()["success"]
    assert success.end == pytest.approx(0.2)
    # Over 0.1 and 0.3: the standard deviation is 0.2 / √2.
    assert success.half_width == pytest.approx(12.706 * 0.1)
    assert dict(found.options) == {"filter.rule": ["–", "none"]}
    compare_command(runs)
    shown = capsys.readouterr().out
    assert "95 % interval over seeds." in shown
    assert "Options that differ" in shown and "filter.rule" in shown


def test_a_repeat_with_the_same_seed_is_not_an_independent_run(tmp_path):
    runs = [write_run(tmp_path / name, [0.5] * 4) for name in ("a", "b")]
    assert len(compare_runs(runs).arms) == 2


def test_runs_of_different_length_can_be_compared_at_the_same_step(tmp_path, capsys):
    runs = [
        write_run(tmp_path / "a", [0.0, 0.1]),
        write_run(tmp_path / "b", [0.0, 0.1, 0.5, 0.9], config="seed: 0\nnum_steps: 4\n"),
    ]
    compare_command(runs)
    assert "from 2 to 4; --until 2 compares all of them there" in capsys.readouterr().out
    ends = [arm.figures()["success"].end for arm in compare_runs(runs, until=2).arms]
    assert ends == [0.1, 0.1]


def test_a_broken_run_is_left_out_and_named(tmp_path, capsys):
    good = write_run(tmp_path / "good", [0.5, 0.5])
    torn = write_run(tmp_path / "torn", [0.5, 0.5])
    (torn / "metrics.jsonl").write_text("not json\n")
    empty = write_run(tmp_path / "empty", [])
    found = compare_runs([torn, good, empty, tmp_path / "none"])
    assert [arm.runs[0].path for arm in found.arms] == [good]
    assert "line 1 is not JSON" in found.left_out[str(torn)]
    assert "has no finished step" in found.left_out[str(empty)]
    assert "does not exist" in found.left_out[str(tmp_path / "none")]
    with pytest.raises(MooredError, match="has no finished step"):
        compare_runs([empty])


def test_the_verdict_of_the_last_look_and_the_first_alarm_are_shown(tmp_path, capsys):
    looks = {1: 0.5, 2: 0.0}
    quiet = write_run(tmp_path / "quiet", [0.1] * 2, looks=looks)
    ended = {"verdict": "collapsed", "alarm": {"kind": "x"}}
    loud = write_run(tmp_path / "loud", [0.1] * 2, looks=looks, **ended)
    assert (read_ends(quiet).verdict, read_ends(quiet).alarm_step) == ("cannot tell", None)
    assert (read_ends(loud).verdict, read_ends(loud).alarm_step) == ("collapsed", 2)
    compare_command([quiet, loud])
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert ["verdict", "cannot", "tell", "collapsed"] in rows
    assert ["alarm", "at", "step", "–", "2"] in rows


def test_environments_have_rows_of_their_own(tmp_path):
    run = write_run(tmp_path / "a", [0.5] * 2, looks={1: 0.5, 2: 0.25})
    lines = [{"schema": 1, "step": step, **look(0.25, "bandit", "sokoban")} for step in (1, 2)]
    (run / "collapse.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ends = read_ends(run).ends
    assert ends["MI, bandit"] == [0.25] and ends["MI, sokoban"] == [1.25]


def test_a_run_of_one_step_has_an_end_and_no_start(tmp_path, capsys):
    run = write_run(tmp_path / "a", [0.25], looks={1: 0.5})
    (arm,) = compare_runs([run]).arms
    assert arm.figures()["success"].start is None and arm.figures()["MI"].start is None
    compare_command([run])
    shown = capsys.readouterr().out
    assert "0.250" in shown and "0.250 → 0.250" not in shown


def test_a_run_whose_options_were_changed_midway_is_not_a_repeat_of_one_that_had_them(tmp_path):
    config = "seed: {}\noptimizer: {{lr: 0.1}}\nnum_steps: 2\n"
    runs = [write_run(tmp_path / f"{k}", [0.1, 0.2], config=config.format(k)) for k in range(3)]
    changes = {"num_steps": {"old": 1, "new": 2}}
    write_changes(runs[1], 1, changes)
    write_changes(runs[2], 1, changes | {"optimizer.lr": {"old": 0.9, "new": 0.1}})
    found = compare_runs(runs)
    # A longer run is still the same run.
    assert [arm.seeds for arm in found.arms] == [[0, 1], [2]]
    assert found.options == {"optimizer.lr, until step 1": ["–", 0.9]}


def write_changes(run: Path, step: int, options: object) -> None:
    record = {"schema": 1, "step": step, "options": options}
    (run / "changes.jsonl").write_text(json.dumps(record) + "\n")


def test_forty_settings_are_shown_with_their_numbers_in_eighty_columns(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(compare, "make_console", lambda **_: Console(width=80))
    runs = [
        write_run(tmp_path / f"{k}", [k / 1000] * 4, config=f"optimizer: {{lr: {k}}}\n")
        for k in range(40)
    ]
    compare_command(runs)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(f"{k / 1000:.3f}" in shown for k in range(40))


def test_runs_that_keep_more_checkpoints_are_repeats_all_the_same(tmp_path):
    runs = [
        write_run(tmp_path / f"{k}", [0.1, 0.2], config=f"seed: {k}\nkeep_checkpoints: {2 + k}\n")
        for k in range(2)
    ]
    assert [arm.seeds for arm in compare_runs(runs).arms] == [[0, 1]]


@pytest.mark.parametrize(("width", "is_table"), [(88, True), (87, False), (40, False)])
def test_replies_stand_below_each_other_where_there_is_no_room_beside(width, is_table):
    console = Console(width=width, record=True, file=io.StringIO())
    written = [TaskReplies(step=3, seen="#P_#", replies=("I go up.", "I go down."))]
    compare._show_replies(console, [Path("none"), Path("top_p")], written)
    lines = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    assert all(len(line) <= width for line in lines)
    below = ["step 3", "#P_#", "none:", "I go up.", "top_p:", "I go down."]
    assert lines == below if not is_table else "what the model saw" in lines[0]
