"""A device that other work slows down in one of the moments in which its bandwidth is measured."""

import pytest

from mycli.runtime.diagnostics import throughput


def busy_once(patch: pytest.MonkeyPatch, module: object, work: str, before: bool) -> None:
    """12 GB/s are measured before, or else after, `work` of `module` is first called, and 36 in the other moment."""
    calls, called = [], getattr(module, work)
    patch.setattr(module, work, lambda *given, **named: calls.append(work) or called(*given, **named))
    patch.setattr(throughput, "measure_bandwidth", lambda device, nbytes: 12.0 if before == (not calls) else 36.0)
