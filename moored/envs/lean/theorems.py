"""Theorems to prove: made ones with known proofs, in Lean's core language, or rows of a file."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moored.envs.record_files import file_key, read_records
from moored.errors import EnvError

NAME = "goal"
"""Name of a made theorem."""
STATEMENT = re.compile(r"\b(theorem|lemma)\s+([\w.']+)")
STATEMENT_KEYS = ("formal_statement", "statement")
PROPOSITIONS = ("p", "q", "r", "s", "t", "u")


@dataclass(frozen=True, slots=True)
class Theorem:
    """A statement up to `:= by`, its name, and a proof where one is known."""

    header: str
    """What stands before it: imports, openings, definitions."""
    statement: str
    name: str
    proof: str

    @property
    def key(self) -> str:
        """What two theorems share exactly when they state the same, whatever they are called."""
        return " ".join(STATEMENT.sub(f"theorem {NAME}", self.statement, count=1).split())


def make_theorem(rng: random.Random) -> Theorem:
    """A small theorem that Lean's core tactics prove."""
    statement, proof = rng.choice(FAMILIES)(rng)
    return Theorem("", f"theorem {NAME} {statement}", NAME, proof)


def linear_equation(rng: random.Random) -> tuple[str, str]:
    """From x + a = y + b to x + (a + c) = y + (b + c)."""
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    kind = rng.choice(("Nat", "Int"))
    return f"(x y : {kind}) (h : x + {a} = y + {b}) : x + {a + c} = y + {b + c}", "omega"


def linear_bound(rng: random.Random) -> tuple[str, str]:
    """A bound on a sum from bounds on its terms."""
    a, b, slack = rng.randint(1, 50), rng.randint(1, 50), rng.randint(0, 20)
    m, n = rng.randint(2, 9), rng.randint(2, 9)
    bound = m * a + n * b + slack
    return f"(x y : Nat) (h : x ≤ {a}) (k : y ≤ {b}) : {m} * x + {n} * y ≤ {bound}", "omega"


def conjunction(rng: random.Random) -> tuple[str, str]:
    """Conjuncts in another order."""
    names = rng.sample(PROPOSITIONS, rng.randint(3, 5))
    order = rng.sample(names, rng.randint(2, len(names)))
    given = " ".join(f"(h{name} : {name})" for name in names)
    goal = " ∧ ".join(order)
    return (
        f"({' '.join(names)} : Prop) {given} : {goal}",
        f"exact ⟨{', '.join(f'h{name}' for name in order)}⟩",
    )


def chain(rng: random.Random) -> tuple[str, str]:
    """A conclusion at the end of a chain of implications."""
    names = rng.sample(PROPOSITIONS, rng.randint(3, 6))
    steps = list(enumerate(itertools.pairwise(names)))
    shown = rng.sample(steps, len(steps))
    given = " ".join(f"(h{number} : {a} → {b})" for number, (a, b) in shown)
    proof = "h"
    for number, _ in steps:
        proof = f"(h{number} {proof})"
    return (
        f"({' '.join(sorted(names))} : Prop) {given} (h : {names[0]}) : {names[-1]}",
        f"exact {proof}",
    )


def computation(rng: random.Random) -> tuple[str, str]:
    """A fact about numbers that Lean computes."""
    a, b, m = rng.randint(10, 999), rng.randint(10, 999), rng.randint(2, 30)
    return f": ({a} * {b} + {m}) % {m} = {a * b % m}", "decide"


def reversal(rng: random.Random) -> tuple[str, str]:
    """A list reversed."""
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6))]
    return f": ({numbers} : List Nat).reverse = {numbers[::-1]}", "rfl"


FAMILIES: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    linear_equation,
    linear_bound,
    conjunction,
    chain,
    computation,
    reversal,
)


def split_statement(statement: str) -> tuple[str, str]:
    """What a theorem takes as given, and its goal: they part at the first `:` in no brackets."""
    body, depth = STATEMENT.sub("", statement, count=1).strip(), 0
    for place, char in enumerate(body):
        depth += (char in "([{⟨") - (char in ")]}⟩")
        if char == ":" and depth == 0:
            return body[:place].strip(), body[place + 1 :].strip()
    return "", body


def load_theorems(source: str | Path) -> tuple[Theorem, ...]:
    """Rows of a JSON, JSONL or Parquet file with `formal_statement`, and `proof` where known."""
    return _load(*file_key(source))


@functools.lru_cache(maxsize=4)
def _load(path: Path, mtime_ns: int, size: int) -> tuple[Theorem, ...]:
    theorems = []
    for where, record in read_records(path):
        text = next((record[key] for key in STATEMENT_KEYS if record.get(key)), None)
        if not isinstance(text, str):
            raise EnvError(f"{where}: a theorem needs the column {STATEMENT_KEYS[0]!r}")
        theorems.append(read_theorem(where, text, str(record.get("proof") or "")))
    if not theorems:
        raise EnvError(f"{str(path)!r} holds no theorems")
    return tuple(theorems)


def read_theorem(where: str, text: str, proof: str) -> Theorem:
    """Split a statement that ends in `:= by`, `:= sorry` or `:= by sorry`."""
    statement = re.sub(r":=\s*(by)?\s*(sorry)?\s*$", "", text.strip()).rstrip()
    found = list(STATEMENT.finditer(statement))
    if not found:
        raise EnvError(f"{where}: no `theorem NAME …` found in {text!r:.80}")
    last = found[-1]
    return Theorem(statement[: last.start()], statement[last.start() :], last[2], proof)
