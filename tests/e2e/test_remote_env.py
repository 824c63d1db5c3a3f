"""`moored train` with an environment of another process, which is killed and comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moored.runlog.log import read_records
from tests.env_server import serve_env
from tests.warm import WarmProcess

pytest.importorskip("uvicorn")


def wait_for_step(run: Path, process: WarmProcess, *, with_errors: bool) -> None:
    def is_there() -> bool:
        records = read_records(run) if (run / "metrics.jsonl").exists() else []
        return any(bool(record["rollout/error_count"]) is with_errors for record in records)

    while not is_there():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def test_a_killed_environment_server_costs_episodes_and_not_the_run(tmp_path: Path) -> None:
    with serve_env("countdown") as (url, server):
        small = ["rollout.max_response_tokens=8", "collapse.every=0", "evaluation.every=0"]
        words = ["train", "smoke", f"env=remote:{url}", "num_steps=20", "rollout.env_workers=8"]
        words.append("filter.max_empty_steps=20")
        process = WarmProcess([*words, *small, "--run", "run"], cwd=tmp_path, merge_stderr=True)
        wait_for_step(tmp_path / "run", process, with_errors=False)
        server.kill()
        server.wait()
        wait_for_step(tmp_path / "run", process, with_errors=True)
        with serve_env("countdown", port=int(url.rpartition(":")[2])):
            shown = process.communicate()[0]
    assert process.returncode == 0, shown
    errors = [bool(record["rollout/error_count"]) for record in read_records(tmp_path / "run")]
    assert not errors[0] and any(errors)
