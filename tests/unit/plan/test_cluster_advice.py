"""What to change about a cluster on which nothing fits."""

from __future__ import annotations

from moored.plan.cluster_advice import cluster_remedy
from moored.plan.layouts import LAYOUTS
from tests.unit.plan.test_cluster import planned


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
