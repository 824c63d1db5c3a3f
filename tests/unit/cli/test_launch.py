"""`moored launch` writes jobs from one configuration, and refuses what could not start."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moored.cli.main import main
from tests.warm import run_warm


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run `moored launch words…`; its exit code, what it printed, and its errors."""
    monkeypatch.chdir(tmp_path)

    def run_command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moored", "launch", *words])
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        return int(left.value.code or 0), shown.out, shown.err

    return run_command


CONFIG = ["sokoban", "grpo", "rollout.num_groups=16"]
VLLM = ["engine.sampler=vllm", "engine.vllm.tensor_parallel=2"]
POD = ["--image", "registry.example/moored:1", "--claim", "runs:/shared", "--run", "/shared/x"]


def test_torchrun_is_the_default_engine_of_its_own_jobs(run):
    code, out, _ = run(*CONFIG, "--on", "torchrun", "--gpus-per-node", "4")
    assert (code, shlex.split(out)) == (
        0,
        [
            *("torchrun", "--standalone", "--nproc-per-node=4", "-m", "--", "moored", "train"),
            *("sokoban", "grpo", "rollout.num_groups=16", "engine.kind=torchrun"),
            *("--run", "runs/sokoban-grpo"),
        ],
    )


def test_a_slurm_job_runs_ray_unless_the_configuration_says_torchrun(run):
    _, ray, _ = run(*CONFIG, "--on", "slurm", "--nodes", "2")
    assert "srun ray symmetric-run" in ray and "engine.kind=ray" in ray
    _, ranks, _ = run(*CONFIG, "engine.kind=torchrun", "--on", "slurm", "--nodes", "2")
    assert "srun torchrun" in ranks and ranks.count("engine.kind=torchrun") == 1
    for text in (ray, ranks):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_lag_needs_no_engine_to_be_named(run):
    code, out, _ = run(*CONFIG, "rollout.max_lag=1", "--on", "slurm")
    assert code == 0
    assert "rollout.max_lag=1 engine.kind=ray" in out
    assert "engine.kind to ray" in run(*CONFIG, "rollout.max_lag=1", "--on", "torchrun")[2]


def test_a_manifest_is_yaml_with_the_options_of_the_configuration(run):
    options = ["engine.ray.learners=8", "engine.ray.replicas=8"]
    code, out, _ = run(*CONFIG, *options, "--on", "kubernetes", "--nodes", "2", *POD)
    found = yaml.safe_load(out)
    assert (code, found["kind"], found["metadata"]["name"]) == (0, "RayJob", "sokoban-grpo")
    assert set(options) < set(found["spec"]["entrypoint"].split())


def test_a_job_can_be_written_to_a_file(run, tmp_path):
    _, text, _ = run(*CONFIG, "--on", "slurm")
    code, out, _ = run(*CONFIG, "--on", "slurm", "--out", "my job.sh")
    assert (code, out) == (0, "wrote my job.sh; submit it with: sbatch 'my job.sh'\n")
    assert (tmp_path / "my job.sh").read_text() == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "torchrun", "--time", "1:00:00"], "--time is for --on slurm, and this is --on"),
        (["--on", "ray", "--image", "x"], "--image is for --on kubernetes, and this is --on ray"),
        (["--on", "ray", "engine.kind=torchrun"], "engine.kind = torchrun does not go with --on"),
        (["--on", "torchrun", "--nodes", "4"], "32 ranks share 16 groups, so some would have none"),
        (["--on", "ray", "engine.ray.learners=17"], "17 ranks share 16 groups, so some would have"),
        (
            ["--on", "slurm", "engine.ray.learners=4", "engine.ray.replicas=6"],
            "need 10 GPUs, but 1 x 8 are 8; `moored plan --gpus 8` divides them",
        ),
        (
            ["--on", "slurm", "engine.ray.learners=4", "engine.ray.replicas=3", *VLLM],
            "need 10 GPUs, but 1 x 8 are 8; `moored plan --gpus 8` divides them",
        ),
        (["--on", "ray"], "--run 'runs/sokoban-grpo' is relative, but the job runs in a folder of"),
        (["--on", "kubernetes"], "a RayJob needs an image with moored[ray] installed: --image"),
        (["--on", "kubernetes", "--image", "x"], "a RayJob needs a volume that outlives its pods"),
        (["--on", "slurm", "--name", "My Run"], "--name must be lower-case letters, digits and"),
        (["--on", "slurm", "--out", "no/job.sh"], "cannot write 'no/job.sh' (No such file or"),
        (
            ["--on", "slurm", "--out", "."],
            "cannot write '.' (Is a directory); give --out a file in",
        ),
        (["--on", "slurm", "rollout.num_group=3"], "num_group"),
        (["--on", "slurm", "env=sokobn"], "unknown environment 'sokobn'; did you mean 'sokoban'?"),
    ],
)
def test_a_mistake_is_one_line(run, words, message):
    code, out, error = run(*CONFIG, *words)
    assert (code, out) == (2, "")
    assert error.startswith("moored: ")
    assert message in error
    assert error.count("\n") == 1


def test_the_commands_of_the_page_on_scale_write_jobs(run, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(moored launch.*?)```", page, re.DOTALL)
    lines = commands.replace("\\\n", " ").splitlines()
    assert len(lines) == 4
    for line in lines:
        code, out, error = run(*shlex.split(line)[2:])
        assert (code, error) == (0, "")
        assert out
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["kind"] == "RayJob"


def test_launching_needs_neither_torch_nor_ray(tmp_path):
    code = (
        "import sys; from moored.cli.main import main\ntry: main()\n"
        "finally: print({'torch', 'ray'} & set(sys.modules), file=sys.stderr)"
    )
    done = run_warm(["launch", *CONFIG, "--on", "slurm"], code=code, cwd=tmp_path, slim=True)
    assert (done.returncode, done.stderr) == (0, "set()\n")
