"""Which names of `search` does a model copy? Held-out demonstrations, token by token.

    python benchmarks/copied_names.py MODEL [--demonstrations 96] [--out FILE]

Every reply of the oracle ends in `search[NAME]` or `finish[NAME]`, and its reasoning has the name
before that. A token counts as right when it is the most likely one, given all that stands before
it in the demonstration; a name when all of its tokens are. Other tokens of replies are `rest`.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import describe_machine, make_console, show_machine, write_record
from rich.table import Table

from moored.models.load import load_model
from moored.rollout.render import Renderer
from moored.sft.options import SftConfig
from moored.sft.source import open_source

ENV = {"name": "search", "options": {"num_hops": 1, "num_passages": 1, "max_turns": 2}}
REST = "rest"


class Token(NamedTuple):
    """One token of a reply: what it is a part of, and how the model sees it."""

    part: str
    name: int
    """Number of the name it belongs to, counted over all demonstrations."""
    is_first: bool
    is_right: bool
    loss: float


def parts_of(reply: str) -> list[tuple[int, int, str]]:
    """Where the name of the answer stands in a reply, and as what."""
    found = re.search(r"<answer>(search|finish)\[(.*)\]</answer>", reply)
    assert found is not None, reply
    places = [match.span() for match in re.finditer(re.escape(found[2]), reply)]
    return [(*place, f"{found[1]}, {i + 1} of {len(places)}") for i, place in enumerate(places)]


def tokens_of(
    model: Any, tokenizer: Any, before: Sequence[int], reply: str, first_name: int
) -> Iterator[Token]:
    """The tokens of a reply after those of its prompt."""
    encoded = tokenizer(reply, return_offsets_mapping=True, add_special_tokens=False)
    ids = torch.tensor([[*before, *encoded["input_ids"]]])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0, len(before) - 1 : -1], dim=-1)
    parts, begun = parts_of(reply), set()
    for row, token, (start, end) in zip(
        logp, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        # The space before a name belongs to it.
        inside = [i for i, (a, b, _) in enumerate(parts) if start < b and end > a]
        part, name = (parts[inside[0]][2], first_name + inside[0]) if inside else (REST, -1)
        is_first = bool(inside) and name not in begun
        begun.add(name)
        yield Token(part, name, is_first, int(row.argmax()) == token, -float(row[token]))


def measure(folder: str, count: int) -> dict[str, dict[str, float]]:
    """Shares and losses by part."""
    loaded = load_model(folder, torch.device("cpu"))
    renderer, model = Renderer(loaded.tokenizer), loaded.model.eval()
    source = open_source(SftConfig.model_validate({"model": folder, "env": ENV}))
    found: list[Token] = []
    for number in range(count):
        messages = source.held_out(number)
        for at in (i for i, message in enumerate(messages) if message.role == "assistant"):
            names = 1 + max((token.name for token in found), default=-1)
            before = renderer.start(messages[:at]).ids.tolist()
            found += tokens_of(model, loaded.tokenizer, before, str(messages[at].content), names)
    return summarize(found)


def summarize(tokens: Sequence[Token]) -> dict[str, dict[str, float]]:
    """By part: share of first tokens and of whole names that are right, and the mean loss."""
    by_part: dict[str, list[Token]] = defaultdict(list)
    for token in tokens:
        by_part[token.part].append(token)
    figures = {}
    for part, own in sorted(by_part.items()):
        figures[part] = {"tokens": len(own), "loss": _mean([token.loss for token in own])}
        if part == REST:
            continue
        first = [token for token in own if token.is_first]
        names: dict[int, bool] = defaultdict(lambda: True)
        for token in own:
            names[token.name] &= token.is_right
        figures[part] |= {
            "first_right": _mean([token.is_right for token in first]),
            "first_loss": _mean([token.loss for token in first]),
            "whole_right": _mean(list(names.values())),
        }
    return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Which names of `search` does a model copy?")
    parser.add_argument("model", help="a folder")
    parser.add_argument("--demonstrations", type=int, default=96)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measure(options.model, options.demonstrations)
    columns = ("tokens", "loss", "first_right", "first_loss", "whole_right")
    table = Table("part", *columns)
    for part, own in figures.items():
        table.add_row(part, *(f"{own[name]:.3g}" if name in own else "" for name in columns))
    console, machine = make_console(), describe_machine(torch.device("cpu"), bf16=False)
    console.print(table)
    show_machine(console, machine)
    write_record(options.out, machine, figures)


if __name__ == "__main__":
    main()
