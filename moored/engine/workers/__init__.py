"""A driver and its workers: what engines of several processes have in common."""
