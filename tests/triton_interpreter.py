"""Runs test functions in a process where Triton interprets its kernels on CPU tensors.

The switch is read when a kernel is defined, so it cannot be set for a test inside this process without changing what
every other test sees.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

Interpret = Callable[..., object]


def _poison() -> None:
    """Memory that nobody wrote holds NaN."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """interpret(function, *arguments): the result of a module-level function, computed there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _poison) as pool:
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            pool.submit(os.getpid).result()  # starts the process, which keeps a copy of the environment
        finally:
            del os.environ["TRITON_INTERPRET"]
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
