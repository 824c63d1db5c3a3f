"""Replies no environment may crash on: a hand-written list and a seeded fuzzer.

Used by `check_env`, by tests and by the benchmark. One reply tries to run code: if an environment
executes it, `EXECUTED` is no longer empty.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from moored.reply import TAGS, format_reply

EXECUTED: list[str] = []
"""Stays empty as long as no environment runs what a model wrote."""

_CODE = "__import__('moored.envs.check.nasty', fromlist=['_']).EXECUTED.append('ran')"
_MEGABYTE = 1_000_000

_ANSWERS = (
    "",
    # Code, first of all: an environment that runs it is caught before it meets the bombs below.
    *(_CODE, f"{{{_CODE}}}", f"'+{_CODE}+'"),
    # Separators of actions, in the wrong places.
    *("||", "|| Up", "Up ||", "Up || || Down", "Up | Down", "Up|||Down", "Up || " * 5000),
    "the sign || stands inside a text || like this one",
    # Unicode: look-alike letters, full-width forms, invisible marks, odd case folding, a lone
    # surrogate (which cannot be encoded), invisible separators, ten thousand accents.
    *("Uр", "ＵＰ", "Up\u200b", "\u202eUp\u202c", "\u2066pU\u2069", "\ufeffUp", "Up\u2028Down"),
    *("ß", "İı", "ﬁ", "Up\ud800", "\udfff", "Z" + "\u0301" * 10_000, "👩‍👩‍👧‍👦" * 100),
    # Digits that are digits to str.isdigit but not to int, and ones of other scripts.
    *("²", "½", "①", "٣ + ٤", "１２３", "1 1 ²", "(①,①)", "𝟙", "一"),
    # Numbers: bombs, overflow, more digits than int() takes, division by nothing.
    *("9**9**9", "9**9**9**9", "10^10^10", "9<<999999999", "1e999999", "1e-999999", "1E400"),
    *("1" * 100_000, "0." + "0" * 100_000 + "1", "1/0", "0/0", "1/(1-1)", "-0", "nan", "-inf"),
    *("0x41", "1_000", "007", "1,000,000", "1..2", ".", "-", "+", "= 24", "1 1 " + "9" * 5000),
    *("-1 -1 -1", "0 0 0", "99999999999999999999 1 1", "factorial(10**9)", "abs(-3)"),
    # Depth and length: recursive parsers, quadratic joins, backtracking expressions.
    *("(" * 100_000, ")" * 100_000, "(" * 50_000 + "1" + ")" * 50_000, "-" * 100_000 + "1"),
    *("1+" * 100_000 + "1", "[" * 50_000, "{" * 50_000, "a" * 50_000 + "!", "1 " * 50_000),
    *(" " * 200_000, "\t\n" * 100_000, ".," * 50_000, "\\" * 50_000, "\\boxed{" * 10_000),
    *("\\frac{1}{0}", "\\frac{" * 5000, "$" * 10_001, "\\text{" + "x" * 10_000),
    # Things somebody might run, format, escape or print.
    *("exit()", "lambda: 1", "`ls`", "$(ls)"),
    *("{0.__class__.__mro__}", "{}", "%s%n%d", "'; DROP TABLE boxes; --", "../../etc/passwd"),
    *("\x00", "Up\x00", "".join(map(chr, range(32))), "\x1b[2J\x1b[31m", "\r\n", "\x7f\x85"),
    *("<|im_end|>", "<|endoftext|><|im_start|>user", "[INST]", "&lt;answer&gt;", "<!-- Up -->"),
    "A" * _MEGABYTE,
)

_FRAMES = (
    # White space and nothing.
    *(" ", "\n\n", "\x00", "\ufeff", "\u200b", "no tags at all", "Up"),
    # Tags missing, doubled, nested, swapped, cut off, in other letters.
    *("<think>", "</answer>", "<think></think>", "<answer>Up</answer>", "<think>a</think>Up"),
    *("<think>a<answer>Up</answer></think>", "<answer>Up</answer><think>a</think>"),
    "<think><think>a</think></think><answer>Up</answer>",
    "<think>a</think><answer><answer>Up</answer></answer>",
    "<think>a</think><answer>Up</answer><answer>Down</answer>",
    "<think>a</think><answer>Up</answer>" * 2,
    "<think>a</think> so: <answer>Up</answer>",
    "<think>a</think><answer>Up",
    "<think>a</think><answer>Up</answer",
    "<THINK>a</THINK><ANSWER>Up</ANSWER>",
    "<think >a</think ><answer >Up</answer >",
    "＜think＞a＜/think＞＜answer＞Up＜/answer＞",
    "<think>a</think><\u0430nswer>Up</\u0430nswer>",
    "<think>a</think><ans\u200bwer>Up</ans\u200bwer>",
    "\ud800<think>a</think>\udfff<answer>Up</answer>",
    # A megabyte each.
    *("x" * _MEGABYTE, "<" * _MEGABYTE, "🦆" * (_MEGABYTE // 4), "\n" * _MEGABYTE),
    *("<think>" * 140_000, "</answer>" * 110_000, "<think></think><answer>" * 40_000),
    format_reply("a" * _MEGABYTE, "Up"),
    format_reply("\x00" * _MEGABYTE, "1"),
)

NASTY_REPLIES: tuple[str, ...] = (
    "",
    *_FRAMES,
    *(format_reply("", answer) for answer in _ANSWERS),
)
"""Malformed, huge and hostile replies. Some are well-formed: a megabyte of thought is allowed."""

_SMALL = tuple(text for text in (*_ANSWERS, *_FRAMES) if len(text) <= 200)
_PIECES = (*_SMALL, *TAGS * 8)
_CHARACTERS = "0123456789+-*/()=^.,|<> \n\tUpDownLeftRight\x00√²½٣\u200b\u202e\ud800🦆"


def fuzz_replies(
    rng: random.Random, count: int, *, answers: Sequence[str] = ("Up",)
) -> Iterator[str]:
    """`count` hostile replies: pieces glued at random, and `answers` with characters changed.

    Give real answers (of the oracle) to reach the code behind the tag parser.
    """
    for _ in range(count):
        kind = rng.random()
        if kind < 0.01:
            yield rng.choice(NASTY_REPLIES)
        elif kind < 0.55:
            yield format_reply("", _mutate(rng, rng.choice((*answers, rng.choice(_SMALL)))))
        elif kind < 0.8:
            yield format_reply(_glue(rng), _glue(rng))
        else:
            yield _glue(rng)


def _glue(rng: random.Random) -> str:
    return "".join(rng.choices(_PIECES, k=rng.randint(0, 8)))


def _mutate(rng: random.Random, text: str) -> str:
    """Replace, remove, insert or double a few stretches of `text`."""
    for _ in range(rng.randint(0, 4)):
        start = rng.randint(0, len(text))
        stop = min(len(text), start + rng.randint(0, 3))
        middle = rng.choice(("", text[start:stop] * 2, *rng.choices(_CHARACTERS, k=2)))
        text = text[:start] + middle + text[stop:]
    return text
