"""Rollout files of any trainer, row by row."""
