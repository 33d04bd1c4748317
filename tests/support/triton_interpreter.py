"""Runs test functions in a process where Triton interprets its kernels on CPU tensors.

The switch is read when a kernel is defined, so it cannot be set for a test inside this process without changing what
every other test sees.
"""

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


@cache  # one for all test files: it takes seconds to start, and ends with this process
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _poison)
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
