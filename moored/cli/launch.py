"""`moored launch`: write the job that trains a configuration on a cluster; nothing is submitted."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.options import ConfigWords, check_config, read_config
from moored.errors import MooredError

if TYPE_CHECKING:
    from moored.config import Config
    from moored.launch import Job
    from moored.launch.job import EngineKind, Resources


class Target(StrEnum):
    """Where a job is to run."""

    TORCHRUN = "torchrun"
    RAY = "ray"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


ONLY_FOR: dict[str, Target] = {
    "head": Target.TORCHRUN,
    "address": Target.RAY,
    "time": Target.SLURM,
    "partition": Target.SLURM,
    "account": Target.SLURM,
    "image": Target.KUBERNETES,
    "namespace": Target.KUBERNETES,
    "claim": Target.KUBERNETES,
    "memory": Target.KUBERNETES,
}
"""Options that one kind of job has."""

On = Annotated[Target, typer.Option(help="What starts the job.")]
RunFolder = Annotated[
    str | None, typer.Option(help="Run directory as the cluster sees it; default runs/NAME.")
]
Name = Annotated[str | None, typer.Option(help="Of the job; default: from the presets.")]
Nodes = Annotated[int, typer.Option(help="Machines.", min=1)]
GpusPerNode = Annotated[int, typer.Option(help="0 for processors alone.", min=0)]
CpusPerNode = Annotated[int | None, typer.Option(help="Processors of each machine.", min=1)]
Out = Annotated[Path | None, typer.Option(help="Write it here instead of printing it.")]
Head = Annotated[str | None, typer.Option(help="torchrun on several nodes: the first of them.")]
Address = Annotated[str | None, typer.Option(help="ray: its dashboard, http://host:8265.")]
Time = Annotated[str | None, typer.Option(help="slurm: time limit, such as 24:00:00.")]
Partition = Annotated[str | None, typer.Option(help="slurm.")]
Account = Annotated[str | None, typer.Option(help="slurm.")]
Image = Annotated[str | None, typer.Option(help="kubernetes: image with moored[ray] installed.")]
Namespace = Annotated[str | None, typer.Option(help="kubernetes.")]
ClaimText = Annotated[str | None, typer.Option(help="kubernetes: volume of the runs, NAME:/mount.")]
Memory = Annotated[str | None, typer.Option(help="kubernetes: of a pod; default 64Gi.")]


def launch_command(
    on: On,
    what: ConfigWords = None,
    run: RunFolder = None,
    name: Name = None,
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = 8,
    cpus_per_node: CpusPerNode = None,
    out: Out = None,
    head: Head = None,
    address: Address = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    image: Image = None,
    namespace: Namespace = None,
    claim: ClaimText = None,
    memory: Memory = None,
) -> None:
    """Write the job that trains a configuration on a cluster.

    `moored launch sokoban grpo qwen2.5-7b --on slurm --nodes 4 > job.sh`. Torchrun lines, `ray job
    submit`, sbatch scripts, and RayJob manifests for KubeRay. It submits nothing.
    """
    from moored.launch import Resources

    given = {"head": head, "address": address, "image": image, "namespace": namespace}
    given |= {"time": time, "partition": partition, "account": account}
    given |= {"claim": claim, "memory": memory}
    _check_options(on, given)
    resources = Resources(nodes=nodes, gpus_per_node=gpus_per_node, cpus_per_node=cpus_per_node)
    job = _make_job(on, what or [], run, name, resources)
    text = _write(on, job, given)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MooredError(
            f"cannot write {str(out)!r} ({error.strerror}); give --out a file in a folder that "
            f"exists"
        ) from error
    print_line(make_console(), f"wrote {out}; submit it with: {_submit(on, out)}")


def _check_options(on: Target, given: dict[str, str | None]) -> None:
    for name, value in given.items():
        if value is not None and ONLY_FOR[name] is not on:
            raise MooredError(f"--{name} is for --on {ONLY_FOR[name]}, and this is --on {on}")


def _make_job(
    on: Target, words: list[str], run: str | None, name: str | None, resources: Resources
) -> Job:
    from moored.launch import Job, check_name
    from moored.launch.job import default_name

    # Lag is refused with an engine that has none, and which one it is was not decided yet.
    engine = _engine(on, read_config([*words, "rollout.max_lag=0"]).engine.kind)
    words = [word for word in words if not word.startswith("engine.kind=")]
    config = read_config([*words, f"engine.kind={engine}"])
    check_config(config)
    _check_places(config, engine, resources)
    name = check_name("--name", name or default_name(words))
    return Job(
        name=name,
        words=tuple(words),
        run=run or f"runs/{name}",
        engine=engine,
        resources=resources,
    )


def _engine(on: Target, kind: str) -> EngineKind:
    """What computes: Ray, or torchrun where that starts the job or the configuration says so."""
    if on is Target.TORCHRUN or (on is Target.SLURM and kind == "torchrun"):
        found: EngineKind = "torchrun"
    else:
        found = "ray"
    if kind not in ("local", found):
        raise MooredError(f"engine.kind = {kind} does not go with --on {on}; leave it out")
    return found


def _check_places(config: Config, engine: EngineKind, resources: Resources) -> None:
    """Refuse what cannot start: fewer groups than ranks, fewer GPUs than actors."""
    groups = config.rollout.num_groups
    ranks = config.engine.ray.learners
    if engine == "torchrun":
        ranks = resources.nodes * resources.ranks_per_node
    if ranks > groups:
        raise MooredError(
            f"{ranks} ranks share {groups} groups, so some would have none; set rollout.num_groups "
            f"to {ranks} or more, or use fewer"
        )
    replicas = config.engine.ray.replicas
    if engine == "torchrun" or not resources.gpus_per_node or replicas == "auto":
        return
    ray, has = config.engine.ray, resources.nodes * resources.gpus_per_node
    each = config.engine.gpus_per_sampler if ray.replica_gpus is None else ray.replica_gpus
    needs = ranks * _gpus(ray.learner_gpus) + replicas * each
    if needs > has:
        raise MooredError(
            f"engine.ray.learners = {ranks} and engine.ray.replicas = {replicas} need {needs:g} "
            f"GPUs, but {resources.nodes} x {resources.gpus_per_node} are {has}; `moored plan "
            f"--gpus {has}` divides them"
        )


def _gpus(number: float | None) -> float:
    return 1.0 if number is None else number


def _write(on: Target, job: Job, given: dict[str, str | None]) -> str:
    from moored.launch import SlurmOptions, ray_submit_line, slurm_script, torchrun_line

    if on is Target.TORCHRUN:
        return torchrun_line(job, given["head"])
    if on is Target.RAY:
        return ray_submit_line(job, given["address"] or "http://127.0.0.1:8265")
    if on is Target.SLURM:
        options = SlurmOptions(
            time=given["time"], partition=given["partition"], account=given["account"]
        )
        return slurm_script(job, options)
    return _write_manifest(job, given)


def _write_manifest(job: Job, given: dict[str, str | None]) -> str:
    import yaml

    from moored.launch import PodOptions, parse_claim, ray_job
    from moored.launch.kubernetes import DEFAULT_MEMORY

    image, claim = given["image"], given["claim"]
    if image is None:
        raise MooredError("a RayJob needs an image with moored[ray] installed: --image NAME")
    if claim is None:
        raise MooredError(
            "a RayJob needs a volume that outlives its pods, for the runs: --claim NAME:/mount"
        )
    options = PodOptions(
        image=image,
        claim=parse_claim(claim),
        namespace=given["namespace"],
        memory=given["memory"] or DEFAULT_MEMORY,
    )
    return yaml.safe_dump(ray_job(job, options), sort_keys=False, width=1000)


def _submit(on: Target, out: Path) -> str:
    from shlex import quote

    words = {Target.SLURM: "sbatch", Target.KUBERNETES: "kubectl apply -f"}
    return f"{words.get(on, 'bash')} {quote(str(out))}"
