"""A study on a real Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent.parent
ENTRY = "from moored.cli.main import main; main()"
STUDY = """
question: Does a study run on a cluster?
base: [smoke, rollout.group_size=2, rollout.max_response_tokens=8, evaluation.every=0,
       collapse.every=0, filter.rule=none, num_steps=1]
factors:
  engine:
    local: [engine.kind=local]
    broken: [engine.kind=mine:engine]
against: {engine: local}
seeds: 1
"""


def study(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", ENTRY, "study", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ)


CLUSTER = """
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args=small)
cluster.add_node(**small)
print("address", cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster of two nodes with one core each, in a process of its own: it sets signals."""
    pytest.importorskip("ray")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert process.stdout is not None
    yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
    process.communicate("stop\n")


def test_runs_go_to_the_nodes_and_one_that_fails_is_listed(tmp_path, address):
    (tmp_path / "mine.py").write_text(
        "def engine(config, *, trains):\n    raise SystemExit('no power')\n"
    )
    (tmp_path / "tiny.yaml").write_text(STUDY)
    done = study("tiny.yaml", "--ray", address, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "2 at a time (one per CPU of the Ray cluster)" in done.stdout
    assert "local/seed-0 finished in " in done.stdout
    assert "1 of 2 runs failed:\n  broken/seed-0: exit code 1: no power" in done.stderr
    assert (tmp_path / "runs/tiny/local/seed-0/model/model.safetensors").exists()


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "tiny.yaml").write_text(STUDY)
    done = study("tiny.yaml", "--ray", "127.0.0.1:1", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("moored: no Ray cluster answers at '127.0.0.1:1'")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
