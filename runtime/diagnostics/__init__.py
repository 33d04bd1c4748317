"""Measurements and self-tests: throughput, serving load, speculation, memory, kernels, rules of other engines."""
