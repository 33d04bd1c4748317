"""Test packed products on the CPU against fp64: every width, group, dtype and instruction set; always the same bits."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.kernels.cpu.matmul import (
    CpuKernel,
    CpuMatmul,
    TorchInt4Kernel,
    dense_product,
    gather_codes,
)
from mycli.runtime.kernels.registry import Operation, kernels, prepare_product, select_kernel
from mycli.runtime.quantization.packed_weight import PackedWeight, as_integers, dequantize, pack
from mycli.runtime.quantization.scheme import INTEGER_TABLES, ActivationBits, Codes, Packing
from mycli.runtime.utils.memory import HUGE
from tests.support.packed_weights import code_bits

CPU = torch.device("cpu")
ERROR = {torch.bfloat16: 0.0028, torch.float16: 0.0004, torch.float32: 1e-6}
ROWS = (1, 4, 5, 13, 40)
WIDTHS = (8, 6, 5, 4, 3, 2)
Kind = int | Codes  # bits of integer codes, or another code type
KINDS: tuple[Kind, ...] = (*WIDTHS, "e2m1", "iq4")
GROUPS = (16, 32, 64, 128, None)

pytestmark = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")


def packing_of(kind: Kind, group: int | None, offsets: bool = False) -> Packing:
    if isinstance(kind, int):
        return Packing(kind, group, offsets=offsets)
    return Packing(code_bits(kind), group, codes=kind)


def packed_weight(
    kind: Kind,
    shape: tuple[int, int],
    group: int | None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    offsets: bool = False,
) -> PackedWeight:
    """Return random codes with scales of both signs, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    packing = packing_of(kind, group, offsets)
    codes = torch.randint(0, 1 << packing.bits, shape, generator=generator).to(torch.uint8)
    scales = torch.randn(shape[0], shape[1] // (group or shape[1]), generator=generator) * 0.02
    scales[scales.abs() < 0.001] = 0
    beside = torch.randn(scales.shape, generator=generator) * 0.1 if packing.offsets else None
    return PackedWeight(pack(codes, packing.bits), scales.to(dtype), packing, shape[1], beside)


def exact(weight: PackedWeight) -> Tensor:
    plain = replace(weight.packing, offsets=False)
    scaled = dequantize(PackedWeight(weight.packed, weight.scales.double(), plain, weight.in_features))
    if weight.offsets is None:
        return scaled
    return scaled + weight.offsets.double().repeat_interleave(weight.in_features // weight.offsets.shape[1], dim=1)


def activations(rows: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_product(library: Native, kind: Kind) -> None:
    """The cases have odd output counts, 1 to 40 rows, scales in several dtypes, and offsets."""
    for index, (group, scale_type) in enumerate(product(GROUPS, ERROR)):
        shape = (16, 128) if index % 3 == 0 else (37, 384)
        weight = packed_weight(kind, shape, group, scale_type, offsets=index % 2 == 0)
        wanted = exact(weight)
        for dtype in ERROR:
            matmul = CpuKernel().prepare(weight, dtype)
            for rows in ROWS if scale_type == dtype else (2, 20):
                x = activations(rows, shape[1], dtype)
                y = matmul(x)
                assert y.dtype == dtype and y.shape == (rows, shape[0])
                assert relative(y, x.double() @ wanted.T) < ERROR[dtype], (group, scale_type, dtype, rows)


@given(
    kind=st.sampled_from(KINDS),
    offsets=st.booleans(),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 12),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@settings(max_examples=40, deadline=None)
def test_repacked_weight_is_the_reference_bit_for_bit(
    kind: Kind, offsets: bool, outputs: int, blocks: int, seed: int, dtype: torch.dtype
) -> None:
    inputs = 32 * blocks
    group = (None, 16, 32, inputs)[seed % 4]
    weight = packed_weight(kind, (outputs, inputs), group, dtype, seed, offsets)
    assert torch.equal(CpuKernel().prepare(weight, dtype).dequantize(), dequantize(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_unpacks_the_reference(library: Native, kind: Kind) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = packed_weight(kind, (45, 384), 128, dtype, offsets=dtype != torch.float16)
        assert torch.equal(CpuKernel().prepare(weight, dtype).dequantize(), dequantize(weight))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def alone(matmul: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([matmul(row[None]) for row in x])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(library: Native, kind: Kind) -> None:
    """The row counts are at the switches between kernels and at tile boundaries."""
    for group, dtype in product((16, 32, 128), (torch.bfloat16, torch.float32)):
        matmul = CpuKernel().prepare(packed_weight(kind, (70, 256), group, offsets=group == 32), dtype)
        x = activations(70, 256, dtype)
        wanted = alone(matmul, x)
        for rows in (2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 25, 33, 64, 70):
            assert torch.equal(matmul(x[:rows]), wanted[:rows]), (group, dtype, rows)
        with threads(3):
            assert torch.equal(matmul(x[:33]), wanted[:33]), (group, dtype)
            assert torch.equal(matmul(x[:1]), wanted[:1]), (group, dtype)


def test_rows_of_several_parts_have_their_bits(library: Native) -> None:
    """The case has more rows and inputs than one block, and an odd number of row blocks."""
    matmul = CpuKernel().prepare(packed_weight(4, (48, 4096), 64), torch.bfloat16)
    x = activations(290, 4096, torch.bfloat16)
    some = torch.tensor([0, 1, 127, 128, 129, 255, 256, 289])
    with threads(2):
        assert torch.equal(matmul(x)[some], alone(matmul, x[some]))


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows_gives_a_row_its_bits(
    library: Native, kind: Kind, group: int | None, offsets: bool
) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        matmul = CpuKernel().prepare(packed_weight(kind, (85, 640), group, offsets=offsets), dtype)
        x = activations(512, 640, dtype)
        wanted = alone(matmul, x)
        for rows in (*range(1, 97), 128, 512):
            assert torch.equal(matmul(x[:rows]), wanted[:rows]), (dtype, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_set_of_instructions_gives_the_same_bits(library: Native, kind: Kind) -> None:
    """The bits equal those of this machine's default; plain vectors lack fused multiply-add and get a tolerance."""
    own = native()
    assert isinstance(own, Native)
    for group, dtype in product(GROUPS, (torch.bfloat16, torch.float32)):
        weight, x = packed_weight(kind, (85, 640), group, offsets=kind in (2, 4, 6, 8)), activations(21, 640, dtype)
        found, wanted = (CpuMatmul(one, weight)(x) for one in (library, own))
        if "plain" in (library.isa, own.isa):
            assert relative(found, wanted.double()) < ERROR[dtype]
        else:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_activations_of_any_size(library: Native, size: float) -> None:
    """The activations have one value in a hundred that is 1000 times larger, as in real models, and zero segments."""
    weight = packed_weight(4, (64, 1024), 128)
    x = activations(4, 1024, torch.float32) * size
    x[:, ::100] *= 1000
    x[:, 256:384] = 0
    x = x.to(torch.bfloat16)
    assert relative(CpuKernel().prepare(weight, torch.bfloat16)(x), x.double() @ exact(weight).T) < 0.0022


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_what_is_not_finite_is_not_hidden(library: Native, value: float, rows: int) -> None:
    x = activations(rows, 256, torch.bfloat16)
    x[0, 200] = value
    weight = packed_weight(4, (32, 256), 128)
    y = CpuKernel().prepare(weight, torch.bfloat16)(x)
    hit = exact(weight)[:, 200] != 0
    assert not y[0][hit].isfinite().any()
    assert y[1:].isfinite().all()


def test_exact_where_integers_suffice(library: Native) -> None:
    """Check that no path rounds with small integers and scales of one."""
    codes = torch.randint(0, 16, (48, 256), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    weight = PackedWeight(pack(codes, 4), torch.ones(48, 2, dtype=torch.bfloat16), Packing(4, 128), 256)
    matmul = CpuKernel().prepare(weight, torch.bfloat16)
    for rows in (1, 3, 12, 64):
        x = (torch.arange(rows * 256).view(rows, 256) % 3 - 1).to(torch.bfloat16)
        wanted = (x.double() @ (codes.double() - 8).T).to(torch.bfloat16)
        assert torch.equal(matmul(x), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_numbers_fit(library: Native, kind: Kind) -> None:
    """The largest codes and activations of a segment, all of one sign, give the largest possible sums."""
    packing = packing_of(kind, 128)
    for code in (7, 15) if packing.codes == "e2m1" else (0, (1 << packing.bits) - 1):
        codes = torch.full((33, 256), code, dtype=torch.uint8)
        weight = PackedWeight(pack(codes, packing.bits), torch.ones(33, 2, dtype=torch.bfloat16), packing, 256)
        matmul = CpuKernel().prepare(weight, torch.bfloat16)
        for value in (1.9921875, -1.9921875):  # 255 / 128: all bits set
            x = torch.full((20, 256), value, dtype=torch.bfloat16)
            wanted = (x.double() @ exact(weight).T).to(torch.bfloat16)
            for rows in (1, 5, 20):
                assert torch.equal(matmul(x[:rows]), wanted[:rows])


def test_halves_of_scales_that_their_type_has_not(library: Native) -> None:
    """The kernel multiplies E2M1 codes by half their scale, and the smallest fp16 has no half."""
    weight = packed_weight("e2m1", (20, 64), 32, torch.float16)
    weight.scales[:, 0] = 2.0**-24
    matmul, x = CpuKernel().prepare(weight, torch.bfloat16), activations(3, 64, torch.bfloat16)
    assert torch.equal(matmul.dequantize(), dequantize(weight))
    assert relative(matmul(x), x.double() @ exact(weight).T) < ERROR[torch.bfloat16]


def test_no_second_copy() -> None:
    weight = packed_weight(3, (64, 256), 64, offsets=True)
    assert weight.offsets is not None
    held = weight.packed.nbytes + weight.scales.nbytes + weight.offsets.nbytes
    assert CpuKernel().prepare(weight, torch.bfloat16).nbytes == held


def test_small_weights_lie_together(library: Native) -> None:
    weights = [CpuMatmul(library, packed_weight(8, (1024, 768), 64, seed=seed)) for seed in range(3)]
    x = activations(2, 768, torch.bfloat16)
    before, nbytes = [weight(x) for weight in weights], [weight.nbytes for weight in weights]
    assert all(weight.small for weight in weights)
    gather_codes(weights)
    assert all(torch.equal(weight(x), y) for weight, y in zip(weights, before, strict=True))
    places = [ctypes.cast(weight.address, ctypes.POINTER(build.CWeight))[0].codes for weight in weights]
    assert places == [places[0] + index * 1024 * 768 for index in range(3)] and places[0] % HUGE == 0
    assert nbytes == [weight.nbytes for weight in weights]


def test_sorted_columns_take_their_inputs(library: Native) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    sorted_columns = packed_weight(4, (40, 256), 64)
    weight = replace(sorted_columns, packing=replace(sorted_columns.packing, permuted=True), inputs=order)
    assert CpuKernel().decline(weight.packing, 40, 256, CPU, torch.bfloat16) is None
    matmul, x = prepare_product(weight, torch.bfloat16), activations(7, 256, torch.bfloat16)
    assert torch.equal(matmul.dequantize(), dequantize(weight))
    ordered = CpuKernel().prepare(sorted_columns, torch.bfloat16)
    assert torch.equal(matmul(x), ordered(x[:, order.long()])) and matmul.nbytes == ordered.nbytes + order.nbytes


def test_no_rows_are_no_product(library: Native) -> None:
    assert CpuKernel().prepare(packed_weight(4, (64, 128), 64), torch.bfloat16)(
        torch.empty(0, 128, dtype=torch.bfloat16)
    ).shape == (0, 64)


@pytest.mark.parametrize(
    "packing, inputs, device, dtype, code",
    [
        (Packing(4, 128), 256, torch.device("cuda"), torch.bfloat16, "not-on-cpu"),
        (Packing(4, None), 100, CPU, torch.bfloat16, "inputs-not-multiple"),
        (Packing(4, 128), 256, CPU, torch.float64, "activation-dtype"),
        (Packing(4, 64, codes="nf4"), 256, CPU, torch.bfloat16, "packing-not-integers"),
        (Packing(7, 128), 256, CPU, torch.bfloat16, "packing-not-integers"),
        (Packing(4, 24), 96, CPU, torch.bfloat16, "packing-not-integers"),
    ],
    ids=["cuda", "inputs", "float64", "table", "bits", "group"],
)
def test_declines(packing: Packing, inputs: int, device: torch.device, dtype: torch.dtype, code: str) -> None:
    found = CpuKernel().decline(packing, 64, inputs, device, dtype)
    assert found is not None and found.code == code


def test_no_match_explains_itself() -> None:
    operation = Operation("nothing", (dense_product,))
    with pytest.raises(ModelError, match=r"nothing of \(1, 32\) torch.float16, \(4, 32\) torch.float16") as error:
        operation(torch.zeros(1, 32).half(), torch.zeros(4, 32).half())
    assert error.value.data["declined"] == {"dense_product": Declined("dense-product-types")}


def test_first_in_the_list() -> None:
    assert [kernel.name for kernel in kernels()][:2] == ["cpu", "torch-int4"]
    assert select_kernel(Packing(3, 64), 64, 128, CPU, torch.bfloat16).name == "cpu"


@pytest.mark.parametrize("group", [32, 64, 128])
def test_torch_int4(group: int) -> None:
    weight = packed_weight(4, (96, 256), group)
    kernel = TorchInt4Kernel()
    assert kernel.decline(weight.packing, 96, 256, CPU, torch.bfloat16) is None
    matmul = kernel.prepare(weight, torch.bfloat16)
    assert torch.equal(matmul.dequantize(), dequantize(weight))
    assert matmul.nbytes == 96 * 256 // 2 + 96 * 256 // group * 4, "codes, and a scale and an offset for each group"
    for rows in (1, 7, 40):
        x = activations(rows, 256, torch.bfloat16)
        assert relative(matmul(x), x.double() @ exact(weight).T) < 0.004
    assert kernel.decline(Packing(8, 128), 96, 256, CPU, torch.bfloat16)
    assert kernel.decline(Packing(4, 128), 90, 256, CPU, torch.bfloat16)
    assert kernel.decline(Packing(4, 128), 96, 256, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(77, 352), (20, 64), (256, 2048), (48, 4), (33, 100)], ids=str)
def test_dense_product(library: Native, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The product is correct, and a row has the same bits alone, with any thread count and at tile boundaries."""
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)

    def multiply(x: Tensor) -> Tensor:
        y = dense_product(x, weight)
        assert isinstance(y, Tensor)
        return y

    x = activations(300, shape[1], dtype)
    wanted = alone(multiply, x)
    assert relative(wanted, x.double() @ weight.double().T) < (0.0022 if dtype is torch.bfloat16 else 1e-6)
    for rows in (2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 33, 70, 300):
        assert torch.equal(multiply(x[:rows]), wanted[:rows]), rows
    with threads(3):
        assert torch.equal(multiply(x), wanted)
    assert multiply(x[:0]).shape == (0, shape[0])


def test_dense_product_leaves_to_torch_what_it_cannot() -> None:
    x, weight = activations(5, 64, torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert "dense-product-types" in str(dense_product(x.half(), weight.half()))
    assert "dense-product-types" in str(dense_product(x.float(), weight))
    assert "dense-weight-layout" in str(dense_product(x[:, ::2], weight[:, ::2]))
    assert "dense-weight-layout" in str(dense_product(x, torch.zeros(64, 32, dtype=torch.bfloat16).t()))
    assert "no-gradient" in str(dense_product(x, weight.clone().requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_dense_product_hides_nothing_that_is_not_finite(library: Native, value: float, dtype: torch.dtype) -> None:
    x = activations(20, 64, dtype)
    x[3, 40] = value
    y = dense_product(x, torch.ones(48, 64, dtype=dtype))
    assert isinstance(y, Tensor)
    assert not y[3].isfinite().any() and y[:3].isfinite().all() and y[4:].isfinite().all()


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("codes", INTEGER_TABLES)
def test_a_table_of_integers_has_the_bits_of_integers(library: Native, codes: Codes, bits: ActivationBits) -> None:
    """Codes of 4 or 3 bits multiply as their values in int8 do, whatever the rows and the type of the activations."""
    table = packed_weight(codes, (45, 512), 32, torch.float32)
    integers = as_integers(table)
    assert integers.packing.name == "int8-g32" and torch.equal(dequantize(integers), dequantize(table))
    found, wanted = CpuMatmul(library, table), CpuMatmul(library, integers)
    for matmul in (found, wanted):
        matmul.round_activations(bits)
    assert found.nbytes < 0.6 * wanted.nbytes
    for rows, dtype in product((1, 2, 4, 8, 9, 16, 17, 64), (torch.bfloat16, torch.float32)):
        x = activations(rows, 512, dtype)
        assert torch.equal(found(x), wanted(x)), (rows, dtype)
