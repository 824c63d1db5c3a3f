"""Play one episode in the terminal: a person or the oracle answers, with the model's own text.

A bare answer is wrapped into the tags; a reply with tags goes in as it is typed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moored.cli.console import print_line, printable
from moored.envs.base import Environment, StepResult, begin, respond
from moored.envs.mix import option_defaults
from moored.errors import MooredError
from moored.reply import TAGS, format_reply
from moored.types import Content, content_images

PROMPT = "answer> "
HINT, HELP, LEAVE = "?", "help", "quit"
"""Words that are not answers; in tags they are: <answer>quit</answer>."""
HELP_TEXT = f"""\
Type an answer, as the model would between its answer tags, and press Enter. A whole reply works
too: <think>…</think><answer>…</answer>. The arrow keys edit the line and bring earlier ones back.
  {HINT}      the oracle's answer
  {HELP}   this text
  {LEAVE}   leave; so do Ctrl-C and Ctrl-D"""


@dataclass
class Score:
    """The state of an episode so far."""

    rewards: list[float] = field(default_factory=list)
    is_over: bool = False
    success: bool = False

    def add(self, result: StepResult) -> None:
        self.rewards.append(result.reward)
        self.is_over, self.success = result.is_over, result.success

    def __str__(self) -> str:
        turns = f"{len(self.rewards)} turn{'' if len(self.rewards) == 1 else 's'}"
        verdict = ("Solved" if self.success else "Not solved") if self.is_over else "Left"
        return f"{verdict} after {turns}, reward {sum(self.rewards):g}."


def play_episode(
    env: Environment,
    console: Console,
    *,
    task_seed: int = 0,
    episode_seed: int = 0,
    ask: Callable[[], str] | None = None,
    image_dir: Path | None = None,
) -> Score:
    """Play until the end, or until a person leaves (`ask` raises EOFError or KeyboardInterrupt).

    `ask` returns what a person typed; None lets the oracle play. Pictures go to `image_dir`.
    """
    *rules, user = begin(env, task_seed, episode_seed)
    if image_dir is not None:
        _make_image_dir(image_dir, env, user.content)
    console.rule(Text(f"{env.name} · task {task_seed}"), style="dim")
    for message in rules:
        console.print(_as_text(message.content), style="dim", soft_wrap=True)
    if ask is not None:
        start = f"Type an answer, {HINT} for a hint, {HELP} for help, {LEAVE} to leave."
        console.print(start, style="cyan")
    score = Score()
    try:
        _show(console, user.content, image_dir, frame=1)
        while not score.is_over:
            reply = _reply_of_oracle(env, console) if ask is None else _reply(env, ask)
            result = respond(env, reply)
            score.add(result)
            _show(console, result.observation, image_dir, frame=len(score.rewards) + 1)
    except (EOFError, KeyboardInterrupt):
        console.print()
    style = "bold green" if score.success else "bold"
    console.print(str(score), style=style)
    if image_dir is not None:
        print_line(console, f"The pictures are in {image_dir}.")
    return score


def ask_in_terminal() -> str:
    """Read one line; without a terminal, also write it down, so that the output reads well."""
    if not sys.stdin.isatty():
        print(typed := input(PROMPT))
        return typed
    # It gives `input` arrow keys and history, where Python was built with it.
    with suppress(ImportError):
        import readline  # noqa: F401
    return input(PROMPT)


def new_game_folder(parent: Path) -> Path:
    """`parent/game_1`, or the next number: pictures of earlier games stay apart."""
    taken = [path.name.removeprefix("game_") for path in parent.glob("game_*")]
    number = 1 + max((int(name) for name in taken if name.isdecimal()), default=0)
    return parent / f"game_{number}"


def to_reply(typed: str) -> str:
    """Wrap a bare answer into the tags; leave a reply that has any of them alone."""
    return typed if any(tag in typed for tag in TAGS) else format_reply("", typed.strip())


def _reply(env: Environment, ask: Callable[[], str]) -> str:
    while True:
        typed = ask()
        word = typed.strip()
        if word == HINT:
            print(printable(f"The oracle says: {env.oracle() or 'nothing'}"))
        elif word == HELP:
            print(HELP_TEXT)
        elif word == LEAVE:
            raise EOFError
        elif word:
            return to_reply(typed)


def _reply_of_oracle(env: Environment, console: Console) -> str:
    answer = env.oracle()
    console.print(Text.assemble(PROMPT, (printable(answer), "bold")), soft_wrap=True)
    return format_reply("", answer)


def _show(console: Console, content: Content, image_dir: Path | None, *, frame: int) -> None:
    console.rule(style="dim")
    console.print(_as_text(content), soft_wrap=True)
    if image_dir is None:
        return
    for index, image in enumerate(content_images(content)):
        suffix = f"_{index + 1}" if index else ""
        image.save(image_dir / f"frame_{frame:02}{suffix}.png")  # pyright: ignore[reportAttributeAccessIssue]


def _as_text(content: Content) -> Text:
    """The content as the model reads it, pictures named by their size."""
    if isinstance(content, str):
        return Text(printable(content))
    parts = [
        part["text"] if part["type"] == "text" else _picture_name(part["image"]) for part in content
    ]
    return Text(printable("".join(parts)))


def _picture_name(image: object) -> str:
    width, height = getattr(image, "size", (0, 0))
    return f"[picture {width}×{height}]\n"


def _make_image_dir(folder: Path, env: Environment, content: Content) -> None:
    if not content_images(content):
        has_views = "view" in option_defaults(type(env))
        hint = "set the option view=image" if has_views else "play it without pictures"
        raise MooredError(f"{env.name} shows no pictures with these options; {hint}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise MooredError(
            f"cannot save pictures in {folder}: {error.strerror}; choose another folder"
        ) from error
