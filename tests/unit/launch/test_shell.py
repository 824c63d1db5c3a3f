"""Lines and scripts: as they are written, and as a shell reads them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moored.errors import MooredError
from moored.launch import Job, Resources, SlurmOptions
from moored.launch.shell import ray_submit_line, slurm_script, torchrun_line

ODD = 'runs/it\'s $(touch hacked); `touch hacked` "x" && echo 1'
"""A path that does damage where it is not quoted."""


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "name": "sokoban-grpo",
        "words": ("sokoban", "grpo", "rollout.num_groups=64"),
        "run": "/shared/runs/sokoban-grpo",
        "engine": "torchrun",
        "resources": Resources(),
    }
    return Job(**{**given, **changes})


def test_one_node_of_torchrun_is_a_line():
    assert torchrun_line(job()) == (
        "torchrun --standalone --nproc-per-node=8 -m -- moored train sokoban grpo "
        "rollout.num_groups=64 engine.kind=torchrun --run /shared/runs/sokoban-grpo\n"
    )


def test_torchrun_leaves_the_options_of_moored_alone():
    parse = pytest.importorskip("torch.distributed.run").parse_args
    found = parse(shlex.split(torchrun_line(job()))[1:])
    assert (found.module, found.training_script) == (True, "moored")
    assert found.training_script_args == job().command()


def test_several_nodes_of_torchrun_meet_at_the_first():
    four = job(resources=Resources(nodes=4, gpus_per_node=2))
    words = shlex.split(torchrun_line(four, "node-0"))
    assert words[:5] == [
        "torchrun",
        "--nnodes=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node-0:29500",
        "--nproc-per-node=2",
    ]
    with pytest.raises(MooredError, match="4 nodes meet at the first of them; name it with --head"):
        torchrun_line(four)
    with pytest.raises(MooredError, match="--head cannot be"):
        torchrun_line(four, "node; rm -rf x")


def test_a_ray_job_takes_the_folder_along_and_finds_its_cluster():
    line = ray_submit_line(job(engine="ray"), "http://10.0.0.1:8265")
    assert line == (
        "ray job submit --address=http://10.0.0.1:8265 --submission-id=sokoban-grpo "
        "--working-dir=. -- python -m moored train sokoban grpo rollout.num_groups=64 "
        "engine.kind=ray engine.ray.address=auto --run /shared/runs/sokoban-grpo\n"
    )


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=sokoban-grpo
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --requeue
set -euo pipefail

command=(train sokoban grpo rollout.num_groups=64 engine.kind=ray \
engine.ray.address=auto --run /shared/runs/sokoban-grpo)
if [ -e /shared/runs/sokoban-grpo/config.yaml ]; then
    command=(train --resume /shared/runs/sokoban-grpo)
fi
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\\n'*}
srun --cpus-per-task=64 ray symmetric-run --address="$head:6379" --min-nodes="$SLURM_NNODES" \\
    -- python -m moored "${command[@]}"
"""


def test_a_slurm_script_starts_ray_on_all_nodes_and_the_driver_on_the_first():
    found = slurm_script(
        job(engine="ray", resources=Resources(nodes=4, cpus_per_node=64)),
        SlurmOptions(time="24:00:00", partition="gpu"),
    )
    assert found == SCRIPT


def test_a_slurm_script_starts_ranks_and_lets_them_save_before_the_limit():
    found = slurm_script(job(resources=Resources(nodes=2)), SlurmOptions(account="my-project"))
    lines = found.splitlines()
    assert "#SBATCH --signal=TERM@180" in lines
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170" in lines
    assert "#SBATCH --account=my-project" in lines
    assert 'srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 \\' in lines
    assert not [line for line in lines if "--time" in line or "--cpus-per-task" in line]


def run_script(text: str, folder: Path) -> list[str]:
    """The arguments that the job's program gets, with stand-ins for the cluster's commands."""
    commands = folder / "bin"
    commands.mkdir()
    for name, body in {
        "scontrol": "echo node-0; echo node-1",
        "srun": 'printf "%s\\0" "$@"',
        "torchrun": 'printf "%s\\0" "$@"',
    }.items():
        file = commands / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    variables = {"PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-[0-1]"}
    variables |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\0").split("\0")


@pytest.mark.parametrize("engine", ["ray", "torchrun"])
def test_a_script_is_read_by_bash_as_it_was_meant(engine, tmp_path):
    odd = job(engine=engine, run=ODD, words=("env.0.options.text=a b;c $HOME 'd'", "grpo"))
    text = slurm_script(odd, SlurmOptions())
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words = run_script(text, tmp_path)
    assert words[words.index("moored") + 1 :] == odd.command()
    # Of two nodes the first, and nothing but its name.
    assert [word for word in words if word.endswith(("=node-0:6379", "=node-0:29500"))]
    assert not (tmp_path / "hacked").exists()


def test_a_job_that_comes_back_goes_on_with_its_run(tmp_path):
    run = tmp_path / "it's a run"
    run.mkdir()
    (run / "config.yaml").touch()
    words = run_script(slurm_script(job(run=str(run)), SlurmOptions()), tmp_path)
    assert words[words.index("moored") + 1 :] == ["train", "--resume", str(run)]


def test_a_torchrun_line_with_odd_words_is_read_as_it_was_meant(tmp_path):
    odd = job(run=ODD, words=("grpo", "env.0.options.text=$(touch hacked) 'x'"))
    words = run_script(torchrun_line(odd), tmp_path)
    assert words[words.index("moored") + 1 :] == odd.command()
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("word", ["a b", "x=$(id)", "x=`id`", "a;b", "x='1'", "a&&b", "x=*"])
def test_a_ray_job_refuses_words_that_a_shell_of_the_cluster_would_read(word):
    with pytest.raises(MooredError, match="would read as its own; put the option into a YAML"):
        ray_submit_line(job(engine="ray", words=("grpo", word)), "http://127.0.0.1:8265")
    with pytest.raises(MooredError, match="would read as its own"):
        ray_submit_line(job(engine="ray", run=f"/runs/{word}"), "http://127.0.0.1:8265")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"time": "tomorrow"}, "--time cannot be 'tomorrow'; give something like 24:00:00"),
        ({}, {"time": "1:00:00\n#SBATCH --x"}, "--time cannot be"),
        ({}, {"partition": "gpu\n#SBATCH --uid=0"}, "--partition cannot be"),
        ({}, {"account": "a b"}, "--account cannot be 'a b'; give something like my-project"),
        ({"run": "runs/a\nb"}, {}, "has a control character, which a job cannot be given"),
        ({"words": ("x=\0",)}, {}, "has a control character"),
    ],
)
def test_what_a_script_cannot_hold_is_refused(changes, options, message):
    with pytest.raises(MooredError, match=message):
        slurm_script(job(**changes), SlurmOptions(**options))


@pytest.mark.parametrize("address", ["10.0.0.1:8265", "http://a b", "http://x;id", "file:///x"])
def test_an_address_must_be_one_of_a_dashboard(address):
    with pytest.raises(MooredError, match="--address cannot be"):
        ray_submit_line(job(engine="ray"), address)


def test_a_run_directory_of_a_ray_job_must_be_seen_by_all_nodes():
    with pytest.raises(MooredError, match="--run 'runs/x' is relative, but the job runs in"):
        ray_submit_line(job(engine="ray", run="runs/x"), "http://127.0.0.1:8265")
