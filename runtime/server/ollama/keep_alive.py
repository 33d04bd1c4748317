"""Reads how long a model stays loaded after a request of Ollama's interface."""

import re
from typing import Any

_DURATION = re.compile(r"(-?)((?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+|0|[0-9]+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def keep_alive_seconds(value: Any) -> float | None:
    """Return the seconds that a model stays loaded after a request; None for ever. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number of seconds or a duration such as 5m")
    if isinstance(value, int | float):
        return None if value < 0 else float(value)
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a number of seconds or a duration such as 5m")
    parts = re.findall(r"([0-9.]+)(ns|us|µs|ms|s|m|h)", match[2])
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(match[2])
    return None if match[1] else seconds
