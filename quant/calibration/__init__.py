"""Calibration data, and the statistics collected from it."""
