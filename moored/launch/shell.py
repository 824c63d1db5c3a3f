"""Jobs as lines and scripts for a shell: torchrun, `ray job submit`, sbatch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from moored.errors import MooredError
from moored.launch.job import PYTHON, Job, check_shared_path, check_value, check_words

MODULE = ("-m", "--", "moored")
"""For torchrun, which would take `--run` for a short form of its own options without the dashes."""
RENDEZVOUS_PORT, RAY_PORT = 29500, 6379
NOTICE_S = 180
"""How long before the time limit of Slurm ranks are asked to save and leave."""
HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What a partition asks for."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None


def torchrun_line(job: Job, head: str | None = None) -> str:
    """To be run on every node at once; `head` is the first of them, where there are several."""
    check_words([*job.words, job.run], for_shell=True)
    resources = job.resources
    if resources.nodes == 1:
        where = ["--standalone"]
    elif head is None:
        raise MooredError(
            f"{resources.nodes} nodes meet at the first of them; name it with --head HOST"
        )
    else:
        check_value("--head", head, HOST, "node-0")
        where = [f"--nnodes={resources.nodes}", "--rdzv-backend=c10d"]
        where.append(f"--rdzv-endpoint={head}:{RENDEZVOUS_PORT}")
    ranks = f"--nproc-per-node={resources.ranks_per_node}"
    return shlex.join(["torchrun", *where, ranks, *MODULE, *job.command()]) + "\n"


def ray_submit_line(job: Job, address: str) -> str:
    """For a Ray cluster that runs already; the present folder goes along."""
    check_words([*job.words, job.run], for_shell=False)
    check_shared_path(job.run)
    check_value("--address", address, rf"https?://{HOST}(:\d+)?/?", "http://127.0.0.1:8265")
    submit = ["ray", "job", "submit", f"--address={address}", f"--submission-id={job.name}"]
    return shlex.join([*submit, "--working-dir=.", "--", *PYTHON, *job.command()]) + "\n"


def slurm_script(job: Job, options: SlurmOptions) -> str:
    """For sbatch; a job that is put back into the queue goes on with its run."""
    check_words([*job.words, job.run], for_shell=True)
    lines = ["#!/bin/bash", *_directives(job, options), "set -euo pipefail", ""]
    lines += [
        f"command=({shlex.join(job.command())})",
        f"if [ -e {shlex.quote(job.run + '/config.yaml')} ]; then",
        f"    command=({shlex.join(job.resume_command())})",
        "fi",
        'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "head=${nodes%%$'\\n'*}",
    ]
    lines += _torchrun_steps(job) if job.engine == "torchrun" else _ray_steps(job)
    return "\n".join(lines) + "\n"


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    resources = job.resources
    given = {
        "job-name": job.name,
        "output": "%x-%j.out",
        "open-mode": "append",
        "nodes": resources.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": resources.gpus_per_node or None,
        "cpus-per-task": resources.cpus_per_node,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        # Ranks save and leave; a Ray cluster would lose its own processes first.
        "signal": f"TERM@{NOTICE_S}" if job.engine == "torchrun" else None,
    }
    patterns = {
        "time": (r"(\d+-)?\d{1,2}:\d{2}:\d{2}", "24:00:00 or 2-00:00:00"),
        "partition": (r"[\w.,-]+", "gpu"),
        "account": (r"[\w.,-]+", "my-project"),
    }
    for name, (pattern, example) in patterns.items():
        if given[name] is not None:
            check_value(f"--{name}", str(given[name]), pattern, example)
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    return [*lines, "#SBATCH --requeue"]


def _torchrun_steps(job: Job) -> list[str]:
    ranks = job.resources.ranks_per_node
    return [
        # By itself torchrun ends ranks 30 s after SIGTERM, in the middle of a long step.
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={NOTICE_S - 10}",
        f'{_srun(job)} torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={ranks} \\',
        '    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\',
        f'    --rdzv-endpoint="$head:{RENDEZVOUS_PORT}" \\',
        f'    {shlex.join(MODULE)} "${{command[@]}}"',
    ]


def _srun(job: Job) -> str:
    """Some releases of Slurm do not hand the CPUs of the job on to its steps."""
    cpus = job.resources.cpus_per_node
    return "srun" if cpus is None else f"srun --cpus-per-task={cpus}"


def _ray_steps(job: Job) -> list[str]:
    """Ray starts on all nodes, the command on the first once they are there, and all end."""
    where = f'--address="$head:{RAY_PORT}" --min-nodes="$SLURM_NNODES"'
    return [
        f"{_srun(job)} ray symmetric-run {where} \\",
        f'    -- {shlex.join(PYTHON)} "${{command[@]}}"',
    ]
