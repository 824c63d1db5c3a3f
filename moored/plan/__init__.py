"""What a run needs of a GPU, before anything is loaded: memory by part, seconds by phase."""

from moored.plan.gpus import GPUS, Gpu, find_gpu, known_gpu
from moored.plan.plan import Plan, plan, plan_if_known
from moored.plan.setup import Lengths, longest_lengths

__all__ = [
    "GPUS",
    "Gpu",
    "Lengths",
    "Plan",
    "find_gpu",
    "known_gpu",
    "longest_lengths",
    "plan",
    "plan_if_known",
]
