"""The product of packed weights: its device code, the order in which weights lie, its launcher."""
