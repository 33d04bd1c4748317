"""Kernels for GPUs, each with its launcher."""
