"""Runs test functions in a process where Triton interprets its kernels on CPU tensors.

Triton reads the switch when a kernel is defined, so setting it in this process would affect every other test.
"""

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

Interpret = Callable[..., object]


def _poison() -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _look_once() -> None:
    """Cache the builtins that Triton's interpreter looks up again, and patch them once for each launch.

    The set never changes, and all builtins of a module are patched together, at a launch and again at every call of a
    device function, which sees the same `triton.language`: this saves nearly half of the time.
    """
    from triton import language
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

    load, patch_language = language.load, interpreter._patch_lang

    @cache
    def sees_more(function: Any) -> bool:
        return any(value is language.core for value in function.__globals__.values())

    def patch_at_launch(function: Any) -> Any:
        if language.load is load or sees_more(function):
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_at_launch


def _compute_types_once() -> None:
    """Cache what the interpreter computes anew for every value: the parts of its type, of which there are few.

    Types are never changed. This saves another third of the time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_block, make_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[object, tuple[object, ...]] = {}
    shapes: dict[object, tuple[object, ...]] = {}
    dtypes: dict[str, object] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: object, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def numpy_dtype(type: Any) -> object:
        name = (type.element_ty if isinstance(type, core.block_type) else type).name
        if name not in dtypes:
            dtypes[name] = find_dtype(type)
        return dtypes[name]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    interpreter._get_np_dtype = numpy_dtype


def _pass_what_needs_no_change() -> None:
    """Return at once what needs no unwrapping and operands of one shape, as most do: a tenth of the time."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    unwrap, broadcast = core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap_others(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        shapes = [side.type.shape.values if side.type.is_block() else None for side in (left, right)]
        return (left, right) if shapes[0] == shapes[1] else broadcast(self, left, right)

    core._unwrap_if_constexpr = unwrap_others
    TritonSemantic.broadcast_impl_value = broadcast_others


def _compute_no_unused_overflow() -> None:
    """Leave out the check of integer sums and products: eight operations for each, whose result is for debugging."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug  # without it the check says nothing
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _begin() -> None:
    _poison()
    _look_once()
    _compute_types_once()
    _pass_what_needs_no_change()
    _compute_no_unused_overflow()


@cache  # shared by all test files: it takes seconds to start, and ends with this process
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
    """Return a function (function, *arguments) that runs a module-level function in the interpreter process."""
    return lambda function, *arguments: _pool().submit(function, *arguments).result()


@contextmanager
def backwards() -> Iterator[None]:
    """Run the programs of a launch from the last to the first, in the interpreter process."""
    from triton.runtime.interpreter import InterpreterBuilder

    place = InterpreterBuilder.set_grid_idx

    def turned(self: Any, *index: int) -> None:
        place(self, *(size - 1 - i for size, i in zip(self.grid_dim, index, strict=True)))

    InterpreterBuilder.set_grid_idx = turned
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_idx = place
