"""Test Triton products of ggml's codebook types, whose codes are positions in tables of integers, next to int8."""

import pytest
import torch

from mycli.runtime.checkpoint.gguf.types import QUANTIZED, GgmlType
from mycli.runtime.kernels.triton.product.kernel import small_product
from mycli.runtime.kernels.triton.product.matmul import TritonMatmul
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.quantization.packed_weight import as_integers
from mycli.runtime.quantization.scheme import Packing
from tests.runtime.kernels.test_triton_linear import Case, build, error, exact
from tests.support.random_tensors import weight
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

__all__ = ["interpret"]

CASES = [
    Case(Packing(4, 32, codes="iq4"), n=20, k=96, rows=2, scale=torch.float16),
    Case(Packing(4, 32, codes="iq3_xxs"), n=20, k=96, capability=(8, 0), scale=torch.float32),
    Case(Packing(4, 32, codes="iq3_s"), n=20, k=96, rows=3, scale=torch.float32),
    Case(Packing(4, 32, codes="iq3_s"), n=20, k=64, rows=20, scale=torch.float32),
    Case(Packing(3, 32, codes="iq2"), n=20, k=96, rows=12, scale=torch.float32),
    Case(Packing(3, 16, codes="iq2"), n=20, k=144, rows=2, scale=torch.float32),
    Case(Packing(3, 16, codes="iq1"), n=20, k=144, rows=12, scale=torch.float32),
]


def halves(case: Case) -> tuple[float, float, float, bool, int, int]:
    """Return the errors of a table's product and of int8's, their difference, whether weights equal, and bytes."""
    stored, x = build(case)
    table, integers = (TritonMatmul(each, Chip(case.capability, 1)) for each in (stored, as_integers(stored)))
    y, reference = (each.multiply(each.prepare(x), torch.float32) for each in (table, integers))
    errors = error(y, exact(stored, x)), error(reference, exact(stored, x))
    same = torch.equal(table.dequantize(), integers.dequantize())
    return *errors, error(y, reference.double()), same, table.codes.nbytes, integers.codes.nbytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_of_integers_are_multiplied_as_int8_is_from_half_the_codes(case: Case, interpret: Interpret) -> None:
    found = interpret(halves, case)
    unrounded, of_int8, apart, same, nbytes, int8_bytes = found  # type: ignore[misc]  # as above
    # 1.2e-5 at most in the interpreter, of iq3_s, which is unpacked in place; the bound is that of other products, as
    # matrix units round in their own way. Lookups give the numbers of int8; the order of sums differs with the tile.
    assert max(unrounded, of_int8, apart) < 1.5e-4 and same
    assert nbytes == int8_bytes // 2


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: str(kind.name))
def test_every_type_of_gguf_takes_the_bytes_of_its_packing(kind: GgmlType) -> None:
    """The estimate counts those; `Packing.on_gpu` of tables of integers has 4 bits, not 8."""
    stored = weight(kind.packing, 128, 512, 0, getattr(torch, kind.scale_dtype))
    on_gpu = kind.packing.on_gpu()
    assert on_gpu is not None and TritonMatmul(stored, Chip((9, 0), 1)).nbytes == on_gpu.bytes(128, 512)
    assert not kind.name.startswith("IQ") or on_gpu.bits == 4


def check(packing: Packing) -> float:
    return small_product(torch.device("cpu"), packing, Chip((9, 0), 1), 1)


def test_the_check_at_load_draws_4_bits_of_a_table_of_8(interpret: Interpret) -> None:
    stored = Packing(3, 16, codes="iq2").on_gpu()
    found = interpret(check, stored)
    assert stored == Packing(4, 16, codes="iq2") and isinstance(found, float) and 0 < found < 5e-3
