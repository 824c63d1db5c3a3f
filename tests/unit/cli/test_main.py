"""The command line as a user meets it: output, exit codes, typos, interrupts, pipes."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import rich_utils
from typer.main import get_command
from typer.testing import CliRunner

from moored import __version__
from moored.cli.episode import to_reply
from moored.cli.main import app, help_text, main
from moored.cli.options import parse_options
from moored.errors import ConfigError

TOY = '''
import io

from moored.envs.base import StepResult, draw_task
from moored.reply import parse_reply
from moored.errors import EnvError
from moored.types import Message


class Doubles:
    """Double the number [sic].

    Reward: 1 when right.
    """

    name = "doubles"
    is_stochastic = False

    def __init__(self, *, max_turns=2, view="text"):
        self.max_turns, self.view = max_turns, view
        self._turns_left = 0

    def reset(self, task_seed, episode_seed=0):
        self._number, _ = draw_task(task_seed, lambda rng: rng.randint(10, 99999), str)
        self._turns_left = self.max_turns
        return [Message("system", "Double [it]."), Message("user", self._content("Number:"))]

    def step(self, reply):
        if not self._turns_left:
            raise EnvError("over")
        answer = parse_reply(reply).answer
        success = answer == self.oracle()
        self._turns_left = 0 if success else self._turns_left - 1
        return StepResult(
            observation=self._content(f"You said {answer!a:.20}."),
            reward=float(success),
            terminated=not self._turns_left,
            is_valid=answer is not None,
            success=success,
        )

    def oracle(self):
        return str(2 * self._number)

    def close(self):
        pass

    def _content(self, text):
        if self.view == "text":
            return f"{text} {self._number}"
        from PIL import Image
        color = self._number % 256
        picture = Image.new("L", (8, 8), color)
        return [{"type": "text", "text": text}, {"type": "image", "image": picture}]


class Broken(Doubles):
    def step(self, reply):
        int(parse_reply(reply).answer)
        return super().step(reply)


class Exits(Doubles):
    def step(self, reply):
        raise SystemExit(3)


class Buggy(Doubles):
    def reset(self, task_seed, episode_seed=0):
        raise ZeroDivisionError("a bug")
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with toy_env.py, entered as a user would."""
    (tmp_path / "toy_env.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for module in ("toy_env", "faulty", "late"):
        sys.modules.pop(module, None)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run `moored args…` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["moored", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def run_process(*args: str, typed: str | bytes = "", cwd: Path | None = None):
    """Run `moored args…` in a process of its own, with `typed` on a pipe."""
    data = typed.encode() if isinstance(typed, str) else typed
    command = [sys.executable, "-c", "from moored.cli.main import main; main()", *args]
    environ = os.environ | {"PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, input=data, capture_output=True, cwd=cwd, env=environ)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make `input` return these lines, or raise."""
    pending = list(lines)

    def read(prompt: str = "") -> str:
        line = pending.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def test_version_is_printed(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"moored {__version__}\n"


def test_help_names_the_commands(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in ("train", "play", "check-env", "config"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("args", [["sft", "--help"], ["envs"]])
def test_an_encoding_without_some_characters_is_no_traceback(args, encoding) -> None:
    command = [sys.executable, "-c", "from moored.cli.main import main; main()", *args]
    environ = os.environ | {"PYTHONIOENCODING": encoding}
    result = subprocess.run(command, capture_output=True, env=environ)
    assert b"Traceback" not in result.stderr
    assert result.returncode in (0, 2) and result.stdout + result.stderr


def test_output_may_go_to_a_stream_of_the_callers_own(monkeypatch) -> None:
    class Kept(list[str]):
        write, flush = list.append, staticmethod(lambda: None)

    kept = Kept()
    monkeypatch.setattr(sys, "stdout", kept)
    assert run(monkeypatch, "--version") == 0
    assert "".join(kept) == f"moored {__version__}\n"


def test_summaries_of_commands_fit_into_help_of_80_columns() -> None:
    # Two columns of margin, the longest name (serve-search), two more, and those that help keeps.
    room = 80 - len("  serve-search  ") - 4
    for command in app.registered_commands:
        assert command.callback is not None and command.callback.__doc__ is not None
        summary = command.callback.__doc__.splitlines()[0]
        assert len(summary) <= room and summary.endswith("."), summary


@pytest.mark.parametrize("name", [None, *(each.name for each in app.registered_commands)])
def test_help_breaks_no_word_at_80_columns(monkeypatch, name) -> None:
    monkeypatch.setattr(app, "rich_markup_mode", "rich")
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", False)
    words = [] if name is None else [name]
    shown = CliRunner().invoke(app, [*words, "--help"]).output
    assert max(map(len, shown.splitlines())) <= 80 and "╭" in shown
    group = get_command(app)
    command = group if name is None else group.commands[name]  # pyright: ignore
    wanted = [command.help or ""]
    for each in command.params:
        if not getattr(each, "hidden", False):
            wanted += [getattr(each, "help", None) or "", each.metavar or ""]
            wanted += [*each.opts, *each.secondary_opts] if each.opts[0].startswith("-") else []
    assert set(" ".join(wanted).split()) <= set(shown.replace("│", " ").split())


def test_options_of_diagnose_stand_in_groups_the_most_used_first(monkeypatch) -> None:
    monkeypatch.setattr(app, "rich_markup_mode", "rich")
    shown = CliRunner().invoke(app, ["diagnose", "--help"]).output
    panels = [part.count("│ --") for part in shown.split("╭─ ")[1:]]
    assert len(panels) >= 5 and max(panels) <= 9
    assert shown.index("--model") < shown.index("--columns") < shown.index("--concurrency")


def test_paragraphs_of_help_have_no_line_breaks_of_the_source() -> None:
    def command() -> None:
        """One thing.

        Two lines
        of one paragraph.
        """

    assert help_text(command) == "One thing.\n\nTwo lines of one paragraph."


def test_starting_up_imports_neither_numpy_nor_environments() -> None:
    slow = ("numpy", "yaml", "pydantic", "moored.envs")
    code = f"import sys, moored.cli.main; print([name for name in {slow} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_a_mistyped_command_is_corrected(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "plya") == 2
    assert "Did you mean 'play', 'plan'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["play", "sokobam"], "unknown environment 'sokobam'; did you mean 'sokoban'?"),
        (["check-env", "nowhere.at_all:Env"], "no module named 'nowhere'"),
        (["check-env", "toy_env:Double"], "no attribute 'Double'; did you mean 'Doubles'?"),
        (["play", "toy_env:Doubles", "-o", "max_turn=3"], "did you mean 'max_turns'?"),
        (["play", "toy_env:Doubles", "-o", "max_turns"], "must look like key=value"),
        (["play", "toy_env:Doubles", "-o", "view=[1"], "'view=[1': '[1' is not a valid YAML value"),
        (["play", "toy_env:Doubles", "--seed", "-1"], "task_seed must lie in [0, "),
        (["play", "toy_env:Doubles", "-o", "max_turns=true"], "a whole number, got True"),
        (["play", "toy_env:Doubles", "--image", "-o", "view=text"], "set the option view=image"),
        (["play", "countdown", "--image"], "countdown shows no pictures with these options; play"),
        (["play", "toy_env:Doubles", "--web"], "toy_env:Doubles has no web page; play it in the t"),
        (["play", "webshop", "--web", "--oracle"], "--web is for a person; leave out --image and "),
        (["play", "toy_env:Doubles", "frames"], "a folder (frames) is for pictures only; add --im"),
        (["check-env", "faulty:Env"], "faulty.py, line 1"),
        (["play", "late:Env"], "NameError at late.py:2"),
    ],
)
def test_mistakes_are_one_line_on_stderr(monkeypatch, capsys, toy, args, message) -> None:
    (toy / "faulty.py").write_text("class Env(:\n")
    (toy / "late.py").write_text("x = 1\ny\n")
    assert run(monkeypatch, *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moored: ")
    assert message.format(folder=toy) in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_a_file_named_like_a_module_does_not_replace_it(toy) -> None:
    (toy / "random.py").write_text("raise SystemExit('not the real one')\n")
    code = "import sys; sys.path.remove(''); from moored.cli.main import main; main()"
    command = [sys.executable, "-c", code, "play", "toy_env:Doubles", "--oracle"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=toy)
    assert "Solved after 1 turn" in result.stdout, result.stderr


def test_a_person_plays_with_bare_answers(monkeypatch, capsys, toy) -> None:
    type_lines(monkeypatch, "wrong", "  ", "<answer>1</answer>")
    assert run(monkeypatch, "play", "toy_env:Doubles", "--seed", "5") == 0
    out = capsys.readouterr().out
    assert "Double [it]." in out
    assert "You said 'wrong'." in out
    assert "You said None." in out
    assert "Not solved after 2 turns, reward 0." in out


def test_a_hint_is_not_a_turn(monkeypatch, capsys, toy) -> None:
    type_lines(monkeypatch, "?", EOFError)
    assert run(monkeypatch, "play", "toy_env:Doubles") == 0
    out = capsys.readouterr().out
    assert "The oracle says: " in out
    assert "Left after 0 turns, reward 0." in out


def test_the_oracle_plays(monkeypatch, capsys, toy) -> None:
    assert run(monkeypatch, "play", "toy_env:Doubles", "--oracle", "-o", "max_turns=7") == 0
    assert "Solved after 1 turn, reward 1." in capsys.readouterr().out


@pytest.mark.parametrize("leaving", [EOFError, KeyboardInterrupt])
def test_leaving_is_polite(monkeypatch, capsys, toy, leaving) -> None:
    type_lines(monkeypatch, "1", leaving)
    assert run(monkeypatch, "play", "toy_env:Doubles") == 0
    out, err = capsys.readouterr()
    assert out.endswith("Left after 1 turn, reward 0.\n")
    assert err == ""


def test_pictures_are_saved(monkeypatch, capsys, toy) -> None:
    from PIL import Image

    assert run(monkeypatch, "play", "toy_env:Doubles", "--oracle", "--image", "a/b") == 0
    names = sorted(path.name for path in (toy / "a" / "b" / "game_1").iterdir())
    assert names == ["frame_01.png", "frame_02.png"]
    with Image.open(toy / "a" / "b" / "game_1" / "frame_01.png") as picture:
        assert picture.size == (8, 8)
    out = capsys.readouterr().out
    assert "[picture 8×8]" in out
    assert out.endswith("The pictures are in a/b/game_1.\n")


@pytest.mark.parametrize("args", [["sokoban", "--image"], ["--image", "sokoban"]])
def test_pictures_go_to_frames_and_games_stay_apart(monkeypatch, capsys, toy, args) -> None:
    for game, folder in enumerate(("game_1", "game_2", "game_3"), start=1):
        assert run(monkeypatch, "play", "--oracle", *args) == 0
        assert (toy / "frames" / folder / "frame_01.png").is_file()
        assert len(list((toy / "frames").iterdir())) == game
    assert "The pictures are in frames/game_3." in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_explained(monkeypatch, capsys, toy) -> None:
    (toy / "file").write_text("")
    assert run(monkeypatch, "play", "toy_env:Doubles", "--oracle", "--image", "file/frames") == 2
    assert "cannot save pictures in file/frames/game_1" in capsys.readouterr().err


def test_answers_come_from_a_pipe_and_are_shown(toy) -> None:
    result = run_process("play", "toy_env:Doubles", typed="12\n", cwd=toy)
    out = result.stdout.decode()
    assert result.returncode == 0
    assert "answer> 12\n" in out
    assert out.endswith("Left after 1 turn, reward 0.\n")
    assert result.stderr == b""


def test_check_env_reports_and_sets_the_exit_code(monkeypatch, capsys, toy) -> None:
    assert run(monkeypatch, "check-env", "toy_env:Doubles") == 0
    assert "toy_env:Doubles keeps the rules." in capsys.readouterr().out
    assert run(monkeypatch, "check-env", "toy_env:Broken") == 1
    out = capsys.readouterr().out
    assert "raised TypeError" in out
    assert "toy_env:Broken breaks" in out


def test_a_bug_in_a_users_environment_is_reported_with_its_place(monkeypatch, capsys, toy) -> None:
    assert run(monkeypatch, "check-env", "toy_env:Buggy", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    detail = report["checks"][0]["detail"]
    assert detail.startswith("raised ZeroDivisionError at toy_env.py:")
    assert detail.endswith(": a bug")


@pytest.mark.parametrize("words", [("check-env",), ("play",)])
def test_what_an_environment_raises_cannot_command_the_terminal(monkeypatch, capsys, toy, words):
    raises = 'class Env:\n    def __init__(self):\n        raise RuntimeError("\\x1b[2J\\x07")\n'
    (toy / "faulty.py").write_text(raises)
    assert run(monkeypatch, *words, "faulty:Env") != 0
    shown = "".join(capsys.readouterr())
    assert r"\x1b[2J\x07" in shown and not set(shown) & {"\x1b", "\x07"}


def test_an_environment_that_exits_or_hangs_fails_its_check(monkeypatch, capsys, toy) -> None:
    assert run(monkeypatch, "check-env", "toy_env:Exits") == 1
    out = capsys.readouterr().out
    assert "raised SystemExit at toy_env.py:" in out
    assert "toy_env:Exits breaks" in out


def test_option_values_are_read_as_json_or_yaml() -> None:
    pairs = ["a=3", "b=1e-3", "c=true", "d=[1, 2]", "e=image", "f=x=y", "g=", 'h="7"', "i=null"]
    assert parse_options(pairs) == {
        "a": 3,
        "b": 0.001,
        "c": True,
        "d": [1, 2],
        "e": "image",
        "f": "x=y",
        "g": None,
        "h": "7",
        "i": None,
    }
    with pytest.raises(ConfigError, match="must look like key=value, got '=3'"):
        parse_options(["=3"])


def test_only_bare_answers_are_wrapped() -> None:
    assert to_reply(" Up || Down ") == "<think></think><answer>Up || Down</answer>"
    assert to_reply("<think>a</think>") == "<think>a</think>"
