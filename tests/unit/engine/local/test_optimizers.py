"""Moments in 8 bits, and the state of an optimiser as plain tensors."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from moored.config import load_config
from moored.config_engine import OptimizerConfig
from moored.engine.local.engine import LocalEngine
from moored.engine.local.optimizers import flat_state, load_state, make_optimizer, set_rate
from moored.errors import MooredError


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its update, which takes longer than these tests."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    # Tensors of fewer than 4,096 numbers keep moments in float32.
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 256), (7,))]


def optimizer_of(kind: str, given: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
    options = OptimizerConfig.model_validate({"kind": kind})
    return make_optimizer(given, 1e-2, options, is_fused=False)


def take_steps(optimizer: torch.optim.Optimizer, given: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for weight in given:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def test_an_optimiser_without_its_package_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = load_config({"model": "no/model", "optimizer": {"kind": "adamw_8bit"}})
    with pytest.raises(MooredError, match=r"pip install 'moored\[lowbit\]'"):
        LocalEngine(config)


def test_moments_in_eight_bits_move_weights_nearly_as_those_in_float32():
    found = {}
    for kind in ("adamw", "adamw_8bit"):
        given = weights()
        take_steps(optimizer_of(kind, given), given, range(5))
        found[kind] = [(w - start).detach() for w, start in zip(given, weights(), strict=True)]
    for exact, rounded in zip(found["adamw"], found["adamw_8bit"], strict=True):
        assert (exact - rounded).norm() < 0.05 * exact.norm()


def test_moments_in_eight_bits_take_two_bytes_a_parameter():
    given = weights()
    optimizer = optimizer_of("adamw_8bit", given)
    take_steps(optimizer, given, range(1))
    size = sum(t.nbytes for key, t in flat_state(optimizer).items() if key.startswith("0."))
    # A float32 scale for each block of 256, twice; two maps of 256; the number of steps.
    assert size == 2 * 64 * 256 + 2 * 64 * 4 + 2 * 256 * 4 + 4


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(kind: str):
    first = weights()
    optimizer = optimizer_of(kind, first)
    take_steps(optimizer, first, range(3))
    saved = flat_state(optimizer)
    second = [nn.Parameter(weight.detach().clone()) for weight in first]
    other = optimizer_of(kind, second)
    load_state(other, saved)
    take_steps(optimizer, first, range(3, 5))
    take_steps(other, second, range(3, 5))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_the_rate_of_an_update_is_the_one_set_last(kind: str):
    given, start = weights(), weights()
    optimizer = optimizer_of(kind, given)
    set_rate(optimizer, 0.0)
    take_steps(optimizer, given, range(1))
    assert all(torch.equal(weight, before) for weight, before in zip(given, start, strict=True))
    set_rate(optimizer, 1e-3)
    take_steps(optimizer, given, range(1, 2))
    assert not any(torch.equal(weight, before) for weight, before in zip(given, start, strict=True))
