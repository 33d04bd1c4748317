"""GGUF files as models: the header, the block types, and what metadata and tensor names mean."""
