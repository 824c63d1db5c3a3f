"""What `moored diagnose` does: take a run's own looks, or read files, load models and score.

Progress goes to stderr.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from moored.analysis.compare_text import lost_sentence
from moored.analysis.diagnosis import Diagnosis
from moored.analysis.models import (
    Device,
    find_run,
    guess_model,
    late_model_warning,
    model_scorers,
    read_run_config,
    run_scorers,
)
from moored.analysis.reading import DrawOptions, RowSource
from moored.analysis.report_page import check_can_draw, check_can_write
from moored.analysis.sample import Draw
from moored.analysis.scorers import Scorer, Scorers
from moored.analysis.scoring import (
    Plan,
    Size,
    diagnose,
    draw_turns,
    make_plan,
    plan_turns,
    predict_seconds,
)
from moored.analysis.stored import followed_views, has_looks, read_diagnosis, why_no_looks
from moored.cli.console import counted, make_console, print_line
from moored.errors import ConfigError, MooredError
from moored.files.records import ReadOptions, parse_columns, parse_weights
from moored.files.tables import expand, is_run
from moored.runlog.log import read_records

SHOW_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Server:
    """A model behind an OpenAI-compatible server."""

    url: str
    tokenizer: str | None
    api_key_env: str | None
    concurrency: int
    timeout_s: float

    @classmethod
    def at(
        cls,
        url: str | None,
        tokenizer: str | None,
        api_key_env: str | None,
        concurrency: int,
        timeout_s: float,
    ) -> Server | None:
        """The server at an address; None without one."""
        return None if url is None else cls(url, tokenizer, api_key_env, concurrency, timeout_s)

    def scorer(self, model: str) -> Scorer:
        from moored.analysis.scorers import endpoint_scorer
        from moored.engine.endpoint.sampler import read_api_key

        return endpoint_scorer(
            self.url,
            model,
            tokenizer=self.tokenizer,
            api_key=read_api_key(self.api_key_env),
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
        )


def read_options(
    reader: str | None,
    tags: tuple[str, str],
    whole: bool,
    turn: int,
    reward: Sequence[str] | None,
    columns: Sequence[str] | None,
    group: str | None,
) -> ReadOptions:
    """How rows are read, from the words of the command line."""
    return ReadOptions(
        reader=reader,
        tags=tags,
        whole=whole,
        turn=turn,
        rewards=parse_weights(reward or ()),
        columns=parse_columns(columns or (), group=group),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for."""

    paths: Sequence[Path]
    model: str | None
    temperature: float | None
    where: Device
    server: Server | None
    reading: ReadOptions
    drawing: DrawOptions
    size: Size
    draws: int
    by_turn: bool | None
    page: Path | None
    """HTML to write; a place that cannot be written is refused before any work."""

    def __post_init__(self) -> None:
        if self.page is not None:
            check_can_draw()
            check_can_write(self.page, "--html")

    def answer(self, *, rescore: bool) -> Diagnosis:
        """What training measured, for a run directory; else the files are scored."""
        found, run = self._answer(rescore=rescore), find_run(self.paths)
        lost = None if run is None else lost_sentence(read_records(run))
        return found if lost is None else replace(found, warnings=(*found.warnings, lost))

    def _answer(self, *, rescore: bool) -> Diagnosis:
        run = self.paths[0] if len(self.paths) == 1 and is_run(self.paths[0]) else None
        if run is None or rescore or self.model is not None or self.server is not None:
            return self._score(expand(self.paths))
        if not has_looks(run):
            typer.echo(f"{why_no_looks(run)}: scoring afresh", err=True)
            return self._score(expand(self.paths))
        self._refuse_options_of_scoring()
        found = read_diagnosis(run)
        return self._with_closeups(found, run) if self.page is not None else found

    def _refuse_options_of_scoring(self) -> None:
        """Options that would have no effect on what training measured."""
        plain = ReadOptions(reader=self.reading.reader)
        given = {
            "--window": self.drawing.window is not None,
            "--prompts": self.size.num_prompts is not None,
            "--max-tokens": self.size.max_tokens is not None,
            "--temperature": self.temperature is not None,
            "--by-turn": bool(self.by_turn),
            "--turn, --tags, --whole, --columns and --reward": self.reading != plain,
        }
        wrong = next((name for name, is_given in given.items() if is_given), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong} would change nothing: of a run, what training measured is shown; add "
                f"--rescore to score its rollouts afresh"
            )

    def _with_closeups(self, found: Diagnosis, run: Path) -> Diagnosis:
        """Score the first and the last stored rollouts, for the page to show."""
        try:
            files = expand([run])
            scored = replace(self, by_turn=False)._score([files[0], *files[-1:]][: len(files)])
        except MooredError as error:
            return replace(found, warnings=(*found.warnings, f"no close-ups: {error}"))
        return found.with_closeups(scored.closeups)

    def _score(self, files: Sequence[Path]) -> Diagnosis:
        """Read the files, load models, score."""
        source = RowSource(files=files, reading=self.reading, drawing=self.drawing)
        wants_turns = self._wants_turns(source)
        drawn = _draw(source)
        scorers = self._scorers()
        base = scorers.at(max((look.step or 0 for look in drawn.looks), default=None))
        plan = make_plan(drawn, base, self.size)
        if wants_turns:
            turn = self.reading.turn
            steps = sorted({s for series in plan.series for s in series.looks[-1].draw.steps})
            turns = draw_turns(lambda number: _draw(source.of_turn(number, steps)), turn=turn)
            plan = plan_turns(plan, turns, base, self.size, turn=turn)
        with _progress(plan, scorers, base) as on_column:
            found = diagnose(
                plan,
                drawn,
                scorers,
                draws=self.draws,
                seed=self.drawing.seed,
                closeups=self.page is not None,
                on_column=on_column,
            )
        return replace(found, warnings=(*self._warnings(scorers, plan), *source.warnings()))

    def _wants_turns(self, source: RowSource) -> bool:
        if self.by_turn and not source.tells_turns():
            raise ConfigError(
                "--by-turn needs files with one row per turn, as runs of moored write them"
            )
        if self.by_turn is not None:
            return self.by_turn
        return self.page is not None and source.tells_turns()

    def _scorers(self) -> Scorers:
        run = find_run(self.paths)
        temperature = self.temperature
        if temperature is None:
            temperature = 1.0 if run is None else read_run_config(run).rollout.temperature
        if self.server is not None:
            if temperature != 1.0:
                raise ConfigError(
                    f"a server gives log-probabilities at temperature 1, not {temperature:g}; "
                    f"score with a local model, or give --temperature 1"
                )
            if self.model is None:
                raise ConfigError("name the model that the server knows: --model NAME")
            return Scorers.single(self.server.scorer(self.model))
        if self.model is None and run is not None:
            return run_scorers(run, temperature, self.where)
        return model_scorers(self.model or guess_model(self.paths), temperature, self.where)

    def _warnings(self, scorers: Scorers, plan: Plan) -> list[str]:
        looks = [look for series in plan.series for look in series.looks]
        steps = sorted({step for look in looks for step in look.draw.steps})
        late, run = late_model_warning(scorers, steps), find_run(self.paths)
        found = [] if late is None else [late]
        swaps = set() if run is None else {v for v in followed_views(run) if v.endswith("_swap")}
        if swaps:
            found.append(
                f"only turn {self.reading.turn} is scored afresh; training judged all turns by "
                f"{swaps.pop().replace('_', ' ')}, see: moored diagnose {shlex.quote(str(run))}"
            )
        return found


def _draw(source: RowSource) -> Draw:
    with make_console(stderr=True).status("reading") as status:
        return source.draw(status.update)


@contextmanager
def _progress(plan: Plan, scorers: Scorers, base: Scorer) -> Iterator[Callable[[], None]]:
    """Say what scoring costs, and show progress when it takes a while."""
    from rich.progress import Progress

    console = make_console(stderr=True)
    seconds = predict_seconds(plan, base)
    looks = counted(plan.num_looks, "look")
    looks += f" and {counted(plan.num_turns, 'other turn')} of the last" if plan.num_turns else ""
    prompts = max(series.num_prompts for series in plan.series)
    pairs = max(len(each.pairs) for each in plan.pair_sets)
    print_line(
        console,
        f"scoring {looks} with {scorers.name} at temperature {scorers.temperature:g}: {prompts} "
        f"prompts × {pairs} reasonings, {plan.token_forwards:,} token-forwards, about "
        f"{seconds:.1f} s",
    )
    shown = console.is_terminal and seconds > SHOW_AFTER_S
    with Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("scoring", total=sum(len(each.prompts) for each in plan.pair_sets))
        yield lambda: bar.advance(task)
