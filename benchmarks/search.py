"""How fast search is: tantivy, which the environment uses, beside bm25s.

    python benchmarks/search.py [--corpus FILE] [--queries 10000] [--large 100000] [--out FILE]

Each engine runs in a process of its own. Title queries: titles of random passages, drawn with a
seed, searched one by one; found: a passage with that title is among the top five. Large corpus:
pairs of random passages joined, until there are `--large`; memory is the peak of the whole process,
Python, the passages and the index together. `build_cpu_s` is processor time, which does not depend
on what else the machine does. Without `--corpus` the made-up world is searched. bm25s
is not a dependency: pip install bm25s, or leave it out by `--only tantivy`. Exit code 1 when a
target is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles

from rich.console import Console
from rich.table import Table

from moored.envs.search.corpus import Passage, load_corpus
from moored.envs.search.retriever import Bm25
from moored.envs.search.world import make_world

ENGINES = ("tantivy", "bm25s")
TOP = 5
TARGETS = {
    "p50_ms": (2.0, False),
    "share_found": (0.9, True),
    "large_build_s": (30.0, False),
    "large_peak_mb": (1000.0, False),
}
"""Figure -> the value to reach, and whether more is better."""
Search = Callable[[str], list[str]]
"""A query in, titles of the top passages out."""


class GivenPassages(Bm25):
    """BM25 over passages that are already in memory."""

    def __init__(self, passages: tuple[Passage, ...]) -> None:
        super().__init__()
        self._given = passages

    def load_passages(self) -> tuple[Passage, ...]:
        return self._given


def build_tantivy(passages: tuple[Passage, ...]) -> Search:
    index = GivenPassages(passages)
    index.open()
    assert index.num_segments == 1, "ties would be random"
    return lambda query: [hit.passage.title for hit in index.search([query], TOP)[0]]


def build_bm25s(passages: tuple[Passage, ...]) -> Search:
    import bm25s  # pyright: ignore[reportMissingImports]

    options = {"stopwords": "en", "show_progress": False}
    texts = [f"{passage.title} {passage.text}" for passage in passages]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, **options), show_progress=False)

    def search(query: str) -> list[str]:
        words = bm25s.tokenize([query], return_ids=False, **options)
        if not words[0]:
            return []
        rows, _ = index.retrieve(words, k=TOP, show_progress=False)
        return [passages[row].title for row in rows[0]]

    return search


def measure(engine: str, passages: tuple[Passage, ...], num_queries: int) -> dict[str, float]:
    """Build an index and time title queries."""
    start, cpu_start = time.perf_counter(), time.process_time()
    search = {"tantivy": build_tantivy, "bm25s": build_bm25s}[engine](passages)
    build_s, build_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    times_s, num_found = [], 0
    for passage in random.Random(0).choices(passages, k=num_queries):
        start = time.perf_counter()
        titles = search(passage.title)
        times_s.append(time.perf_counter() - start)
        num_found += passage.title in titles
    cuts = quantiles(times_s, n=100)
    return {
        "num_passages": len(passages),
        "build_s": build_s,
        "build_cpu_s": build_cpu_s,
        "p50_ms": cuts[49] * 1e3,
        "p99_ms": cuts[98] * 1e3,
        "share_found": num_found / num_queries,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def joined_pairs(passages: tuple[Passage, ...], count: int) -> tuple[Passage, ...]:
    """A corpus of this size: two random passages in each."""
    rng = random.Random(1)
    pairs = ((rng.choice(passages), rng.choice(passages)) for _ in range(count))
    return tuple(Passage(f"{a.title} / {b.title}", f"{a.text} {b.text}") for a, b in pairs)


def measure_in_child(engine: str, arguments: argparse.Namespace, large: int) -> dict[str, float]:
    """The figures of one engine, from a process of its own."""
    command = [sys.executable, __file__, "--only", engine, "--large", str(large), "--child"]
    command += ["--queries", str(arguments.queries)]
    command += ["--corpus", arguments.corpus] if arguments.corpus else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr}")
    return json.loads(done.stdout)


def run_child(arguments: argparse.Namespace) -> None:
    passages = load_corpus(arguments.corpus) if arguments.corpus else make_world().passages
    if arguments.large:
        passages = joined_pairs(passages, arguments.large)
    num_queries = min(arguments.queries, 1000) if arguments.large else arguments.queries
    print(json.dumps(measure(arguments.only, passages, num_queries)))


def missed_targets(figures: dict[str, float]) -> list[str]:
    return [
        name
        for name, (target, more_is_better) in TARGETS.items()
        if (figures[name] < target if more_is_better else figures[name] > target)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure search against the targets.")
    parser.add_argument("--corpus", help="passages with title and text; else the made-up ones")
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=100_000, help="passages of the large corpus")
    parser.add_argument("--only", choices=ENGINES)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments)
        return 0
    engines = [arguments.only] if arguments.only else list(ENGINES)
    figures = {}
    for engine in engines:
        small = measure_in_child(engine, arguments, 0)
        large = measure_in_child(engine, arguments, arguments.large)
        figures[engine] = small | {f"large_{name}": value for name, value in large.items()}
    _show(figures)
    if arguments.out:
        arguments.out.write_text(json.dumps(_record(figures), indent=2) + "\n", encoding="utf-8")
    missed = missed_targets(figures["tantivy"]) if "tantivy" in figures else []
    print(f"missed: {', '.join(missed)}" if missed else "All targets reached.")
    return 1 if missed else 0


def _show(figures: dict[str, dict[str, float]]) -> None:
    table = Table("figure", *figures)
    for name in next(iter(figures.values())):
        table.add_row(name, *(f"{found[name]:,.3f}" for found in figures.values()))
    Console().print(table)


def _record(figures: dict[str, dict[str, float]]) -> dict[str, object]:
    # A corpus is named by its file alone: folders differ between machines.
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return {
        "command": f"python benchmarks/search.py {' '.join(words)}".strip(),
        "python": platform.python_version(),
        "versions": {engine: version(engine) for engine in figures},
        "hardware": "2 cores",
        "figures": {
            engine: {name: round(value, 4) for name, value in found.items()}
            for engine, found in figures.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
