"""SearchQA: answer a question by searching a corpus, over several turns."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from moored.envs.base import (
    FORMAT_REMINDER,
    Resource,
    StepResult,
    draw_task,
    encodable,
    read_range,
    warn_of_missing_splits,
)
from moored.envs.brackets import holds_two
from moored.envs.search.choose import RetrieverChoice
from moored.envs.search.questions import Question, load_questions
from moored.envs.search.retriever import Hit, Retriever
from moored.envs.search.scoring import MIN_F1, answer_reward, exact_match, f1
from moored.envs.search.world import MAX_HOPS, make_question, make_world
from moored.envs.teaching import fill
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

ACTION = re.compile(r"(search|finish)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)
VERBS = ("search", "finish")
MAX_ACTION_CHARS = 1000
MAX_TITLE_CHARS = 200


class Search:
    """Answer a question by searching a corpus of passages, over several turns.

    A reply holds one action: `search[query]` shows the passages that fit the query best,
    `finish[answer]` ends the episode. Without `questions` both questions and corpus are made up
    from `world_seed`: 6,000 passages about people, towns, books, ships and the like, linked by
    18,600 facts, with names that resemble each other and asides that lead nowhere. A question names
    one thing and asks for what is one to three facts away; from two on, the answer stands in no
    passage that names the thing, so each hop needs a search. Needs `moored[search]`.

    Reward: 1 for an answer that matches exactly (SQuAD's normalisation: upper case, punctuation and
    articles do not count), else its word F1 if that is at least 0.3, else 0. As in HotpotQA's
    script, yes, no and noanswer share words with nothing else. A search earns 0, a malformed reply
    `format_penalty`. `finish` terminates the episode; one that runs out of turns
    is truncated.

    Options:
    - `questions=None`: a JSON, JSONL or Parquet file of HotpotQA, 2WikiMultihopQA or NQ rows
      (Parquet needs `moored[data]`).
    - `corpus=None`: a file of passages with `title` and `text`, or with `contents` as Search-R1 has
      them.
    - `retriever="bm25"`: or `"dense"`, passages by meaning (needs `moored[dense]`), or the address
      of a server with Search-R1's `/retrieve`, such as `moored serve-search` starts. A server that
      fails ends the episode as an error; the model never reads of it.
    - `embedding_model=None`: for `dense`, a sentence-transformers model, as a folder or hub id.
    - `timeout_s=10.0`: how long a server may take for one request; each search has three tries.
    - `num_hops=(1, 3)`: hops of the made questions, one number or a range.
    - `world_seed=0`: which world is made up; a server needs the same, `--world-seed`.
    - `num_passages=5`: passages a search shows.
    - `max_passage_chars=800`: longer passages are cut.
    - `max_turns=5`: turns an episode has, the last one for `finish`.
    - `format_penalty=-0.1`: reward of a malformed reply.
    """

    name: ClassVar[str] = "search"
    is_stochastic: bool = False
    retriever: Retriever

    def __init__(
        self,
        *,
        questions: str | Path | None = None,
        corpus: str | Path | None = None,
        retriever: str = "bm25",
        embedding_model: str | None = None,
        timeout_s: float = 10.0,
        num_hops: int | Sequence[int] = (1, 3),
        world_seed: int = 0,
        num_passages: int = 5,
        max_passage_chars: int = 800,
        max_turns: int = 5,
        format_penalty: float = -0.1,
    ) -> None:
        counts = {
            "num_passages": num_passages,
            "max_passage_chars": max_passage_chars,
            "max_turns": max_turns,
        }
        for option, value in counts.items():
            if value < 1:
                raise EnvError(f"search: {option} must be at least 1, got {value}")
        self.questions = questions
        self._choice = RetrieverChoice(
            name=retriever,
            corpus=None if corpus is None else str(corpus),
            world_seed=world_seed,
            embedding_model=embedding_model,
            timeout_s=timeout_s,
            is_made_up=questions is None,
        )
        self.num_hops = read_range("search: num_hops", num_hops, 1, MAX_HOPS)
        self.world_seed = world_seed
        self.num_passages = num_passages
        self.max_passage_chars = max_passage_chars
        self.max_turns = max_turns
        self.format_penalty = format_penalty
        self._check_sources()
        self._task: Question | None = None
        self._seen: dict[str, str] = {}
        self._turn = 0
        self._over = True

    def resources(self) -> dict[str, Resource]:
        return {"retriever": self._choice.make()}

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        # World and rows live in their loaders' caches: shared by all instances, never pickled.
        if self.questions is None:
            world = make_world(self.world_seed)
            make = functools.partial(make_question, world, num_hops=self.num_hops)
        else:
            make = functools.partial(_pick, load_questions(self.questions))
        self._task, _ = draw_task(task_seed, make, _task_key)
        self._seen = {}
        self._turn = 0
        self._over = False
        user = f"{self._turn_line()}\nQuestion: {self._task.text}\n{FORMAT_REMINDER}."
        return [Message("system", self._rules()), Message("user", user)]

    def step(self, reply: str) -> StepResult:
        if self._over or self._task is None:
            raise EnvError("search: the episode is over or was not begun; call reset before step")
        action = _parse_action(parse_reply(reply).answer)
        if action is None:
            self._advance()
            penalty = self.format_penalty
            return self._go_on(f"Malformed reply. Reward: {penalty:g}.", penalty, is_valid=False)
        kind, text = action
        if kind == "finish":
            self._advance(is_last=True)
            return _finish(self._task, text)
        if "retriever" not in vars(self):
            raise EnvError("search: no retriever is open; use moored.envs.mix.open_env")
        # A retriever that fails raises: the episode ends there, and the turn is not counted.
        (hits,) = self.retriever.search([text], self.num_passages)
        self._advance()
        self._seen |= {hit.passage.title: self._shown_text(hit) for hit in hits}
        return self._go_on(f"Reward: 0.\n{self._show(hits)}", 0.0, is_valid=True)

    def oracle(self) -> str:
        if self._task is None:
            raise EnvError("search: there is no task yet; call reset before oracle")
        wanted = [title for title in self._task.titles if title not in self._seen]
        # Each hop needs a search; without known titles, the question itself is searched for once.
        queries = wanted if self._task.titles else [self._task.text][self._turn :]
        action = f"search[{queries[0]}]" if queries else ""
        is_last = self._turn + 1 >= self.max_turns
        if is_last or not 0 < len(action) <= MAX_ACTION_CHARS:
            return f"finish[{self._task.answers[0]}]"
        return action

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """The sentence of a passage that names what the action is about, if one was seen."""
        assert self._task is not None
        kind, text = _parse_action(answer) or ("search", self._task.text)
        wanted = [self._seen[title] for title in self._task.titles if title in self._seen]
        passages = [*reversed(wanted), *self._seen.values()]
        sentence = next((s for passage in passages for s in _sentences(passage) if text in s), "")
        lead = sentence or f"The question {fill('{names|is about}', rng)} {text}."
        so = "{So the answer is|That is} " if kind == "finish" else "{I search for|I look up} "
        return f"{lead} {fill(so, rng)}{text}."

    def guess(self, rng: random.Random) -> str:
        """Either action with two words of the question."""
        assert self._task is not None
        words = self._task.text.rstrip("?").split()
        start = rng.randrange(max(1, len(words) - 1))
        return f"{rng.choice(('search', 'finish'))}[{' '.join(words[start : start + 2])}]"

    def close(self) -> None:
        self._over = True

    def _check_sources(self) -> None:
        if self.questions is None:
            if self._choice.corpus is not None:
                raise EnvError("search: a corpus needs questions about it; set questions too")
            return
        if self._choice.corpus is None and not self._choice.is_server:
            raise EnvError(
                "search: questions need passages to search; set corpus, or retriever=http://…"
            )
        rows = load_questions(self.questions)
        warn_of_missing_splits(self.questions, f"{len(rows)} questions", map(_task_key, rows))

    def _advance(self, *, is_last: bool = False) -> None:
        self._turn += 1
        self._over = is_last or self._turn >= self.max_turns

    def _go_on(self, told: str, reward: float, *, is_valid: bool) -> StepResult:
        """A turn that did not finish: what is told, and the next turn if there is one."""
        ending = " No turns left." if self._over else f"\n{self._turn_line()}\n{FORMAT_REMINDER}."
        # On the last turn nobody can read the passages.
        lead = told.partition("\n")[0] if self._over else told
        return StepResult(
            observation=lead + ending,
            reward=reward,
            penalty=0.0 if is_valid else reward,
            terminated=False,
            truncated=self._over,
            is_valid=is_valid,
            metrics={"num_searches": float(is_valid)},
        )

    def _show(self, hits: Sequence[Hit]) -> str:
        if not hits:
            return "No passage fits."
        return "\n".join(
            f"[{number}] {_cut(hit.passage.title, MAX_TITLE_CHARS)}\n{self._shown_text(hit)}"
            for number, hit in enumerate(hits[: self.num_passages], start=1)
        )

    def _shown_text(self, hit: Hit) -> str:
        return _cut(hit.passage.text, self.max_passage_chars)

    def _rules(self) -> str:
        passages = f"{self.num_passages} passages" if self.num_passages > 1 else "one passage"
        turns = f"at most {self.max_turns} turns" if self.max_turns > 1 else "one turn"
        return (
            f"Answer the question. search[query] shows the {passages} of a corpus that fit a query "
            f"best; finish[answer] ends the episode. You have {turns}, with one action each.\n"
            "Reward: 1 if the answer is right, a part of 1 if it shares enough words with the "
            f"right one (F1 of at least {MIN_F1:g}), else 0; {self.format_penalty:g} for a "
            "malformed reply, which uses up the turn.\n"
            f"{FORMAT_REMINDER}, where the answer is search[…] or finish[…]."
        )

    def _turn_line(self) -> str:
        return f"Turn {self._turn + 1} of {self.max_turns}."


def _finish(task: Question, text: str) -> StepResult:
    reward, is_exact = answer_reward(text, task.answers), exact_match(text, task.answers)
    return StepResult(
        observation=f"Reward: {reward:g}. {'Right.' if is_exact else 'Not the right answer.'}",
        reward=reward,
        terminated=True,
        success=is_exact,
        metrics={"exact_match": float(is_exact), "f1": f1(text, task.answers)},
    )


def _parse_action(answer: str | None) -> tuple[str, str] | None:
    """The action and what its brackets hold; None when it is neither, empty, or two actions."""
    if answer is None or len(answer) > MAX_ACTION_CHARS:
        return None
    match = ACTION.fullmatch(answer.strip())
    if match is None or holds_two(match[2], VERBS):
        return None
    text = encodable(match[2]).strip()
    return (match[1].lower(), text) if text else None


def _sentences(text: str) -> list[str]:
    return [found.strip() for found in re.findall(r"[^.]+\.", text.replace("\n", " "))]


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _pick(rows: Sequence[Question], rng: random.Random) -> Question:
    return rng.choice(rows)


def _task_key(task: Question) -> str:
    return task.key
