"""Python's cyclic garbage collector, held back where nothing is garbage. Knows nothing of what is made meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No collection within: reading a large file or importing a large library makes objects, none of them garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def gc_freeze() -> None:
    """Exempt everything that is alive from collections from now on, those at the end of the process too.

    For what stays until then: torch alone makes a hundred thousand objects, and each full collection looks at them all.
    """
    gc.freeze()
