"""The `moored` command: one file per subcommand."""
