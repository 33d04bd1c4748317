"""Drafting tokens ahead and verifying them in one pass, so that the output is the model's own."""
