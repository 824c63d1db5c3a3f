"""What a programmer thinks before writing: what is asked, and how the program does it."""

from __future__ import annotations

import ast
import random

from moored.envs.code.judge import find_program
from moored.envs.code.problem import Problem
from moored.envs.code.syntax import parse_source
from moored.envs.teaching import fill

MAX_ASKED_CHARS = 160
MAX_NAMES = 6


def explain(problem: Problem, answer: str, rng: random.Random) -> str:
    """What the problem asks, in its own words, and the plan of the program.

    A row of a data set has no plan: its program says what it defines and calls.
    """
    asks = problem.asks or _first_sentence(problem.statement)
    plan = problem.plan or outline(answer)
    return f"{fill('{Given|From}', rng)} {asks}. {fill('{Plan|So}', rng)}: {plan}."


def outline(answer: str) -> str:
    """What a program defines, and by what it does the work: loops and calls."""
    source = find_program(answer)
    if source is None:
        return "write it in Python"
    defined: list[str] = []
    used: list[str] = []
    for node in ast.walk(parse_source(source)):
        match node:
            case ast.FunctionDef():
                defined.append(f"{node.name}({', '.join(arg.arg for arg in node.args.args)})")
            case ast.For() | ast.While():
                used.append(f"a {type(node).__name__.lower()} loop")
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                used.append(name)
    parts = [f"define {', '.join(defined[:MAX_NAMES])}"] if defined else []
    parts += [f"use {', '.join(list(dict.fromkeys(used))[:MAX_NAMES])}"] if used else []
    return ", ".join(parts) or "compute it in one line"


def _first_sentence(statement: str) -> str:
    line = next(filter(None, map(str.strip, statement.splitlines())), "")
    return line.split(". ")[0].rstrip(".")[:MAX_ASKED_CHARS]
