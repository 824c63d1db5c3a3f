"""How right an answer is: exact match and F1 as in HotpotQA's script, normalised as SQuAD's does.

Normalised text is in lower case, without ASCII punctuation, without the articles a, an and the, and
with single spaces. Both scores take one right answer or several, of which the best counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

MIN_F1 = 0.3
"""An answer that is not exact earns its F1 from here on."""
VERDICTS = ("yes", "no", "noanswer")
"""Answers that are right or wrong as a whole: `yes no` shares no word with `yes`."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: in this order, as SQuAD does."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(prediction: str, answers: str | Sequence[str]) -> bool:
    """Whether the prediction equals one of the answers, normalised."""
    predicted = normalize_answer(prediction)
    return any(predicted == normalize_answer(answer) for answer in _as_list(answers))


def f1(prediction: str, answers: str | Sequence[str]) -> float:
    """Best F1 of the words shared with one of the answers, each word as often as it occurs.

    Where the prediction or the answer is one of `VERDICTS`, it is 0 unless they are equal.
    """
    predicted = normalize_answer(prediction)
    normalized = map(normalize_answer, _as_list(answers))
    return max((_word_f1(predicted, answer) for answer in normalized), default=0.0)


def answer_reward(prediction: str, answers: str | Sequence[str]) -> float:
    """1 for an exact match, else F1 if it is at least `MIN_F1`, else 0."""
    if exact_match(prediction, answers):
        return 1.0
    shared = f1(prediction, answers)
    return shared if shared >= MIN_F1 else 0.0


def _word_f1(predicted: str, expected: str) -> float:
    if {predicted, expected} & {"", *VERDICTS}:
        return float(predicted == expected)  # SQuAD 2: nothing matches nothing only
    words, answer_words = predicted.split(), expected.split()
    num_shared = (Counter(words) & Counter(answer_words)).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected.
    return 2.0 * num_shared / (len(words) + len(answer_words))


def _as_list(answers: str | Sequence[str]) -> Sequence[str]:
    return [answers] if isinstance(answers, str) else answers
