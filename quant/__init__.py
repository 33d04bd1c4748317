"""What makes quantized models and measures them. Uses the runtime to measure; knows nothing of a terminal."""
