"""Names and commands of jobs."""

from __future__ import annotations

import pytest

from moored.errors import MooredError
from moored.launch import check_name
from moored.launch.job import default_name
from tests.unit.launch.test_shell import job


def test_a_command_has_the_engine_after_the_words_so_that_it_counts():
    words = job(engine="ray", words=("grpo", "engine.dtype=bfloat16")).command()
    assert words[1:] == [
        *("grpo", "engine.dtype=bfloat16", "engine.kind=ray", "engine.ray.address=auto"),
        *("--run", "/shared/runs/sokoban-grpo"),
    ]
    assert "engine.ray.address=auto" not in job(engine="torchrun").command()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["sokoban", "grpo", "num_steps=5"], "sokoban-grpo"),
        (["configs/My_Run.yaml"], "my-run"),
        (["qwen2.5-7b"], "qwen2-5-7b"),
        (["num_steps=5"], "moored"),
        (["a" * 46 + ".b"], "a" * 46),
    ],
)
def test_a_job_is_named_after_its_presets(words, name):
    assert default_name(words) == check_name("--name", name)


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a b", "a;b", "a\n", "ä", "a" * 48])
def test_a_name_that_some_cluster_would_refuse_is_refused(name):
    with pytest.raises(MooredError, match="--name must be lower-case letters, digits and '-'"):
        check_name("--name", name)
