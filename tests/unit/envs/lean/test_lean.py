"""Lean: proofs, comments and cheats, against a server that talks Kimina's protocol."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from moored.config import RolloutConfig
from moored.envs import format_reply
from moored.envs.check.nasty import NASTY_REPLIES, fuzz_replies
from moored.envs.check.runner import check_env
from moored.envs.lean import server
from moored.envs.lean.env import Lean
from moored.envs.lean.proof import (
    forbidden_words,
    is_proved,
    read_tactics,
    whole_code,
    without_comments,
)
from moored.envs.lean.server import LeanMessage, LeanReport
from moored.envs.lean.theorems import FAMILIES, make_theorem, read_theorem
from moored.envs.mix import make_env, open_env, option_defaults
from moored.errors import EnvError, MooredError
from tests.json_server import json_server

NO_AXIOMS = "'goal' does not depend on any axioms"


def message(text: str, severity: str = "info", line: int = 1) -> dict[str, object]:
    return {"severity": severity, "data": text, "pos": {"line": line, "column": 0}}


def result(*messages: dict[str, object], sorries: int = 0) -> dict[str, object]:
    response = {"env": 1, "messages": list(messages), "sorries": [{}] * sorries, "time": 0.1}
    return {"results": [{"custom_id": "proof", "error": None, "response": response}]}


def refused(problem: str) -> dict[str, object]:
    return {"results": [{"custom_id": "proof", "error": problem}]}


class KnowsProofs:
    """Lean as far as the made theorems need it: only their own proofs are right."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        made = (make_theorem(random.Random(seed)) for seed in range(5000))
        self.proofs = {theorem.statement: theorem.proof for theorem in made}

    def __call__(self, code: str) -> object:
        self.seen.append(code)
        statement, _, proof = code.partition(" := by\n")
        proof = proof.partition("\n\n#print axioms")[0].strip()
        if proof == self.proofs.get(statement) or (proof == "omega" and "omega" in statement):
            return result(message(NO_AXIOMS))
        return result(message(f"unknown tactic {proof[:20]}", "error", line=2), message(NO_AXIOMS))


@contextmanager
def kimina(lean: Callable[[str], Any]) -> Iterator[str]:
    """A server; `lean` gives JSON for some code, or a status and bytes."""

    def verify(path: str, body: Any, headers: object) -> tuple[int, object]:
        assert path == "/verify" and body["timeout"] >= 1
        said = lean(body["codes"][0]["proof"])
        return said if isinstance(said, tuple) else (200, said)

    with json_server(verify) as url:
        yield url


def answer(text: str) -> str:
    return format_reply("", text)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RETRY_WAITS_S", (0.01, 0.02))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with kimina(KnowsProofs()) as address:
        yield address


def test_a_proof_earns_1_and_a_wrong_one_0_with_leans_error(url: str) -> None:
    with open_env("lean", url=url) as env:
        user = env.reset(0)[1].text
        assert re.search(r"theorem goal .* := by", user)
        wrong = env.step(answer("  trivial\n  simp"))
        assert (wrong.reward, wrong.is_valid, wrong.is_over) == (0.0, True, False)
        assert "line 1: unknown tactic trivial" in str(wrong.observation)
        right = env.step(answer(env.oracle()))
        assert (right.reward, right.terminated, right.success) == (1.0, True, True)
        with pytest.raises(EnvError, match="call reset"):
            env.step(answer("rfl"))


def test_comments_earn_nothing_and_never_reach_lean() -> None:
    lean = KnowsProofs()
    with kimina(lean) as address, open_env("lean", url=address, max_turns=9) as env:
        env.reset(0)
        for text in ("-- by symmetry\n-- and then\n-- done", "/- a /- nested -/ one -/", "--"):
            result = env.step(answer(text))
            assert (result.reward, result.is_valid, result.success) == (-0.1, False, False)
        assert lean.seen == []
        right = env.step(answer(f"-- why\n{env.oracle()} -- so\n/- end -/"))
        assert right.reward == 1.0
        assert "why" not in lean.seen[0]


@pytest.mark.parametrize(
    "cheat",
    [
        "sorry",
        "exact (by admit)",
        "axiom cheat : False",
        "rfl\ntheorem goal2 : True := trivial",
        "rfl\n  end Foo",
        "native_decide",
        "macro_rules | `(tactic| rfl) => `(tactic| skip)",
        "#eval 1",
        "set_option autoImplicit true in rfl",
        "open Classical in simp",
        "run_tac do return",
        "stop",
        'exact by_elab do IO.FS.writeFile "/tmp/a" "b"; return .const ``trivial []',
        "exact eval% (1 + 1)",
        "run_meta return",
    ],
)
def test_words_that_leave_the_theorem_or_its_proof_open_are_malformed(cheat: str) -> None:
    assert forbidden_words(cheat)
    assert read_tactics(cheat) is None


def test_names_that_only_look_like_forbidden_words_are_allowed() -> None:
    tactics = "exact Nat.le_of_lt_succ h.end_sorry\nsimp only [List.append_nil, defs]"
    assert read_tactics(f"```lean\n{tactics}\n```") == tactics


def test_nothing_that_rests_on_another_axiom_is_proved() -> None:
    def report(*texts: str, sorries: int = 0, severity: str = "info") -> LeanReport:
        messages = tuple(LeanMessage(severity, text, 1) for text in texts)
        return LeanReport(messages, num_sorries=sorries)

    assert is_proved(report(NO_AXIOMS), "goal")
    assert is_proved(report("'goal' depends on axioms: [propext, Quot.sound]"), "goal")
    assert is_proved(report("'Foo.goal' does not depend on any axioms"), "Foo.goal")
    assert not is_proved(report("'goal' depends on axioms: [propext, sorryAx]"), "goal")
    assert not is_proved(report("'goal' depends on axioms: [Lean.ofReduceBool]"), "goal")
    assert not is_proved(report("'other' does not depend on any axioms"), "goal")
    assert not is_proved(report(), "goal")
    assert not is_proved(report(NO_AXIOMS, sorries=1), "goal")
    assert not is_proved(report(NO_AXIOMS, severity="error"), "goal")
    assert not is_proved(LeanReport(has_timed_out=True), "goal")


def test_a_proof_that_writes_leans_verdict_itself_is_not_proved() -> None:
    cheat = f'trace "{NO_AXIOMS}"\nexact sorryAx _ false'
    assert read_tactics(cheat) == cheat
    told = (
        LeanMessage("info", NO_AXIOMS, 2),
        LeanMessage("warning", "declaration uses 'sorry'", 1),
        LeanMessage("info", "'goal' depends on axioms: [sorryAx]", 5),
    )
    assert not is_proved(LeanReport(told), "goal")
    assert not is_proved(LeanReport(told[::-1]), "goal")


def test_a_theorem_whose_name_ends_in_a_prime_can_be_proved() -> None:
    for rest in ("does not depend on any axioms", "depends on axioms: [propext]"):
        assert is_proved(LeanReport((LeanMessage("info", f"'goal'' {rest}", 1),)), "goal'")


def test_lean_has_answered_before_the_call_is_given_up() -> None:
    longest_s = server.LeanServer("http://a").time_limit_s + server.HTTP_GRACE_S
    assert longest_s + sum(server.RETRY_WAITS_S) < RolloutConfig().env_timeout_s
    assert option_defaults(Lean)["time_limit_s"] == server.LeanServer("http://a").time_limit_s


def test_lines_of_errors_count_within_the_answer_whatever_the_statement_says(
    tmp_path: Path,
) -> None:
    rows = [{"formal_statement": f"theorem t{i} : simp = simp := by"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = result(message("unknown identifier", "error", line=2))
    with (
        kimina(lambda code: told) as address,
        open_env("lean", url=address, source=tmp_path / "rows.jsonl") as env,
    ):
        env.reset(0)
        assert "line 1: unknown identifier" in str(env.step(answer("simp")).observation)


def test_lean_gets_the_header_the_statement_the_tactics_and_a_question() -> None:
    code = whole_code("import Mathlib\n", "theorem a : 1 = 1", "a", "norm_num\nsimp")
    assert code == (
        "import Mathlib\ntheorem a : 1 = 1 := by\n  norm_num\n  simp\n\n#print axioms a\n"
    )


def test_comments_are_removed_even_when_they_are_nested_or_open() -> None:
    assert without_comments("a -- b\nc /- d /- e -/ f -/ g /- open") == "a \nc  g "
    assert without_comments("x - y / -z") == "x - y / -z"


def test_a_proof_that_takes_too_long_is_wrong_and_the_episode_goes_on() -> None:
    with (
        kimina(lambda code: refused("Lean REPL command timed out in 60 seconds")) as address,
        open_env("lean", url=address) as env,
    ):
        env.reset(0)
        result = env.step(answer("simp"))
        assert (result.reward, result.is_over) == (0.0, False)
        assert "Lean ran out of time." in str(result.observation)
        assert result.metrics == {"lean_timeouts": 1.0}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ((500, b"Oh"), "500 Internal Server Error: Oh"),
        ((200, b"<html>"), "the answer is not JSON"),
        ([], "an answer of Lean was expected"),
        ({"results": []}, "an answer of Lean was expected"),
        ({"results": [5]}, "an answer of Lean was expected"),
        (refused("REPL crashed"), "the server says: REPL crashed"),
        ({"results": [{"response": {"message": "bad"}}]}, "Lean's process says: bad"),
        ({"results": [{"response": {}}]}, "an answer of Lean was expected"),
        (result({"pos": 5}), "an answer of Lean was expected"),
    ],
)
def test_a_server_that_fails_costs_the_episode(said: object, problem: str) -> None:
    with kimina(lambda code: said) as address, open_env("lean", url=address) as env:
        env.reset(0)
        with pytest.raises(EnvError, match=problem):
            env.step(answer("simp"))
        env.reset(1)


def test_a_theorem_under_another_name_stays_in_its_split() -> None:
    rows = [f"lemma t{i}\n  (x : Nat) : x + 0 = x := by sorry" for i in range(40)]
    rows += [f"theorem Foo.t{i}' (x : Nat) :  x + 0 = x := by" for i in range(40)]
    assert len({read_theorem("row", row, "").key for row in rows}) == 1
    other = read_theorem("row", "theorem t0 (x : Nat) : 0 + x = x := by", "")
    assert other.key != read_theorem("row", rows[0], "").key
    made = make_theorem(random.Random(0))
    assert made.key == made.statement


def test_a_server_without_a_free_process_is_asked_again() -> None:
    answers = iter([(429, b"No available REPLs"), result(message(NO_AXIOMS))])
    with kimina(lambda code: next(answers)) as address, open_env("lean", url=address) as env:
        env.reset(0)
        assert env.step(answer("simp")).success


def test_a_server_that_goes_away_costs_the_episode() -> None:
    with ExitStack() as running, ExitStack() as playing:
        address = running.enter_context(kimina(KnowsProofs()))
        env = playing.enter_context(open_env("lean", url=address))
        env.reset(0)
        running.close()
        with pytest.raises(EnvError, match="lean: http"):
            env.step(answer("simp"))


@pytest.mark.parametrize("family", FAMILIES)
def test_made_theorems_are_many_and_their_proofs_are_allowed(family: Any) -> None:
    made = [family(random.Random(seed)) for seed in range(200)]
    assert len({statement for statement, _ in made}) > 150
    assert all(read_tactics(proof) == proof for _, proof in made)


def test_rows_of_a_file_are_theorems(tmp_path: Path, url: str) -> None:
    text = "import Mathlib\nopen Nat\n\ntheorem mul_two_{} (n : Nat) : n * 2 = n + n := by sorry"
    rows = [{"formal_statement": text.replace("{}", str(n)), "proof": "omega"} for n in range(60)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with open_env("lean", url=url, source=str(path)) as env:
        user = env.reset(0)[1].text
        assert "import Mathlib\nopen Nat" in user and "sorry" not in user
        assert env.oracle() == "omega"


@pytest.mark.parametrize("end", [":= by", ":= by sorry", ":= sorry", ":=  by\n  sorry", ""])
def test_a_statement_may_end_with_or_without_sorry(end: str) -> None:
    theorem = read_theorem("row 1", f"def x := 1\nlemma a.b' : x = 1 {end}", "rfl")
    assert (theorem.header, theorem.name) == ("def x := 1\n", "a.b'")
    assert theorem.statement == "lemma a.b' : x = 1"


def test_hostile_replies_are_scored(url: str) -> None:
    with open_env("lean", url=url, max_turns=1) as env:
        for seed, reply in enumerate((*NASTY_REPLIES, *fuzz_replies(random.Random(0), 500))):
            env.reset(seed)
            assert env.step(reply).is_over


def test_the_rules_are_kept(url: str) -> None:
    rules = ["protocol", "determinism", "pickling", "ending", "splits", "malformed", "rewards"]
    report = check_env(f"lean:{url}", num_tasks=2, num_split_seeds=50, in_child=False, only=rules)
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs the option 'url'"),
        ({"url": "http://a", "max_turns": 0}, "max_turns must be at least 1"),
        ({"url": "http://a", "time_limit_s": 0}, "time_limit_s must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(MooredError, match=said):
        make_env("lean", **options)
