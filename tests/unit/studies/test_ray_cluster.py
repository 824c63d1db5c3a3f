"""Runs on a cluster, without one; tests/e2e/test_study_on_ray.py has a real one."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from moored.errors import ConfigError
from moored.studies.ray_cluster import LOST_NODE_CODE, _check_reachable, _RayProcess


class ActorError(Exception):
    pass


def process_on(node: dict) -> _RayProcess:
    """A run on a node that is described by what Ray would say of it."""

    def get(_end: object) -> int:
        if node["code"] is None:
            raise ActorError
        return node["code"]

    ray = SimpleNamespace(
        wait=lambda ends, timeout: (ends, []) if node["has_ended"] else ([], ends),
        get=get,
        exceptions=SimpleNamespace(RayActorError=ActorError),
    )
    host = SimpleNamespace(wait=SimpleNamespace(remote=lambda: "end"))
    return _RayProcess(ray, host)


def test_a_run_that_waits_for_a_place_has_no_exit_code():
    process = process_on({"has_ended": False, "code": 0})
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)


def test_the_exit_code_is_that_of_the_run_and_a_lost_node_has_one_of_its_own():
    assert process_on({"has_ended": True, "code": 3}).poll() == 3
    assert process_on({"has_ended": True, "code": None}).wait() == LOST_NODE_CODE == 255


def test_an_address_without_a_port_is_left_to_ray_and_a_closed_one_is_refused():
    _check_reachable("auto")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1' \("):
        _check_reachable("127.0.0.1:1")
