"""The `moored` command: one file a command."""
