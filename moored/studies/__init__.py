"""Grids of runs: declared in YAML, run as child processes, read back as one table."""
