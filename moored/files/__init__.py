"""Rollout files of any trainer, read row by row into one kind of record."""
