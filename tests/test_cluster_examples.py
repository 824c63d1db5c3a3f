"""Job files of examples/cluster: a shell or YAML reads them, and moored takes the words in them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from moored.cli.options import read_config

FOLDER = Path(__file__).parent.parent / "examples" / "cluster"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def train_words(command: str) -> list[str]:
    """The presets and options behind `train`, up to the run directory."""
    words = shlex.split(command)
    return words[words.index("train") + 1 : words.index("--run")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_and_its_words_are_a_configuration_for_ranks(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    (command,) = re.findall(r"^command=\((train (?!--resume).*)\)$", text, re.MULTILINE)
    config = read_config(train_words(command))
    assert config.engine.kind == "torchrun"
    # Each of its ranks has a group of its own.
    nodes = int((re.findall(r"--nodes=(\d+)", text) or ["1"])[0])
    assert config.rollout.num_groups >= 8 * nodes


def test_the_ray_job_is_a_manifest_and_its_words_fit_its_gpus():
    found = yaml.safe_load((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    cluster = found["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        # KubeRay wants strings here.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    config = read_config(train_words(found["spec"]["entrypoint"]))
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    ray = config.engine.ray
    assert config.engine.kind == "ray" and ray.learners <= config.rollout.num_groups
    assert isinstance(ray.replicas, int) and ray.learners + ray.replicas <= gpus
