"""Solves weights for the quantized types of ggml and writes them as one GGUF file."""
