"""Sampler replicas and learner ranks as actors of a Ray cluster, driven by one process."""
