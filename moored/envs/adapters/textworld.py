"""Games of TextWorld from files, such as `tw-make` writes them or ALFWorld ships.

In: game files. Out: a moored environment whose task is one of the games. A game has no chance in
it, so a pickled copy plays the same commands again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

from moored.envs.adapters.turns import TextGame
from moored.envs.base import StepResult, draw_task, encodable, warn_of_missing_splits
from moored.errors import EnvError, require_packages
from moored.reply import parse_reply
from moored.types import Message

SUFFIXES = (".z8", ".tw-pddl", ".ulx")
COMMAND = re.compile(r"(?=.*\w)[A-Za-z0-9 ,.'_/-]{1,120}")
"""Commands of words: the interpreter is C code and gets nothing else."""
CONTROLS = frozenset(
    ("save", "restore", "restart", "quit", "q", "undo", "script", "transcript", "notify", "verify")
)
"""Commands to the interpreter, not to the game; `save` writes files."""
MAX_SHOWN_CHARS = 6000
Z8_HEADER_BYTES = 64
NOT_HERE = "That is not possible here."


class TextWorld(TextGame):
    """Play a text adventure of TextWorld from game files (needs `moored[textworld]`).

    Reward: the points a command gains, as a share of all the game has, so that a won game earns 1
    in total; −0.1 for a malformed reply, which does not reach the game. Success is a won game.
    Winning and losing terminate the episode; `max_turns` truncates it.

    Options:
        games: a game file (.z8, or .tw-pddl as ALFWorld has them), or a folder of them, searched in
            its subfolders too. `tw-make` of TextWorld writes such files.
        show_commands (True): list the commands that are possible now.
        max_turns (30): replies in an episode.
        format_penalty (−0.1): reward of a malformed reply: without the tags, or a command of
            anything but words.

    A task is a game, in the split its file's content belongs to. `oracle` follows TextWorld's own
    solution, where the game has one.
    """

    name: ClassVar[str] = "textworld"
    main_option: ClassVar[str] = "games"
    is_stochastic: bool = False

    def __init__(
        self,
        *,
        games: str | Path,
        show_commands: bool = True,
        max_turns: int = 30,
        format_penalty: float = -0.1,
    ) -> None:
        self.check_options(max_turns=max_turns)
        require_packages("environment textworld", ("textworld",))
        self.max_turns = max_turns
        self.show_commands = show_commands
        self.malformed_reward = format_penalty
        self._games = find_games(str(games))
        self._path: Path | None = None
        self._game: Any = None

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._over = True
        (path, _), _ = draw_task(
            task_seed, lambda rng: rng.choice(self._games), lambda game: game[1]
        )
        self._commands: list[str] = []
        state = self._begin(path)
        self._score = 0.0
        parts = (state.objective, state.description, state.inventory)
        shown = "\n".join(part.strip() for part in parts if part) or clean(state.feedback)
        return self.open_episode(self._rules(), self._with_commands(shown))

    def step(self, reply: str) -> StepResult:
        self.check_running("step")
        answer = parse_reply(reply).answer
        self._turn += 1
        if answer is None or not COMMAND.fullmatch(answer):
            return self._finish(self.malformed_reward, "", is_valid=False)
        if not CONTROLS.isdisjoint(answer.lower().replace(".", " ").replace(",", " ").split()):
            return self._finish(0.0, NOT_HERE)
        self._catch_up()
        self._state, _, _ = self._game.step(answer)
        self._commands.append(answer)
        score = float(self._state.score or 0) / max(float(self._state.max_score or 1), 1.0)
        reward, self._score = score - self._score, score
        is_over = bool(self._state.won or self._state.lost)
        return self._finish(reward, clean(self._state.feedback), is_over=is_over)

    def oracle(self) -> str:
        self.check_running("oracle")
        self._catch_up()
        plan = self._state.policy_commands or []
        if not plan:
            raise EnvError(f"textworld: {self._path} holds no solution")
        return str(plan[0])

    def close(self) -> None:
        self._over = True
        game, self._game = self._game, None
        if game is not None:
            game.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_game": None, "_state": None}

    def _begin(self, path: Path) -> Any:
        """Start a game, or start it again."""
        textworld: Any = importlib.import_module("textworld")
        if self._game is None or path != self._path:
            if self._game is not None:
                self._game.close()
            facts = ("feedback", "objective", "description", "inventory", "score", "max_score")
            wanted = (*facts, "won", "lost", "admissible_commands", "policy_commands")
            # Its interpreter does not know the game's file, but TextWorld reads score and moves.
            warnings.filterwarnings("ignore", message="Game .* is not fully supported")
            try:
                infos = textworld.EnvInfos(**dict.fromkeys(wanted, True))
                self._game = textworld.start(str(path), infos)
            except Exception as error:
                raise EnvError(
                    f"textworld: {path} cannot be played: {type(error).__name__}: {error}"
                ) from error
            self._path = path
        self._state = self._game.reset()
        return self._state

    def _catch_up(self) -> None:
        """In a copy: play the commands so far again."""
        if self._game is None:
            assert self._path is not None
            self._begin(self._path)
            game: Any = self._game
            for command in self._commands:
                self._state, _, _ = game.step(command)

    def _finish(
        self, reward: float, shown: str, *, is_over: bool = False, is_valid: bool = True
    ) -> StepResult:
        return self.end_turn(
            reward,
            self._with_commands(shown),
            closing=shown,
            terminated=is_over,
            success=is_over and bool(self._state.won),
            is_valid=is_valid,
        )

    def _rules(self) -> str:
        return (
            "You play a text adventure. Between the answer tags write one command, such as `look`, "
            f"`go north` or `take key`. You have at most {self.max_turns} turns; winning earns 1."
        )

    def _with_commands(self, shown: str) -> str:
        if self.show_commands and self._state is not None and self._state.admissible_commands:
            shown = f"{shown}\nCommands: {', '.join(self._state.admissible_commands)}."
        return shown[:MAX_SHOWN_CHARS]


@functools.lru_cache(maxsize=16)
def find_games(source: str) -> tuple[tuple[Path, str], ...]:
    """Game files with a hash of their content, in the order of their names."""
    path = Path(source)
    if not path.exists():
        raise EnvError(f"textworld: there is no file or folder {source!r}; make games with tw-make")
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in found if file.name.endswith(SUFFIXES)]
    if not files:
        raise EnvError(
            f"textworld: {source!r} holds no games; their names end in {', '.join(SUFFIXES)}"
        )
    games = tuple((file, _digest(file)) for file in files)
    warn_of_missing_splits(source, f"{len(games)} games", [digest for _, digest in games])
    return games


def _digest(file: Path) -> str:
    """Hash of a game. Another file is refused here: the interpreter would end the process."""
    data = file.read_bytes()
    if file.suffix == ".z8" and (len(data) < Z8_HEADER_BYTES or data[0] != 8):
        raise EnvError(f"textworld: {str(file)!r} is not a game of the Z-machine, version 8")
    return hashlib.sha256(data).hexdigest()


def clean(feedback: str | None) -> str:
    """What a game says, without its prompt and status line and without empty lines."""
    lines = [line.rstrip() for line in (feedback or "").splitlines()]
    kept = [line for line in lines if line and not line.startswith(">")]
    end = next((n for n, line in enumerate(kept) if "Would you like to RESTART" in line), len(kept))
    return encodable("\n".join(kept[:end])[:MAX_SHOWN_CHARS])
