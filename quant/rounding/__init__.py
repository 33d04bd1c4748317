"""The grid that weights are rounded to, and the arithmetic that solvers share."""
