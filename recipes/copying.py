"""Dialogues that exercise copying: a passage of a made-up world, and its sentences reordered.

    python recipes/copying.py --out copying.jsonl
    moored sft MODEL dialogues=copying.jsonl

The worlds are others than that of `search`, so no answer of its questions is learnt by heart.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from moored.envs.search.world import make_world

WORLD_SEEDS = (1, 2, 3)


def copying_dialogues(world_seeds: Sequence[int], seed: int) -> Iterator[dict[str, str]]:
    """One dialogue per passage, as `moored sft` reads them."""
    rng = random.Random(seed)
    for world_seed in world_seeds:
        for passage in make_world(world_seed).passages:
            sentences = [found.strip() for found in re.findall(r"[^.]+\.", passage.text)]
            again = rng.sample(sentences, len(sentences))
            prompt = f"[1] {passage.title}\n{passage.text}"
            yield {"prompt": prompt, "completion": " ".join(again)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write dialogues that exercise copying.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per passage")
    parser.add_argument("--world-seeds", type=int, nargs="+", default=WORLD_SEEDS)
    parser.add_argument("--seed", type=int, default=0, help="of the order of sentences")
    options = parser.parse_args()
    lines = map(json.dumps, copying_dialogues(options.world_seeds, options.seed))
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
