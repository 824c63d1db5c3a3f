"""Attention over packed lines: two flash passes (`tree_attention`) against FlexAttention.

Both compute the same thing: continuations see their prompt and themselves. Every batch of training
has other lengths, so a new tree is made for each call, and what FlexAttention needs for it (a block
mask) is part of its time; `kernel only` leaves that out. Forward and backward; forward alone on a
CPU, where FlexAttention has no backward pass.

    python benchmarks/attention.py --device cuda --out benchmarks/results/attention_h200.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from harness import (
    add_common_options,
    describe_machine,
    device_of,
    make_console,
    show_machine,
    synchronize,
    write_record,
)
from rich.table import Table
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from moored.engine.fast.tree_attention import attend_tree as tree_attend
from moored.engine.packing import Tree


@dataclass(frozen=True, slots=True)
class Case:
    """Heads of a model, and a batch: groups of continuations behind prompts."""

    name: str
    heads: int
    kv_heads: int
    width: int
    num_prompts: int
    prompt_tokens: int
    group_size: int
    reply_tokens: int

    def tree(self, rng: np.random.Generator) -> Tree:
        """Lengths that differ from batch to batch, as in training."""
        prompts = rng.integers(self.prompt_tokens // 2, self.prompt_tokens, self.num_prompts)
        replies = rng.integers(
            self.reply_tokens // 2, self.reply_tokens, (self.num_prompts, self.group_size)
        )
        members = tuple(tuple(map(int, row)) for row in replies)
        return Tree(tuple(map(int, prompts)), members)


CASES = (
    Case("mini, a minibatch of 32", 8, 8, 32, 8, 300, 4, 400),
    Case("mini, 128 trajectories", 8, 8, 32, 8, 300, 16, 400),
    Case("135 M, 128 replies", 9, 3, 64, 8, 512, 16, 400),
    Case("3 B, 32 replies", 16, 2, 128, 2, 512, 16, 400),
)
TINY = Case("tiny", 2, 1, 16, 2, 12, 3, 10)


def segments_of(tree: Tree, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) prompt that each token belongs to, and (N,) its stretch: 0 for prompts, else 1, 2, …"""
    prompts = np.repeat(np.arange(len(tree.prompts)), tree.prompts)
    counts = [len(members) for members in tree.continuations]
    lengths = [length for members in tree.continuations for length in members]
    owners = np.repeat(np.repeat(np.arange(len(counts)), counts), lengths)
    stretches = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    group = np.concatenate([prompts, owners])
    stretch = np.concatenate([np.zeros(len(prompts), dtype=np.int64), stretches])
    return torch.from_numpy(group).to(device), torch.from_numpy(stretch).to(device)


def block_mask(tree: Tree, device: torch.device, make: Callable = create_block_mask):
    """Who sees whom, as FlexAttention takes it."""
    group, stretch = segments_of(tree, device)

    def sees(b, h, q, kv):
        own = stretch[q] == stretch[kv]
        is_prompt = stretch[kv] == 0
        return (q >= kv) & (group[q] == group[kv]) & (own | is_prompt)

    size = len(group)
    return make(sees, None, None, size, size, device=device)


def by_tree(q, k, v, tree: Tree) -> torch.Tensor:
    """(N, heads, width); with a fresh tree, since a tree caches what it has computed."""
    fresh = Tree(tree.prompts, tree.continuations)
    return tree_attend(q, k, v, fresh, q.shape[-1] ** -0.5)  # pyright: ignore[reportCallIssue]


def by_flex(q, k, v, mask, attend: Callable) -> torch.Tensor:
    """(N, heads, width) like `tree_attend`."""
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend(*parts, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def inputs_of(case: Case, tree: Tree, device: torch.device, dtype: torch.dtype):
    size = sum(tree.prompts) + sum(map(sum, tree.continuations))
    heads = case.heads, case.kv_heads, case.kv_heads
    return [
        torch.randn(
            size, n, case.width, device=device, dtype=dtype, requires_grad=device.type == "cuda"
        )
        for n in heads
    ]


def time_case(
    case: Case, repeats: int, device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """Milliseconds of forward and backward, a new tree each time; and how far results differ."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    attend: Callable = torch.compile(flex_attention, dynamic=True)
    make: Callable = torch.compile(create_block_mask, dynamic=True)
    seconds: dict[str, list[float]] = {"tree": [], "flex": [], "flex, kernel only": []}
    first: dict[str, float] = {}
    worst = 0.0
    for turn in range(repeats + 1):
        tree = case.tree(rng)
        q, k, v = inputs_of(case, tree, device, dtype)
        mask = block_mask(tree, device, make)
        calls = {
            "tree": lambda q=q, k=k, v=v, t=tree: by_tree(q, k, v, t),
            "flex": lambda q=q, k=k, v=v, t=tree: by_flex(
                q, k, v, block_mask(t, device, make), attend
            ),
            "flex, kernel only": lambda q=q, k=k, v=v, m=mask: by_flex(q, k, v, m, attend),
        }
        outputs = {}
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            outputs[name] = call()
            if outputs[name].requires_grad:
                outputs[name].float().square().mean().backward()
            synchronize(device)
            took = time.perf_counter() - start
            if turn:
                seconds[name].append(took)
            else:
                first[name] = took
        gap = (outputs["tree"] - outputs["flex"]).float().norm() / outputs["tree"].float().norm()
        worst = max(worst, float(gap.detach()))
    return {
        "case": case.name,
        "milliseconds": {name: 1e3 * median(found) for name, found in seconds.items()},
        "first_call_s": first,
        "largest_relative_gap": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    add_common_options(parser, repeats=20)
    parser.add_argument("--tiny", action="store_true", help="one tiny case, to try the script")
    given = parser.parse_args()
    device, bf16 = device_of(given)
    console, machine = make_console(), describe_machine(device, bf16=bf16)
    show_machine(console, machine)
    dtype = torch.bfloat16 if bf16 else torch.float32
    rows = [
        time_case(case, given.repeats, device, dtype) for case in ((TINY,) if given.tiny else CASES)
    ]
    table = Table("forward + backward, ms", "tree", "flex", "flex, kernel only", "relative gap")
    for row in rows:
        cells = (f"{x:.2f}" for x in row["milliseconds"].values())  # pyright: ignore
        table.add_row(str(row["case"]), *cells, f"{row['largest_relative_gap']:.1e}")
    console.print(table)
    write_record(given.out, machine, rows)


if __name__ == "__main__":
    main()
