"""Any OpenAI-compatible server as a sampler and a scorer."""
