"""KV cache, prefix cache and recurrent states."""
