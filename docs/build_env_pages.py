"""Write docs/environments/*.md from the environments themselves.

    python docs/build_env_pages.py            write the pages
    python docs/build_env_pages.py --check    only say which are stale; exit code 1 if any

Each page is the class docstring, the keyword options with their defaults, and the first prompt of
task 0, so a page cannot contradict the code.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from moored.envs import ENVIRONMENTS
from moored.envs.describe import EnvInfo, describe_env
from moored.envs.mix import REQUIRED, make_env
from moored.types import Message

PAGES = Path(__file__).resolve().parent / "environments"
NOTE = "<!-- Written by docs/build_env_pages.py from the class; edit the docstring instead. -->"


def build_pages() -> dict[str, str]:
    """File name -> text of every page."""
    infos = [describe_env(name) for name in ENVIRONMENTS]
    pages = {f"{info.name}.md": env_page(info) for info in infos}
    return {"index.md": index_page(infos), **pages}


def index_page(infos: list[EnvInfo]) -> str:
    """The table of all environments."""
    rows = [
        f"| [{info.name}]({info.name}.md) | {info.max_turns or '–'} "
        f"| {_noise(info)} | {info.summary} |"
        for info in infos
    ]
    return "\n".join(
        [
            "# Environments",
            "",
            NOTE,
            "",
            "`moored play NAME` lets you try one, `moored play NAME --oracle` shows a good",
            "solution, and `moored train grpo env=NAME env.0.options.KEY=VALUE` trains on it.",
            "Those down to `code` make their own tasks and need no download; the others play",
            "tasks of [other packages and servers](../adapters.md).",
            "[One file](../write-your-own-environment.md) adds your own.",
            "",
            "| name | turns | noise | task |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def env_page(info: EnvInfo) -> str:
    """The page of one environment."""
    options = [f"| `{name}` | {_cell(value)} |" for name, value in info.options.items()]
    return "\n".join(
        [
            f"# {info.name}",
            "",
            NOTE,
            "",
            docstring_to_markdown(info.doc),
            "",
            "## Defaults",
            "",
            *_episode(info),
            "| option | default |",
            "|---|---|",
            *options,
            "",
            *(_first_prompt(info) if info.can_be_played else []),
        ]
    )


def _episode(info: EnvInfo) -> list[str]:
    if info.max_turns is None:
        return []
    turns = "one turn" if info.max_turns == 1 else f"at most {info.max_turns} turns"
    noise = "random noise" if info.is_stochastic else "no noise"
    return [f"An episode has {turns} and {noise}.", ""]


def _first_prompt(info: EnvInfo) -> list[str]:
    # Without its resources: a first prompt needs none, and not every machine has a sandbox.
    with closing(make_env(info.name)) as env:
        messages = env.reset(0)
    return [
        "## First prompt of task 0",
        "",
        *(line for message in messages for line in _quote(message)),
    ]


def _noise(info: EnvInfo) -> str:
    if info.is_stochastic is None:
        return "–"
    return "yes" if info.is_stochastic else "no"


def docstring_to_markdown(doc: str) -> str:
    """Turn the indented lines under `Options:` into a list; leave all else as it is."""
    lines: list[str] = []
    in_options = False
    for line in doc.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.startswith("Options:"):
            in_options = True
            lines += [line] if line != "Options:" else [line, ""]
        elif in_options and indent == 4:
            lines.append(f"- {line.strip()}")
        elif in_options and indent == 8:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def stale_pages(pages: dict[str, str]) -> list[str]:
    """Names of files that are missing, differ, or should not be there."""
    found = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    return sorted(name for name in found.keys() | pages if found.get(name) != pages.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the environment pages.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if stale")
    is_check = parser.parse_args().check
    pages = build_pages()
    stale = stale_pages(pages)
    if is_check and stale:
        raise SystemExit(
            f"stale pages in docs/environments: {', '.join(stale)}; "
            f"run python docs/build_env_pages.py"
        )
    if is_check:
        return
    PAGES.mkdir(exist_ok=True)
    for name in stale:
        if name in pages:
            (PAGES / name).write_text(pages[name], encoding="utf-8")
        else:
            (PAGES / name).unlink()
        print(f"docs/environments/{name}")


def _cell(value: object) -> str:
    if value is REQUIRED:
        return "must be given"
    return f"`{value!r}`".replace("|", "\\|")


def _quote(message: Message) -> list[str]:
    return [f"{message.role.capitalize()}:", "", "```text", message.text, "```", ""]


if __name__ == "__main__":
    main()
