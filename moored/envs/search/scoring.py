"""How right an answer is: exact match and F1 after SQuAD's normalisation.

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
    """Best F1 of the words shared with one of the answers, each word as often as it occurs."""
    predicted = normalize_answer(prediction).split()
    return max((_word_f1(predicted, answer) for answer in _as_list(answers)), default=0.0)


def answer_reward(prediction: str, answers: str | Sequence[str]) -> float:
    """1 for an exact match, else F1 if it is at least `MIN_F1`, else 0."""
    if exact_match(prediction, answers):
        return 1.0
    shared = f1(prediction, answers)
    return shared if shared >= MIN_F1 else 0.0


def _word_f1(predicted: list[str], answer: str) -> float:
    expected = normalize_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)  # SQuAD 2: nothing matches nothing only
    num_shared = (Counter(predicted) & Counter(expected)).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected.
    return 2.0 * num_shared / (len(predicted) + len(expected))


def _as_list(answers: str | Sequence[str]) -> Sequence[str]:
    return [answers] if isinstance(answers, str) else answers
