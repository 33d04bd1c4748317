"""What runs a model: files to tensors, kernels, cache, tokens. Knows nothing of quantizing, nor of a terminal."""
