"""The loop over a block's columns: its definition in fp64, native code, plain torch, and Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding.columns import solve_block
from mycli.quant.rounding.grid import BLOCK
from mycli.quant.rounding.plain import solve_columns
from tests.support.columns import SHAPES, agree, problem
from tests.support.triton_interpreter import Interpret, interpret  # noqa: F401  (reason: a fixture)


def definition(
    residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int
) -> tuple[Tensor, Tensor]:
    left, matrix, scales = residual.double().clone(), matrix.double(), scales.double()
    found, shifts = torch.empty(left.shape, dtype=torch.uint8), torch.empty_like(left)
    for i in range(len(left)):
        if codes is None:
            level = (left[i] / scales[i]).round().clamp(-half, half - 1)
            shifts[i] = (left[i] - level * scales[i]) / matrix[i, i]
        else:
            old = codes[i].double() - half
            level = (left[i] / matrix[i, i] / scales[i] + old).round().clamp(-half, half - 1)
            shifts[i] = (level - old) * scales[i]
        found[i] = (level + half).to(torch.uint8)
        left[i + 1 :] -= matrix[i, i + 1 :, None] * shifts[i]
    return found, shifts


@pytest.mark.parametrize("move", [False, True], ids=["gptq", "descent"])
@pytest.mark.parametrize("half", [128, 8, 4, 2])
def test_the_loop_is_its_definition(half: int, move: bool) -> None:
    for count, rows in SHAPES:
        given = problem(count, rows, half, move)
        for solve in (solve_block, solve_columns):
            agree(solve(*given), definition(*given))


def device_code(count: int, rows: int, half: int, move: bool) -> tuple[Any, Any]:
    """Run in the interpreter's process, on a copy, to check that the inputs are not changed."""
    from mycli.quant.rounding.columns_triton import launch

    given = problem(count, rows, half, move)
    result = launch(*given)
    for before, after in zip(problem(count, rows, half, move)[:4], given[:4], strict=True):
        assert before is None or after is None or torch.equal(before, after)
    return result


@pytest.mark.parametrize("move", [False, True], ids=["gptq", "descent"])
@pytest.mark.parametrize("half", [pytest.param(128, marks=pytest.mark.slow), 2])
def test_the_device_code_is_the_loop(half: int, move: bool, interpret: Interpret) -> None:  # noqa: F811  (as above)
    pytest.importorskip("triton")
    for count, rows in ((BLOCK, 9), (5, 3)):
        actual: Any = interpret(device_code, count, rows, half, move)
        agree(actual, solve_block(*problem(count, rows, half, move)))


def reads_outside(count: int, rows: int, half: int, move: bool) -> int:
    """Return the number of elements that the kernel reads outside of its arguments."""
    from triton.runtime.interpreter import InterpreterBuilder

    from mycli.quant.rounding.columns_triton import launch

    residual, matrix, *others = problem(count, rows, half, move)
    given = (residual, matrix.contiguous(), *others)  # so that `launch` copies nothing
    inside = [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in given if isinstance(part, Tensor)]
    load, outside = InterpreterBuilder.create_masked_load, 0

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        nonlocal outside
        outside += sum(
            not any(first <= address < end for first, end in inside) for address in pointers.data[mask.data].flat
        )
        return load(self, pointers, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
        launch(*given)
    return outside


@pytest.mark.parametrize("move", [False, True], ids=["gptq", "descent"])
def test_the_device_code_reads_nothing_outside_of_its_arguments(move: bool, interpret: Interpret) -> None:  # noqa: F811
    pytest.importorskip("triton")
    assert interpret(reads_outside, 5, 3, 8, move) == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("move", [False, True], ids=["gptq", "descent"])
def test_the_device_code_keeps_its_block_in_registers(move: bool, capability: int) -> None:
    pytest.importorskip("triton")
    from mycli.quant.rounding.columns_triton import ROWS, block_kernel
    from tests.ptx.builds import Build
    from tests.ptx.report import measure

    pointers = {name: "*fp32" for name in ("residual", "matrix", "scales", "shifts")}
    types = {**pointers, "old": "*u8", "codes": "*u8", "rows": "i32", "count": "i32"}
    constants = {"HALF": 8, "MOVE": move, "BLOCK": BLOCK, "ROWS": ROWS}
    unaligned = ("rows", "count", "matrix")
    found = measure(Build("columns", block_kernel, types, constants, warps=1, unaligned=unaligned), capability)
    assert found.spills == 0
