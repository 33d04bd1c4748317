"""Checks a chat template: renders planted conversations with it and compares what clients and the cache need."""
