"""A gigabyte of rollouts, read by `moored advise` and `moored diagnose`: time and memory.

    python benchmarks/read.py [--gigabytes 1] [--out FILE]

Random text is written into a temporary folder, as JSON lines and as Parquet in a single row group
(as pandas writes it, the hardest to stream). Every reading is a process of its own; its peak memory
is reported with what it holds before it opens the file. Linux only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from moored.analysis.diagnose import LookOptions, draw
from moored.analysis.rewards import read_rewards
from moored.files.formats import read_records
from moored.files.records import ReadOptions

PROMPT_CHARS, REASONING_CHARS = 600, 3400
GROUP_SIZE, GROUPS_A_STEP = 8, 128


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading a file took."""

    rows: int
    seconds: float
    start_mb: float
    peak_mb: float


def make_steps(num_rows: int) -> Iterator[list[dict[str, object]]]:
    """Rows, one step at a time: slices of a random text so long that few repeat."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
    text = rng.choice(letters, 1 << 24).tobytes().decode()

    def cut(count: int, chars: int) -> list[str]:
        places = rng.integers(len(text) - chars, size=count).tolist()
        return [text[at : at + chars] for at in places]

    size = GROUP_SIZE * GROUPS_A_STEP
    for step, first in enumerate(range(0, num_rows, size)):
        prompts = cut(GROUPS_A_STEP, PROMPT_CHARS)
        reasonings = cut(min(size, num_rows - first), REASONING_CHARS)
        yield [
            {
                "step": step,
                "prompt": prompts[row // GROUP_SIZE],
                "response": f"<think>{reasoning}</think>{row % 5}",
                "reward": float(row % 3 == 0),
            }
            for row, reasoning in enumerate(reasonings)
        ]


def write_lines(file: Path, num_rows: int) -> None:
    with file.open("w") as stream:
        for rows in make_steps(num_rows):
            stream.writelines(json.dumps(row) + "\n" for row in rows)


def write_parquet(file: Path, num_rows: int) -> None:
    """In the columns of TRL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.concat_tables(map(pa.Table.from_pylist, make_steps(num_rows)))
    names = ["completion" if name == "response" else name for name in table.column_names]
    pq.write_table(table.rename_columns(names), file, row_group_size=num_rows)


FILES = {"JSON lines": write_lines, "Parquet": write_parquet}


def advise(file: Path) -> int:
    return len(read_rewards([file]).rewards)


def diagnose(file: Path) -> int:
    drawn = draw(read_records(file, ReadOptions()), LookOptions())
    return sum(look.num_rows for look in drawn.looks)


READERS = {"advise": advise, "diagnose": diagnose}


def measure(reader: str, file: Path) -> Reading:
    start_mb, start = peak_mb(), time.perf_counter()
    rows = READERS[reader](file)
    return Reading(rows, time.perf_counter() - start, start_mb, peak_mb())


def peak_mb() -> float:
    """Most memory this process has held; `getrusage` would count what its parent held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmHWM in /proc/self/status")


def measure_apart(reader: str, file: Path) -> Reading:
    """In a new process."""
    command = [sys.executable, __file__, "--read", reader, str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Reading(**json.loads(done.stdout))


def compare(gigabytes: float) -> dict[str, dict[str, object]]:
    """File kind and reader -> figures."""
    num_rows = int(gigabytes * 1e9 / REASONING_CHARS)
    figures: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, write in FILES.items():
            file = Path(folder) / kind.replace(" ", "_")
            write(file, num_rows)
            file_mb = file.stat().st_size / 1e6
            for reader in READERS:
                found = measure_apart(reader, file)
                assert found.rows == num_rows
                figures[f"{kind}, {reader}"] = {"file_mb": file_mb, **asdict(found)}
            file.unlink()
    return figures


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of reasoning")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.read:
        reader, file = arguments.read
        print(json.dumps(asdict(measure(reader, Path(file)))))
        return
    report(compare(arguments.gigabytes), arguments.out)


def report(figures: dict[str, dict[str, object]], out: Path | None) -> None:
    # Imported here because it imports torch, which readers do not need.
    import torch
    from harness import describe_machine, make_console, show_machine, write_record
    from rich.table import Table

    table = Table("", title="reading rollouts")
    names = ("file MB", "rows", "seconds", "MB at start", "MB at most")
    for name in names:
        table.add_column(name, justify="right")
    for case, row in figures.items():
        cells = (f"{x:,}" if isinstance(x, int) else f"{x:,.1f}" for x in row.values())
        table.add_row(case, *cells)
    machine = describe_machine(torch.device("cpu"), bf16=False)
    machine |= {"pyarrow": importlib.metadata.version("pyarrow")}
    console = make_console()
    console.print(table)
    show_machine(console, machine)
    write_record(out, machine, figures)


if __name__ == "__main__":
    main()
