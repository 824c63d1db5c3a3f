"""Supervised warm start on demonstrations of environments, or on dialogues of a file."""
