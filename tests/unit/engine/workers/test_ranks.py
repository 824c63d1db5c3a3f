"""Which rank this is, and what is refused."""

from __future__ import annotations

import pytest

from moored.config import load_config
from moored.engine.workers.ranks import (
    HOW,
    VARIABLES,
    Rank,
    check_gpus,
    check_ranks,
    rank_from,
    typed_command,
)
from moored.engine.workers.ranks import started_rank as find_rank
from moored.errors import MooredError

FOUR: dict[str, str] = dict(zip(VARIABLES, ("5", "8", "1", "4", "node0", "29500"), strict=True))


def test_a_rank_knows_its_place_on_its_machine_and_among_all():
    assert rank_from(FOUR) == Rank(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"RANK": "first"}, "RANK must be a whole number, got 'first'"),
        ({"RANK": "8"}, "RANK 8 of WORLD_SIZE 8"),
        ({"LOCAL_WORLD_SIZE": "9"}, "do not fit together"),
    ],
)
def test_variables_that_make_no_sense_are_refused(changes, why):
    with pytest.raises(MooredError, match=why):
        rank_from({**FOUR, **changes})


def test_a_variable_that_is_missing_is_named():
    with pytest.raises(MooredError, match=r"LOCAL_RANK is missing; .* torchrun"):
        rank_from({name: value for name, value in FOUR.items() if name != "LOCAL_RANK"})


def test_only_python_m_moored_is_a_rank_because_scripts_of_other_trainers_have_the_variables(
    monkeypatch,
):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/moored", "diagnose"])
    assert find_rank(FOUR) is None
    monkeypatch.setattr("sys.argv", ["/somewhere/moored/__main__.py", "train"])
    assert find_rank(FOUR) == rank_from(FOUR)


def test_a_command_that_an_error_or_a_stopped_run_prints_is_one_that_torchrun_reads(monkeypatch):
    parse = pytest.importorskip("torch.distributed.run").parse_args
    one_machine = {**FOUR, "WORLD_SIZE": "4", "RANK": "1"}
    for name, value in one_machine.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["/somewhere/moored/__main__.py", "train"])
    own = ["train", "--resume", "runs/a", "--run", "runs/b"]
    for printed in (typed_command(), HOW.removesuffix(" …")):
        found = parse([*printed.split()[1:], *own])
        assert (found.module, found.training_script) == (True, "moored")
        assert found.training_script_args == own


def test_ranks_of_a_machine_take_one_gpu_each():
    rank = Rank(rank=3, size=4, local_rank=1, local_size=2)
    assert check_gpus(rank, "auto", 2) == "cuda:1"
    assert check_gpus(rank, "cpu", 2) == "cpu"
    assert check_gpus(rank, "auto", 0) == "cpu"
    with pytest.raises(MooredError, match="2 ranks were started on this machine, which has 1 GPUs"):
        check_gpus(rank, "auto", 1)
    with pytest.raises(MooredError, match="cuda:0 cannot be that of every rank"):
        check_gpus(rank, "cuda:0", 2)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("rollout.num_groups=1", "2 ranks share 1 groups"),
        ("optimizer.states=host", "optimizer.states = host works with engine.kind=local only"),
        ("gradients.every=1", "gradients.every = 1 works with engine.kind=local only"),
    ],
)
def test_options_that_ranks_cannot_compute_are_refused(option, why):
    config = load_config({"env": "bandit"}, [option])
    with pytest.raises(MooredError, match=why):
        check_ranks(config, 2)
    check_ranks(config, 2, trains=False)
