"""SearchQA: questions, corpora, retrievers, and the scores of answers."""

from moored.envs.search.scoring import exact_match, f1

__all__ = ["exact_match", "f1"]
