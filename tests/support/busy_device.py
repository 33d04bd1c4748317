"""Simulates a device that other work slows down during one of two bandwidth measurements."""

import pytest

from mycli.runtime.diagnostics import throughput


def busy_once(patch: pytest.MonkeyPatch, module: object, work: str, before: bool) -> None:
    """Report 12 GB/s before (`before`) or after the first call of `work` of `module`, and 36 GB/s otherwise."""
    calls, called = [], getattr(module, work)
    patch.setattr(module, work, lambda *given, **named: calls.append(work) or called(*given, **named))
    patch.setattr(throughput, "measure_bandwidth", lambda device, nbytes: 12.0 if before == (not calls) else 36.0)
