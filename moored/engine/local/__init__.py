"""Sampler and learner in this process, for any Hugging Face causal LM."""
