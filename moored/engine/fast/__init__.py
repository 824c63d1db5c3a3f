"""The fast engine for Llama-shaped models: slots, kernels, tree attention, CUDA graphs."""
