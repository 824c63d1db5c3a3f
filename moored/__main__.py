"""`python -m moored`: the `moored` command, and what torchrun starts on every rank."""

from __future__ import annotations

import sys

from moored.cli.stopping import clean_interrupts


def run() -> None:
    """Rank 0, or the only process, runs the command; other ranks compute for it."""
    with clean_interrupts():
        from moored.cli.main import main
        from moored.engine.workers.ranks import started_rank
    rank = started_rank()
    if rank is not None and rank.rank > 0:
        from moored.engine.workers.follow import follow

        follow(rank)
    try:
        main()
    except SystemExit as end:
        # A command that was refused at once does not wait for torch to be imported.
        if rank is not None and (not end.code or "torch" in sys.modules):
            from moored.engine.workers.torchrun import end_driver

            end_driver(end.code)
        raise


if __name__ == "__main__":
    run()
