"""Memory estimates: weights, cache and buffers of a model, and what fits."""
