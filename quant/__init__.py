"""Makes quantized models and measures them with the runtime."""
