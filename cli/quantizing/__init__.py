"""The work of `quantize` and `pull --bits`: into a folder, a GGUF file, several copies, or while downloading."""
