"""Guessing tokens ahead and judging the guesses, so that the output is the model's own."""
