"""`moored serve-search`: a search server with Search-R1's protocol."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.listening import listen, read_token, serve
from moored.errors import MooredError, require_packages


def serve_search_command(
    corpus: Annotated[
        Path | None,
        typer.Argument(
            metavar="CORPUS",
            help="JSONL, JSON or Parquet with title and text; if not given, the made-up corpus of "
            "the environment search.",
        ),
    ] = None,
    retriever: Annotated[str, typer.Option(help="bm25 or dense.")] = "bm25",
    embedding_model: Annotated[
        str | None, typer.Option(help="Model for dense: a folder or hub id.")
    ] = None,
    world_seed: Annotated[
        int | None, typer.Option(help="Of the made-up corpus, as in the environment; default 0.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen at; beyond this machine set MOORED_SEARCH_TOKEN."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused with 503.", min=1)
    ] = 256,
) -> None:
    """Serve searches at /retrieve, as Search-R1 does.

    / and /health show its figures.
    """
    require_packages("serve-search", ["starlette", "uvicorn"])
    from moored.envs.search.choose import RetrieverChoice
    from moored.envs.search.remote import TOKEN_VARIABLE
    from moored.envs.search.retriever import CorpusRetriever
    from moored.envs.search.server import SearchService, make_app

    if corpus is not None and world_seed is not None:
        raise MooredError("--world-seed is for the made-up corpus; leave it out, or the file")
    token = read_token(TOKEN_VARIABLE, host)
    choice = RetrieverChoice(
        name=retriever,
        corpus=None if corpus is None else str(corpus),
        world_seed=world_seed or 0,
        embedding_model=embedding_model,
    )
    index = choice.make()
    if not isinstance(index, CorpusRetriever):
        raise MooredError(f"serve-search needs bm25 or dense, got {retriever!r}")
    # While the index is made, Ctrl-C is no error either.
    with closing(listen(host, port)) as listener, suppress(KeyboardInterrupt):
        index.open()
        with closing(index):
            num_passages = len(index.passages)
            service = SearchService(index, retriever, num_passages, max_waiting=max_waiting)
            address = f"http://{host}:{listener.getsockname()[1]}"
            told = f"serving {num_passages:,} passages with {retriever} at {address}/retrieve"
            serve(make_app(service, token), listener, tell=lambda: print_line(make_console(), told))
