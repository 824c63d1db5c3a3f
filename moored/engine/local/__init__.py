"""Sampler and learner in this process, for Hugging Face causal LMs."""
