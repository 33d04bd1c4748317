"""Writes the result of a run: its tensors, its finished parts (so that it resumes), and the model card."""
