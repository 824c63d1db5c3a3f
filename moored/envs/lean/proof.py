"""From an answer to Lean code, and from Lean's report to a verdict.

An answer is the tactics after `:= by`. It must not leave the theorem: a command in it could
redefine what the statement means, or declare an axiom. Lean is also asked which axioms the finished
theorem depends on, so that nothing counts as proved that rests on `sorry` or on an added axiom.
"""

from __future__ import annotations

import re

from moored.envs.lean.server import LeanReport

MAX_ANSWER_CHARS = 8192
ALLOWED_AXIOMS = {"propext", "Classical.choice", "Quot.sound"}
WORD = re.compile(r"eval%|#?[\w.']+[!?]?")
FORBIDDEN = frozenset(
    (
        *("sorry", "admit", "stop", "axiom", "native_decide", "unsafe", "implemented_by", "extern"),
        *("theorem", "lemma", "def", "abbrev", "example", "instance", "opaque", "inductive"),
        *("structure", "class", "mutual", "macro", "macro_rules", "syntax", "elab", "elab_rules"),
        *("notation", "infix", "infixl", "infixr", "prefix", "postfix", "declare_syntax_cat"),
        *("namespace", "section", "end", "variable", "universe", "import", "open", "export"),
        *("set_option", "run_tac", "run_cmd", "run_meta", "run_elab", "by_elab", "eval%"),
        *("deriving", "initialize", "builtin_initialize", "simproc", "dsimproc", "notation3"),
        *("local", "scoped", "private", "protected", "noncomputable", "partial", "alias"),
        *("attribute", "include", "omit"),
    )
)
"""Words that end a tactic block, leave a proof open, change what is proved, or run code in Lean."""
AXIOMS = re.compile(r"'(\S+)' (?:depends on axioms: \[([^\]]*)\]|does not depend on any axioms)")


def without_comments(text: str) -> str:
    """Lean code without `-- …` and `/- … -/`, which may be nested."""
    kept, depth, place = [], 0, 0
    while place < len(text):
        pair = text[place : place + 2]
        if pair == "/-":
            depth, place = depth + 1, place + 2
        elif pair == "-/" and depth:
            depth, place = depth - 1, place + 2
        elif depth:
            place += 1
        elif pair == "--":
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
        else:
            kept.append(text[place])
            place += 1
    return "".join(kept)


def read_tactics(answer: str) -> str | None:
    """The tactics of an answer without comments; None when there are none or they are forbidden."""
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    text = answer.strip().removeprefix("```lean4").removeprefix("```lean").strip("`")
    tactics = without_comments(text)
    lines = [line.rstrip() for line in tactics.splitlines() if line.strip()]
    if not lines or forbidden_words(tactics):
        return None
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[indent:] for line in lines)


def forbidden_words(tactics: str) -> list[str]:
    """Words that an answer may not hold; `#check` and other commands count by their sign."""
    words = set(WORD.findall(tactics))
    return sorted(word for word in words if word in FORBIDDEN or word.startswith("#"))


def opening(header: str, statement: str) -> str:
    """What stands before the tactics."""
    return f"{header}{statement} := by\n"


def whole_code(header: str, statement: str, name: str, tactics: str) -> str:
    """The file that Lean checks; the last line asks what the theorem rests on."""
    body = "\n".join(f"  {line}" for line in tactics.splitlines())
    return f"{opening(header, statement)}{body}\n\n#print axioms {name}\n"


def is_proved(report: LeanReport, name: str) -> bool:
    """True when Lean found no error and the theorem rests on Lean's own axioms alone."""
    if report.has_timed_out or report.num_sorries:
        return False
    if any(message.severity == "error" for message in report.messages):
        return False
    # All of them: a tactic such as `trace` can write a line like Lean's own, but not remove that.
    told = [match for message in report.messages for match in AXIOMS.finditer(message.text)]
    own = [match for match in told if match[1].rpartition(".")[2] == name.rpartition(".")[2]]
    return bool(own) and all(_axioms(match) <= ALLOWED_AXIOMS for match in own)


def _axioms(match: re.Match[str]) -> set[str]:
    return {axiom.strip() for axiom in (match[2] or "").split(",") if axiom.strip()}
