"""What to change about a cluster on which nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import moored.plan.splits
from moored.models.shapes import shape_of
from moored.plan.cluster_advice import cluster_remedy
from moored.plan.gpus import GPUS
from moored.plan.layouts import LAYOUTS
from moored.plan.links import make_cluster
from moored.plan.setup import setup_of
from moored.plan.splits import any_fits, most_replicas
from tests.unit.plan.test_cluster import options, planned

SEVEN = shape_of("Qwen/Qwen2.5-7B")


def test_what_does_not_fit_says_how_many_gpus_would():
    found = planned("meta-llama/Llama-3.1-70B", 8)
    assert not found.fits
    assert set(found.misfits) == set(LAYOUTS)
    remedy = cluster_remedy(found)
    assert remedy.startswith("give it ")
    num_gpus = int(remedy.split()[2])
    assert planned("meta-llama/Llama-3.1-70B", num_gpus).fits
    assert not planned("meta-llama/Llama-3.1-70B", num_gpus - 8).fits


def test_adapters_are_advised_only_where_they_fit():
    assert "lora_rank" in cluster_remedy(planned("Qwen/Qwen2.5-14B", 2, gpu="h200"))
    hopeless = planned("meta-llama/Llama-3.1-70B", 1, gpu="l4")
    assert cluster_remedy(hopeless).startswith("neither more GPUs of this kind nor adapters help")


def test_where_groups_are_too_few_for_the_learners_it_says_how_many():
    found = planned("meta-llama/Llama-3.1-70B", 8, "rollout.num_groups=8")
    remedy = cluster_remedy(found)
    num_gpus = int(remedy.split()[2])
    assert remedy.startswith(
        f"give it {num_gpus} GPUs (--gpus {num_gpus}) with rollout.num_groups={num_gpus}"
    )
    groups = f"rollout.num_groups={num_gpus}"
    assert planned("meta-llama/Llama-3.1-70B", num_gpus, groups).fits


def test_a_cluster_that_is_large_enough_is_given_groups_and_not_the_same_gpus():
    found = planned("Qwen/Qwen2.5-72B", 128, "algorithm.name=ppo", "rollout.num_groups=8")
    assert not found.fits
    first = cluster_remedy(found).split(", or ")[0]
    assert first == "set rollout.num_groups=128 collapse.num_pairs=128"
    options = first.split()[1:]
    # `planned` reads them as a command does, so the configuration takes them.
    assert planned("Qwen/Qwen2.5-72B", 128, "algorithm.name=ppo", *options).fits


def test_a_split_that_does_not_fit_is_not_answered_with_the_same_gpus():
    # Seven of eight GPUs sample, and 7 B need more than one to learn on.
    found = planned("Qwen/Qwen2.5-7B", 8, ways=7)
    assert not found.fits
    remedy = cluster_remedy(found)
    assert remedy.startswith("leave out --samplers and --tensor-parallel, to have the split chosen")
    assert "--gpus 8" not in remedy
    num_gpus = int(remedy.split("--gpus ")[1].split(")")[0])
    assert planned("Qwen/Qwen2.5-7B", num_gpus, ways=7).fits


def test_another_sampler_is_advised_where_the_plain_one_has_no_room_for_all_episodes():
    words = ["engine.sampler=plain", "rollout.group_size=128"]
    found = planned("Qwen/Qwen2.5-7B", 8, *words, ways=1)
    assert not found.fits
    pieces = cluster_remedy(found).split(", or ")
    assert "set engine.sampler=auto (the plain one writes all episodes at once)" in pieces
    assert planned("Qwen/Qwen2.5-7B", 8, *words, "engine.sampler=auto", ways=1).fits
    # More GPUs that sample have fewer episodes each.
    assert planned("Qwen/Qwen2.5-7B", 8, "engine.sampler=plain", "rollout.group_size=4").fits
    other = replace(found, setup=replace(found.setup, shape=replace(SEVEN, is_fast=False)))
    assert "set engine.sampler=vllm (the plain one" in cluster_remedy(other)


WORDS = (
    [],
    ["algorithm.name=ppo", "engine.micro_batch_tokens=100"],
    ["optimizer.lora_rank=8", "engine.sampler=vllm"],
    ["engine.sampler=plain"],
)
SPLITS: tuple[dict[str, Any], ...] = ({}, {"ways": 1}, {"samplers": 3}, {"samplers": 3, "ways": 2})


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"])
def test_what_is_said_to_fit_is_what_comparing_all_layouts_finds(model, monkeypatch):
    found: set[bool] = set()
    cases = itertools.product(WORDS, SPLITS, (4, 9, 66), (8.0, 24.0, 80.0))
    for words, split, num_gpus, memory_gib in cases:
        monkeypatch.setitem(GPUS, "own", replace(GPUS["h200"], memory_gib=memory_gib))
        setup = setup_of(options(model, *words), shape_of(model))
        cluster = make_cluster(GPUS["own"], num_gpus)
        fits = any_fits(setup, cluster, **split)
        assert planned(model, num_gpus, *words, gpu="own", **split).fits == fits
        found.add(fits)
    assert found == {True, False}


def test_replicas_stay_within_the_nodes_that_learners_leave():
    setup = setup_of(options("Qwen/Qwen2.5-7B"), shape_of("Qwen/Qwen2.5-7B"))
    cluster = make_cluster(GPUS["h200"], 22)
    # Nodes of 8, 8 and 6 GPUs.
    for learners, ways, replicas in ((1, 1, 21), (1, 4, 1 + 2 + 1), (3, 4, 1 + 2 + 1)):
        assert most_replicas(setup, cluster, learners, ways) == replicas
    assert most_replicas(setup, cluster, 13, 2) == 1 + 3
    assert most_replicas(setup, cluster, 16, 4) == 1
    assert most_replicas(setup, cluster, 21, 1) == 1
    assert most_replicas(setup, cluster, 21, 2) == 0


def test_advice_of_a_hopeless_cluster_does_not_compare_all_layouts(monkeypatch):
    own = replace(GPUS["l4"], memory_gib=2.0)
    monkeypatch.setitem(GPUS, "own", own)
    words = ["rollout.num_groups=2048", "collapse.num_pairs=2048"]
    found = planned("meta-llama/Llama-3.1-70B", 64, *words, gpu="own")
    calls = []
    choose = moored.plan.splits.learner_choices
    monkeypatch.setattr(
        moored.plan.splits, "learner_choices", lambda *a, **k: calls.append(1) or choose(*a, **k)
    )
    assert cluster_remedy(found).startswith("neither more GPUs of this kind nor adapters help")
    # Of each of some 15 clusters, those of a few numbers of learners and not of up to 135.
    assert len(calls) < 500
