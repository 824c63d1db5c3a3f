"""`python -m moored`: the `moored` command, and what torchrun starts on every rank."""

from __future__ import annotations

from moored.cli.main import main
from moored.engine.workers.ranks import started_rank


def run() -> None:
    """Rank 0, or the only process, runs the command; other ranks compute for it."""
    rank = started_rank()
    if rank is not None and rank.rank > 0:
        from moored.engine.workers.follow import follow

        follow(rank)
    try:
        main()
    except SystemExit as end:
        if rank is not None and not end.code:
            from moored.engine.workers.torchrun import dismiss_followers

            dismiss_followers()
        raise


if __name__ == "__main__":
    run()
