"""Test products of fp8 and table codes against fp64: every kind, group and instruction set, and declined cases."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from mycli.runtime.kernels.cpu import table
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.kernels.cpu.table import TableKernel, TableMatmul
from mycli.runtime.kernels.reference import DequantizeMatmul
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import INTEGER_TABLES, Codes, Packing
from tests.support.packed_weights import code_bits

CPU = torch.device("cpu")
KINDS: dict[str, Codes] = {kind: kind for kind in get_args(Codes) if kind not in ("int", "iq2", "iq1")}  # not of 3 bits
COLUMNS = 192


def weight(kind: Codes, group: int | None, dtype: torch.dtype = torch.float32, rows: int = 37) -> PackedWeight:
    generator = torch.Generator().manual_seed(group or 0)
    packing = Packing(code_bits(kind), group, codes=kind)
    values = code_table(packing)
    assert len(values) == 1 << packing.bits
    good = torch.arange(len(values))[values.isfinite()].to(torch.uint8)
    codes = good[torch.randint(0, len(good), (rows, COLUMNS), generator=generator)]
    scales = torch.randn(rows, packing.groups(COLUMNS), generator=generator).to(dtype)
    return PackedWeight(pack(codes, packing.bits), scales, packing, COLUMNS)


def exact(given: PackedWeight) -> Tensor:
    bits, groups = given.packing.bits, given.packing.groups(COLUMNS)
    table, stored = code_table(given.packing).double(), given.packed.view(torch.uint8)
    result = torch.empty(given.out_features, COLUMNS, dtype=torch.float64)
    for column in range(COLUMNS):
        code = stored[:, column * bits // 8] >> column * bits % 8 & (1 << bits) - 1
        result[:, column] = table[code.int()] * given.scales[:, column * groups // COLUMNS].double()
    return result


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("group", [16, 32, 96, None])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_fp64(kind: str, group: int | None) -> None:
    given = weight(KINDS[kind], group)
    matmul = prepare_product(given, torch.float32)
    assert isinstance(matmul, CpuMatmul if kind in ("e2m1", *INTEGER_TABLES) else TableMatmul)
    assert torch.equal(matmul.dequantize(), dequantize(given))
    assert isinstance(matmul, CpuMatmul) or matmul.nbytes == given.packed.nbytes + given.scales.nbytes
    wanted = exact(given)
    for rows in (1, 3, 4, 7, 16, 40):
        x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))
        assert (matmul(x).double() - x.double() @ wanted.t()).norm() < 2e-6 * (x.double() @ wanted.t()).norm()


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_types_of_scales_and_activations(dtype: torch.dtype, scales: torch.dtype) -> None:
    given = weight("nf4", 32, scales)
    matmul = prepare_product(given, dtype)
    assert torch.equal(matmul.dequantize(), dequantize(given))
    for rows in (2, 20):
        x = torch.randn(rows, COLUMNS).to(dtype)
        found, wanted = matmul(x), x.double() @ exact(given).t()
        assert found.dtype == dtype and (found.double() - wanted).norm() < 6e-3 * wanted.norm()


def test_a_row_has_the_same_bits_beside_others() -> None:
    matmul, x = prepare_product(weight("e4m3", 32), torch.float32), torch.randn(15, COLUMNS)
    together = matmul(x)
    assert all(torch.equal(matmul(x[row : row + 1])[0], together[row]) for row in range(15))


@pytest.mark.parametrize(("kind", "code"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7C), ("e5m2", 0xFE)])
def test_codes_that_are_no_number_are_not_made_one(kind: str, code: int) -> None:
    given = weight(KINDS[kind], 32)
    given.packed.view(torch.uint8)[5, 7] = code
    matmul = prepare_product(given, torch.float32)
    assert isinstance(matmul, DequantizeMatmul)
    assert not matmul(torch.randn(1, COLUMNS))[0, 5].isfinite()


@pytest.mark.parametrize(
    ("packing", "code"),
    [
        (Packing(8, 8, codes="e4m3"), "group-not-multiple"),
        (Packing(4, 32, offsets=True), "packing-not-a-table"),
    ],
    ids=["small-groups", "integers"],
)
def test_declines_with_a_code(packing: Packing, code: str) -> None:
    for device, expected in ((CPU, code), (torch.device("cuda"), "not-on-cpu")):
        declined = TableKernel().decline(packing, 64, COLUMNS, device, torch.float32)
        assert declined is not None and declined.code == expected


def test_many_rows_are_multiplied_by_parts_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    unpack = TableMatmul._unpack

    def counted(self: TableMatmul, first: int, out: Tensor) -> None:
        parts.append(len(out))
        unpack(self, first, out)

    given, x = weight("e4m3", 32), torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(0))
    matmul = prepare_product(given, torch.float32)
    monkeypatch.setattr(TableMatmul, "_unpack", counted)
    whole = matmul(x)
    for most, expected in ((10 * COLUMNS + 5, [10, 10, 10, 7]), (1, [1] * 37)):
        monkeypatch.setattr(table, "_PART", most)
        assert torch.allclose(matmul(x), whole, atol=1e-4)
        assert parts == [37, *expected]
        del parts[1:]
