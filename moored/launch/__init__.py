"""Jobs for clusters, written from one configuration; nothing is submitted."""

from moored.launch.job import Job, Resources, check_name, check_value, check_words
from moored.launch.kubernetes import Claim, PodOptions, parse_claim, ray_job
from moored.launch.shell import SlurmOptions, ray_submit_line, slurm_script, torchrun_line

__all__ = [
    "Claim",
    "Job",
    "PodOptions",
    "Resources",
    "SlurmOptions",
    "check_name",
    "check_value",
    "check_words",
    "parse_claim",
    "ray_job",
    "ray_submit_line",
    "slurm_script",
    "torchrun_line",
]
