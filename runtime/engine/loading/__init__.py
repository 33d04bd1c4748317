"""Loads a model into the memory that is free."""
