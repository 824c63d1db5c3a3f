"""vLLM as the sampler: `engine.sampler=vllm`."""
