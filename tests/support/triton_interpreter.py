"""Runs test functions in a process where Triton interprets its kernels on CPU tensors.

The switch is read when a kernel is defined, so it cannot be set for a test inside this process without changing what
every other test sees.
"""

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

Interpret = Callable[..., object]


def _poison() -> None:
    """Memory that nobody wrote holds NaN."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _look_once() -> None:
    """Triton looks through its whole language, at every call of a device function, for what is still to be replaced.

    Which those are does not change, and all of a module are replaced together: a third of the time is saved.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins(package: object) -> list[tuple[str, object]]:
        return [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, builder: object, scope: object) -> None:
        found = builtins(package)
        if found and getattr(package, found[0][0]) is found[0][1]:
            for name, member in found:
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _begin() -> None:
    _poison()
    _look_once()


@cache  # one for all test files: it takes seconds to start, and ends with this process
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(os.getpid).result()  # starts the process, which keeps a copy of the environment
    finally:
        del os.environ["TRITON_INTERPRET"]
    return pool


@pytest.fixture
def interpret() -> Interpret:
    """interpret(function, *arguments): the result of a module-level function, computed there."""
    return lambda function, *arguments: _pool().submit(function, *arguments).result()


@contextmanager
def backwards() -> Iterator[None]:
    """In that process: programs of a launch run from the last to the first."""
    from triton.runtime.interpreter import InterpreterBuilder

    place = InterpreterBuilder.set_grid_idx

    def turned(self: Any, *index: int) -> None:
        place(self, *(size - 1 - i for size, i in zip(self.grid_dim, index, strict=True)))

    InterpreterBuilder.set_grid_idx = turned
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_idx = place
