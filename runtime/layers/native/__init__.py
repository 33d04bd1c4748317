"""Parts of layers as native code takes them, and the chain of all that follow each other: one call for a pass."""
