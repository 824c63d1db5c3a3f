"""The quick way for Llama-shaped models: slots, kernels, tree attention, CUDA graphs."""
