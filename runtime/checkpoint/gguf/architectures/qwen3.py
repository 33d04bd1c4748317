"""Qwen3, dense: norms on queries and keys."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases

ARCHITECTURE = Architecture(name="qwen3", model_type="qwen3", written_types=("qwen3",), read_config=linear_biases)
