"""Where the time of a run goes: a table of phases, and a trace of one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, schedule

from moored.train import StepRecord

TRACED_STEP = 4
"""Steps before it set things up: kernels are compiled, graphs captured, caches filled."""
TOKENS = {"rollout": "tokens/generated", "update": "tokens/trained"}


class Profile:
    """Collects the steps of a run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self._records: list[StepRecord] = []
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=kinds,
            schedule=schedule(wait=TRACED_STEP - 2, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(trace)),
        )

    def see(self, record: StepRecord) -> None:
        """Take one finished step."""
        self._records.append(record)
        self._profiler.step()

    def table(self) -> Table:
        """Median seconds, share of the step and token rate of each phase, the set-up left out."""
        kept = self._records[TRACED_STEP:] or self._records[1:] or self._records
        if not kept:
            return Table("no step was finished")
        total = median(sum(record.seconds.values()) for record in kept)
        headers = "phase", "median s", "share", "tokens/s"
        table = Table(*headers, box=box.SIMPLE_HEAD, header_style="bold")
        for phase in dict.fromkeys(name for record in kept for name in record.seconds):
            with_phase = [record for record in kept if phase in record.seconds]
            seconds = median(record.seconds[phase] for record in with_phase)
            share = sum(record.seconds[phase] for record in with_phase) / sum(
                sum(record.seconds.values()) for record in kept
            )
            rates = [
                record.metrics[TOKENS[phase]] / record.seconds[phase]
                for record in with_phase
                if phase in TOKENS
            ]
            rate = f"{median(rates):,.0f}" if rates else ""
            table.add_row(phase, f"{seconds:.3f}", f"{share:.0%}", rate)
        table.add_row("step", f"{total:.3f}", "", "")
        table.add_row("first step", f"{sum(self._records[0].seconds.values()):.3f}", "", "")
        if torch.cuda.is_available() and torch.cuda.max_memory_reserved():
            peak = torch.cuda.max_memory_reserved() / 2**30
            table.caption = f"at most {peak:.2f} GiB of GPU memory taken"
        return table


@contextmanager
def profiled(trace: Path) -> Iterator[Profile]:
    """Profile the steps inside; the trace is written once its step is done."""
    found = Profile(trace)
    with found._profiler:
        yield found
