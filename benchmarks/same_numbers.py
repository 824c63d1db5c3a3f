"""Do two revisions train with the same numbers? Runs four small trainings with each and compares.

    python benchmarks/same_numbers.py 215362b bf2c55f [--out FILE]

The trainings are `smoke`, 20 steps of `collapse`, 10 steps of PPO on FrozenLake with a critic, KL
and evaluation, and 5 steps of the web shop, each on one CPU thread. Every value of `metrics.jsonl`
and `collapse.jsonl` is compared as the text that stands in the file. Renamed keys (`RENAMED`) are
compared under their new names; keys that only one revision has are listed, as are keys that differ,
with the first step at which they do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "smoke": ["smoke"],
    "collapse": ["collapse", "num_steps=20"],
    "ppo": [
        *("frozen_lake", "ppo", "num_steps=10", "model=nano", "optimizer.lr=1e-4"),
        *("algorithm.kl_coef=0.001", "rollout.max_response_tokens=80"),
        *("evaluation.every=5", "evaluation.num_tasks=32"),
    ],
    "webshop": [
        *("webshop", "grpo", "num_steps=5", "model=nano", "rollout.max_response_tokens=40"),
        *("rollout.num_groups=2", "rollout.group_size=4", "collapse.every=5"),
    ],
}
RENAMED = {
    "rollout/filter_kept_ratio": "filter/kept_fraction",
    "rollout/filter_zero_count": "filter/num_zero",
    "rollout/in_group_reward_std": "filter/reward_std_mean",
    "rollout/chosen_in_group_reward_std": "filter/kept_reward_std_mean",
    "filter/variance_mean": "filter/score_mean",
    "filter/variance_max": "filter/score_max",
    "filter/kept_variance_mean": "filter/kept_score_mean",
}
START = """
try:
    from moored.cli.main import main
except ImportError:
    from moored.cli import main
main()
"""
"""The command line, before and after it became a package."""


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def run_all(revision: str, into: Path) -> None:
    """Make the runs of one revision."""
    with checked_out(revision) as tree:
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        for name, words in RUNS.items():
            command = [sys.executable, "-c", START, "train", *words, "--run", str(into / name)]
            subprocess.run(command, check=True, env=env, cwd=tree, stdout=subprocess.DEVNULL)


def read(file: Path) -> list[dict[str, object]]:
    """Records with today's key names; every value as the text that stands in the file."""
    found = []
    for line in file.read_text().splitlines():
        record = json.loads(line, parse_float=str)
        renamed: dict[str, object] = {}
        for key, value in record.items():
            renamed[RENAMED.get(str(key), str(key))] = value
        found.append(renamed)
    return found


def compare(before: Path, after: Path) -> dict[str, object]:
    """Which keys are the same, which differ from which step on, which only one side has."""
    old, new = read(before), read(after)
    keys = {key for records in (old, new) for record in records for key in record}
    result: dict[str, object] = {"steps": [len(old), len(new)]}
    same, differ, gone, added = [], {}, [], []
    for key in sorted(keys):
        pairs = [(a.get(key), b.get(key)) for a, b in zip(old, new, strict=False)]
        if not any(key in record for record in old):
            added.append(key)
        elif not any(key in record for record in new):
            gone.append(key)
        else:
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is None:
                same.append(key)
            else:
                differ[key] = {"step": old[first]["step"], "values": [*map(str, pairs[first])]}
    return result | {"num_same": len(same), "differ": differ, "gone": gone, "added": added}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="revision, e.g. a commit")
    parser.add_argument("after", help="revision")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the comparison here")
    given = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = Path(folder) / "before", Path(folder) / "after"
        for revision, into in zip((given.before, given.after), sides, strict=True):
            run_all(revision, into)
        for run in RUNS:
            for stream in ("metrics", "collapse"):
                files = (into / run / f"{stream}.jsonl" for into in sides)
                figures[f"{run}/{stream}"] = compare(*files)
    text = json.dumps({"before": given.before, "after": given.after, **figures}, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    sys.exit(any(figure["differ"] for figure in figures.values()))


if __name__ == "__main__":
    main()
