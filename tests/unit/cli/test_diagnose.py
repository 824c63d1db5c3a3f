"""`moored diagnose` of a run directory: what training measured, without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from moored.cli.main import main
from moored.config import dump_config, load_config
from moored.diagnostics.information import information
from moored.diagnostics.report import CollapseReport
from moored.diagnostics.watch import CollapseWatch
from moored.diagnostics.worth import Worth
from moored.runlog.log import RunLog, read_records


def report(gain: float, *, num_prompts: int = 16, seed: int = 0) -> CollapseReport:
    """Eight reasonings of ten tokens for each prompt, likelier under their own by `gain`."""
    columns = np.repeat(np.arange(num_prompts), 8)
    logp = np.random.default_rng(seed).normal(-20.0, 0.2, (len(columns), num_prompts))
    logp[np.arange(len(columns)), columns] += gain
    return information(logp, columns, np.full(len(columns), 10), permutations=200, seed=seed)


def make_run(
    folder: Path,
    series: dict[str, list[CollapseReport]],
    logged: Sequence[Mapping[str, float]] = (),
) -> Path:
    """A run directory as training leaves it, with looks at steps 5, 10, … of each environment.

    `logged` are further numbers of the first looks.
    """
    log = RunLog(folder)
    log.write_config(dump_config(load_config({"rollout": {"temperature": 0.6}})))
    watches = {env: CollapseWatch() for env in series}
    for number, step_reports in enumerate(zip(*series.values(), strict=True), start=1):
        step, reports, environments = 5 * number, {}, {}
        for env, found in zip(series, step_reports, strict=True):
            watched = watches[env].update(step, found)
            view = "first_turn" if len(series) == 1 else f"{env}/first_turn"
            reports[view] = watched.report.to_dict()
            environments[env] = {
                "view": view,
                "verdict": watched.verdict,
                "why": watched.why,
                "prompts_needed": watched.prompts_needed,
                "regime": watched.regime,
                "alarm": None if watched.alarm is None else asdict(watched.alarm),
                "share_unmeasured": 0.0,
            }
        record = {"environments": environments, "reports": reports, "skipped": {}}
        more = logged[number - 1] if number <= len(logged) else {}
        log.append("collapse", step, {**more, **record})
        log.append("metrics", step, {"rollout/reward_mean": 0.5})
    return folder


def diagnose(monkeypatch, capsys, *words: object, code: int = 0) -> str:
    """What the command prints; on an error, what it says."""
    monkeypatch.setattr(sys, "argv", ["moored", "diagnose", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code or 0) == code
    said = capsys.readouterr()
    return said.err if code == 2 else said.out


HEALTHY, COLLAPSED = [3.0] * 4, [3.0] * 6 + [0.0] * 6


def reports(gains: list[float], **options) -> list[CollapseReport]:
    return [report(gain, seed=k, **options) for k, gain in enumerate(gains)]


def test_check_exits_with_0_when_the_run_is_healthy(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)})
    text = diagnose(monkeypatch, capsys, run, "--check")
    assert text.startswith("Healthy\nReasoning depends on its prompt: ")
    assert "99 % interval" in text and "p = " in text


def test_check_exits_with_3_when_the_run_collapsed_and_says_since_when(
    tmp_path, monkeypatch, capsys
):
    run = make_run(tmp_path / "run", {"maze": reports(COLLAPSED)})
    text = diagnose(monkeypatch, capsys, run, "--check", code=3)
    # Step 35 is the first without dependence; it takes two looks to overturn a verdict.
    assert text.startswith(("Collapsed since step 35\n", "Collapsed since step 40\n"))
    # Without --check the verdict is not an error.
    assert diagnose(monkeypatch, capsys, run).startswith("Collapsed since step")


def test_check_exits_with_4_when_it_cannot_tell_and_says_what_is_needed(
    tmp_path, monkeypatch, capsys
):
    run = make_run(tmp_path / "run", {"maze": reports([0.3], num_prompts=2)})
    text = diagnose(monkeypatch, capsys, run, "--check", code=4)
    assert text.startswith("Cannot tell\n2 prompts cannot tell: ") and "needed" in text
    assert "checkpoint" not in text


def test_what_training_said_is_what_diagnose_says(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(COLLAPSED)})
    found = json.loads(diagnose(monkeypatch, capsys, run, "--json"))
    (series,) = found["environments"]
    with (run / "collapse.jsonl").open() as lines:
        logged = [json.loads(line) for line in lines]
    assert [look["step"] for look in series["looks"]] == [record["step"] for record in logged]
    for look, record in zip(series["looks"], logged, strict=True):
        entry, stored = record["environments"]["maze"], record["reports"]["first_turn"]
        assert (look["verdict"], look["why"]) == (entry["verdict"], entry["why"])
        assert look["regime"] == entry["regime"]
        assert look["report"] == stored
    alarms = [record["environments"]["maze"]["alarm"] for record in logged]
    assert series["alarm"] == next((alarm for alarm in alarms if alarm), None)
    assert found["temperature"] == 0.6 and found["token_forwards"] == 0


def test_episodes_that_were_lost_are_told_where_a_run_has_any(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)})
    assert "ended in an error" not in diagnose(monkeypatch, capsys, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "step": 25, "rollout/error_count": 3.0}\n')
    assert "3 episodes ended in an error, in 1 of 5 steps" in diagnose(monkeypatch, capsys, run)


def worth(correlation: float, env: str = "") -> dict[str, float]:
    found = Worth(correlation=correlation, standard_error=0.05, num_prompts=6)
    return found.metrics(f"collapse_first_turn_sample{env}")


def test_what_dependence_earns_is_the_mean_over_looks_and_that_of_the_last_one(
    tmp_path, monkeypatch, capsys
):
    # No prompt of the second look has rewards that differ, nor of the last.
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)}, [worth(0.1), {}, worth(0.3)])
    # Mean 0.2; √(2 · 0.1²) / √2 = 0.1.
    line = (
        "does reasoning that depends more on its prompt earn more? correlation inside prompts "
        "0.200 (mean of 2 looks, standard error 0.100), 0.300 at step 15 (6 prompts, standard "
        "error 0.050)"
    )
    assert line in diagnose(monkeypatch, capsys, run).splitlines()
    (series,) = json.loads(diagnose(monkeypatch, capsys, run, "--json"))["environments"]
    assert [
        look["worth"] and look["worth"]["num_rewarded_prompts"] for look in series["looks"]
    ] == [*(6.0, None, 6.0, None)]
    bare = make_run(tmp_path / "bare", {"maze": reports(HEALTHY)})
    assert "earn more" not in diagnose(monkeypatch, capsys, bare)


def test_what_dependence_earns_is_told_of_each_environment(tmp_path, monkeypatch, capsys):
    series = {"maze": reports(HEALTHY[:1]), "sums": reports(HEALTHY[:1])}
    run = make_run(tmp_path / "run", series, [worth(0.1, "/maze") | worth(0.9, "")])
    lines = [x for x in diagnose(monkeypatch, capsys, run).splitlines() if "earn more?" in x]
    assert [line.partition(":")[0] for line in lines] == ["maze"] and " 0.100 (6 prompts" in lines[
        0
    ]


def test_environments_of_a_run_are_told_apart(tmp_path, monkeypatch, capsys):
    series = {"maze": reports([3.0] * 12), "sums": reports(COLLAPSED)}
    run = make_run(tmp_path / "run", series)
    text = diagnose(monkeypatch, capsys, run, "--check", code=3)
    assert "in sums; healthy in maze" in text.splitlines()[0]
    assert "\nmaze: Reasoning depends" in text and "\nsums: Reasoning hardly" in text


def test_an_environment_that_was_never_measured_is_named_and_makes_a_check_fail(
    tmp_path, monkeypatch, capsys
):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY), "sums": reports(HEALTHY)})
    records = read_records(run, "collapse")
    for record in records:
        record["environments"]["sums"] |= {"view": None, "verdict": "cannot_tell"}  # pyright: ignore
        del record["reports"]["sums/first_turn"]  # pyright: ignore
        record["skipped"] = {"maze/trajectory": "of no interest", "sums/first_turn": "one prompt"}
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "collapse.jsonl").write_text(text)
    said = diagnose(monkeypatch, capsys, run, "--check", code=4)
    assert said.splitlines()[0] == "Healthy in maze; not measured in sums"
    assert "\nsums: no look was measured: one prompt\n" in said
    assert "\nmaze: Reasoning depends" in said
    as_json = json.loads(diagnose(monkeypatch, capsys, run, "--json"))
    assert (as_json["verdict"], as_json["unmeasured"]) == ("cannot_tell", {"sums": "one prompt"})


def test_a_run_that_stops_to_write_reasonings_is_not_called_healthy(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)})
    records: list[dict] = read_records(run, "collapse")
    for record in records[2:]:
        record["environments"]["maze"] |= {"view": None, "verdict": "cannot_tell"}
        record |= {"reports": {}, "skipped": {"first_turn": "no reply has tags"}}
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "collapse.jsonl").write_text(text)
    said = diagnose(monkeypatch, capsys, run, "--check", code=4).splitlines()
    assert said[0] == "Not measured since step 15, healthy before"
    start = "No look from step 15 on was measured: no reply has tags. At step 10: Reasoning depends"
    assert said[1].startswith(start)


def test_options_of_scoring_are_refused_for_what_training_measured(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)})
    for words in (["--window", 2], ["--temperature", 1], ["--turn", 2], ["--by-turn"]):
        said = diagnose(monkeypatch, capsys, run, *words, code=2)
        assert "would change nothing" in said and "--rescore" in said
        assert said.count("\n") == 1


def test_a_negative_seed_is_refused_before_anything_is_scored(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)})
    said = diagnose(monkeypatch, capsys, run, "--rescore", "--seed", -1, code=2)
    assert "'--seed'" in said and "greater than or equal to 0" in said


def test_records_of_another_version_are_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", {"maze": reports(HEALTHY)})
    file = run / "collapse.jsonl"
    record = json.loads(file.read_text().splitlines()[0])
    del record["environments"]
    file.write_text(json.dumps(record) + "\n")
    assert "names no environments" in diagnose(monkeypatch, capsys, run, code=2)


@pytest.mark.parametrize(
    ("make", "path", "message"),
    [
        (lambda folder: None, "runs/nope", "nor does its folder"),
        (lambda folder: (folder / "rollouts.jsonl").touch(), "rolouts.jsonl", "did you mean"),
        (lambda folder: (folder / "empty.jsonl").touch(), "empty.jsonl", "is empty; give a file"),
        (lambda folder: (folder / "notes").mkdir(), "notes", "holds no .parquet or .jsonl"),
        (lambda folder: (folder / "a.csv").write_bytes(b"\xff\xfe"), "a.csv", "neither JSON nor"),
        (lambda folder: (folder / "a.parquet").write_bytes(b"PAR1ab"), "a.parquet", "is it whole?"),
    ],
)
def test_wrong_paths_and_broken_files_are_one_sentence(
    tmp_path, monkeypatch, capsys, make, path, message
):
    make(tmp_path)
    said = diagnose(monkeypatch, capsys, tmp_path / path, "--model", "nano", code=2)
    assert message in said and said.count("\n") == 1
