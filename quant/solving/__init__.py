"""Solves the linears of a model: block by block with calibration data, or tensor by tensor without."""
