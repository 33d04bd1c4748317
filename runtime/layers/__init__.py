"""The layers of the decoder. Batch and caches are arguments: a layer keeps no state of a sequence."""
