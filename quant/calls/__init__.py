"""Tool calls of a model before and after quantization: built-in prompts, their measurement, its record."""
