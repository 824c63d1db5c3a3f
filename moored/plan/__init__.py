"""What a run needs of a GPU, before anything is loaded: memory by part, seconds by phase."""

from moored.models.shapes import ModelShape, shape_from_config, shape_of
from moored.plan.advice import (
    Advice,
    advice,
    gib_refused_by_train,
    refuse_what_cannot_fit,
    remedy,
    verdict,
)
from moored.plan.gpus import GPUS, Gpu, find_gpu, known_gpu
from moored.plan.plan import Plan, choose_batch, plan
from moored.plan.seconds import Lengths, longest_lengths

__all__ = [
    "GPUS",
    "Advice",
    "Gpu",
    "Lengths",
    "ModelShape",
    "Plan",
    "advice",
    "choose_batch",
    "find_gpu",
    "gib_refused_by_train",
    "known_gpu",
    "longest_lengths",
    "plan",
    "refuse_what_cannot_fit",
    "remedy",
    "shape_from_config",
    "shape_of",
    "verdict",
]
