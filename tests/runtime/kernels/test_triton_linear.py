"""Test Triton linear products against fp64 in the interpreter: every packing, dtype, tile and awkward size."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.reference import DequantizeMatmul
from mycli.runtime.kernels.triton.product import kernel as triton_packed
from mycli.runtime.kernels.triton.product import matmul
from mycli.runtime.kernels.triton.product.kernel import TritonKernel, small_product
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from tests.support.grids import chosen
from tests.support.random_tensors import normal, weight
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

__all__ = ["interpret"]


@dataclass(frozen=True)
class Case:
    packing: Packing
    rows: int = 1
    n: int = 40
    k: int = 256
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] = (9, 0)
    processors: int = 1
    scale: torch.dtype | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        chip = f"sm{self.capability[0]}{self.capability[1]}x{self.processors}"
        scales = f"-{self.scale}-scales" if self.scale else ""
        return f"{self.packing.name}-{self.rows}x{self.k}-to-{self.n}-{dtype}-{chip}{scales}"


def few_rows() -> list[Case]:
    """Test every packing with 1 to 8 rows."""
    cases = []
    for index, (bits, group) in enumerate((bits, group) for bits in BITS for group in (*GROUP_SIZES, None)):
        dtype = (torch.bfloat16, torch.float16)[index % 2]
        cases.append(Case(Packing(bits, group), rows=(1, 3, 8)[index % 3], dtype=dtype))
    return cases


CASES = [
    *few_rows(),
    Case(Packing(4, 128), rows=8, n=130, k=128),
    Case(Packing(4, 128), rows=1, n=1, k=128),
    Case(Packing(4, 32), rows=2, n=33, k=96),
    Case(Packing(3, 64), rows=2, n=7, k=192),
    Case(Packing(8, None), rows=2, n=20, k=200),
    Case(Packing(4, 64), rows=5, processors=8, k=512),
    Case(Packing(2, 128), rows=1, processors=8, k=512),
    Case(Packing(4, 128), rows=3, scale=torch.float32),
    Case(Packing(4, 128), rows=12),
    Case(Packing(8, 64), rows=20),
    Case(Packing(4, 128), rows=40, k=128, dtype=torch.float16),
    Case(Packing(3, 128), rows=18),
    Case(Packing(4, 128), rows=12, capability=(8, 0)),
    Case(Packing(2, None), rows=33, capability=(8, 9)),
    Case(Packing(4, 32), rows=17, capability=(10, 0)),
    Case(Packing(4, 128), rows=66, k=128, capability=(12, 0)),
]
FOREIGN = [
    Case(Packing(4, 128, offsets=True), n=20, k=128),
    Case(Packing(8, 32, codes="e4m3"), n=20, k=64, dtype=torch.float16),
    Case(Packing(4, 32, codes="e2m1"), n=20, k=64, rows=2),
    Case(Packing(4, 64, codes="nf4", scale_dtype="float32"), n=20, k=64, scale=torch.float32),
    Case(Packing(4, 32, offsets=True), rows=12, k=96),
    Case(Packing(8, None, offsets=True), rows=3, k=200, processors=8),
    Case(Packing(2, 64, offsets=True), rows=2, scale=torch.float32),
    Case(Packing(6, 32, offsets=True), rows=2, k=96, dtype=torch.float16),
    Case(Packing(5, None), rows=2, k=160, dtype=torch.float16),
    Case(Packing(4, 256, offsets=True), rows=2, k=512, n=20),
    Case(Packing(3, 96), rows=2, k=192, n=20),
    Case(Packing(8, None, codes="e4m3"), rows=20, k=128, scale=torch.float32),
    Case(Packing(8, 128, codes="e5m2"), rows=2, capability=(8, 0)),
    Case(Packing(4, 32, codes="e2m1"), rows=20, k=64),
    Case(Packing(4, 64, codes="fp4"), rows=2, k=128, scale=torch.float32),
    Case(Packing(4, None, codes="nf4"), rows=12, k=128, capability=(8, 0)),
]
SIXTEENS = [
    *(
        Case(Packing(bits, 16), rows=rows, n=40, k=160, dtype=dtype, capability=capability)
        for bits, rows, dtype, capability in (
            (4, 1, torch.bfloat16, (9, 0)),
            (8, 3, torch.float16, (8, 0)),
            (3, 8, torch.bfloat16, (9, 0)),
            (2, 2, torch.float16, (12, 0)),
            (4, 12, torch.bfloat16, (9, 0)),
            (8, 12, torch.float16, (9, 0)),
            (3, 20, torch.bfloat16, (9, 0)),
            (2, 33, torch.float16, (9, 0)),
            (4, 20, torch.bfloat16, (8, 0)),
        )
    ),
    Case(Packing(4, 16, codes="e2m1"), k=144, scale=torch.float32),  # NVFP4
    Case(Packing(4, 16, codes="e2m1"), rows=12, k=144, scale=torch.float32),
    Case(Packing(6, 16), rows=2, k=256, scale=torch.float32),  # Q6_K
    Case(Packing(2, 16, offsets=True), rows=3, k=272, scale=torch.float32),  # Q2_K
    Case(Packing(4, 16, offsets=True), rows=9, k=48, processors=8),
    Case(Packing(6, 16, offsets=True), rows=3, k=272, scale=torch.float32),  # Q4_K with Q6_K
    Case(Packing(8, 16, offsets=True), rows=12, k=144, scale=torch.float32),
    Case(Packing(4, 48), rows=2, k=96),
]
CALLED = [
    Case(Packing(4, 128), rows=2, n=40),
    Case(Packing(8, 128), rows=2, n=40, k=1024, processors=8, dtype=torch.float16),
    Case(Packing(4, 128), rows=257, n=40, k=128),
    Case(Packing(2, 32), rows=300, n=40, k=128, dtype=torch.float16),
]


def build(case: Case) -> tuple[PackedWeight, torch.Tensor]:
    stored = weight(case.packing, case.n, case.k, seed=case.n + case.k, dtype=case.scale or case.dtype)
    stored = replace(stored, scales=stored.scales * 0.01)
    return stored, normal(case.rows, case.k, seed=1).to(case.dtype)


def exact(stored: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ exactly(stored).t()


def exactly(stored: PackedWeight) -> torch.Tensor:
    offsets = None if stored.offsets is None else stored.offsets.double()
    found = dequantize(replace(stored, scales=stored.scales.double(), offsets=offsets))
    return found.double()


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


def product(case: Case) -> tuple[float, float]:
    """Return the errors of the product before rounding to its dtype, and of the unpacked weight."""
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, x = build(case)
    matmul = TritonMatmul(stored, Chip(case.capability, case.processors))
    y = matmul.multiply(matmul.prepare(x), torch.float32)
    dense = matmul.dequantize()
    assert y.shape == (case.rows, case.n) and dense.dtype == stored.scales.dtype
    return error(y, exact(stored, x)), error(dense, exactly(stored) if case in FOREIGN else dequantize(stored).double())


def ulp(dtype: torch.dtype) -> float:
    """Return the ulp just below a power of two, since the interpreter truncates to bf16 where a GPU rounds."""
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: Case, interpret: Interpret) -> None:
    unrounded, dense = interpret(product, case)  # type: ignore[misc]  # the pool carries any result
    # fp32 sums of 1024 + u: 2 bits lose most. The interpreter sums in the order of numpy's BLAS for this processor:
    # 1.37e-4 at most with AVX2, below 1e-4 with AVX-512.
    assert unrounded < 1.5e-4
    assert dense <= (0 if case.dtype is torch.float16 or case.scale else ulp(case.dtype))


@pytest.mark.parametrize("case", chosen(FOREIGN, FOREIGN[:4]), ids=str)
def test_product_of_foreign_layouts(case: Case, interpret: Interpret) -> None:
    unrounded, dense = interpret(product, case)  # type: ignore[misc]  # the pool carries any result
    rounded = 2**-11 if case.packing.codes == "nf4" else 0.0  # its values, rounded to fp16
    assert unrounded < 1e-4 + rounded
    assert dense <= rounded + ulp(case.scale or case.dtype) * (1 if case.scale is None else 8)


@pytest.mark.parametrize("case", SIXTEENS, ids=str)
def test_groups_of_16(case: Case, interpret: Interpret) -> None:
    """The kernel unpacks two groups together and multiplies them separately."""
    unrounded, dense = interpret(product, case)  # type: ignore[misc]  # the pool carries any result
    assert unrounded < 1e-4
    assert dense <= ulp(case.scale or case.dtype) * (1 if case.scale is None else 8)


def called(case: Case) -> tuple[float, bool]:
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, x = build(case)
    matmul = TritonMatmul(stored, Chip(case.capability, case.processors))
    y = matmul(x)
    assert y.dtype == case.dtype and y.shape == (case.rows, case.n)
    return error(y, exact(stored, x)), torch.equal(y, matmul(x))


@pytest.mark.parametrize("case", CALLED, ids=str)
def test_call_rounds_once_and_repeats_itself(case: Case, interpret: Interpret) -> None:
    rounded, same = interpret(called, case)  # type: ignore[misc]  # the pool carries any result
    assert rounded < ulp(case.dtype) and same


def magnitudes(scale: float, dtype: torch.dtype) -> float:
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, x = build(Case(Packing(4, 128), rows=2, n=16, k=512, dtype=dtype))
    x *= scale
    x[0, 7] *= 300  # one large activation must not reduce the precision of its neighbours
    x[:, 128:256] = 0
    matmul = TritonMatmul(stored, Chip((9, 0), 1))
    return error(matmul.multiply(matmul.prepare(x), torch.float32), exact(stored, x))


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e5, 1e30], ids="x{:g}".format)
def test_bf16_of_any_magnitude(scale: float, interpret: Interpret) -> None:
    """The kernel multiplies in fp16, whose maximum is 65504; a power-of-two scale per group avoids overflow."""
    # 5.8e-5 at most with AVX2, below 5e-5 with AVX-512; see `test_product`.
    assert interpret(magnitudes, scale, torch.bfloat16) < 6e-5  # type: ignore[operator]  # the pool carries any result


def not_a_number() -> tuple[bool, bool]:
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, x = build(Case(Packing(4, 128), rows=2, n=16))
    x[1, 3] = torch.nan
    y = TritonMatmul(stored, Chip((9, 0), 1))(x)
    return bool(y[0].isfinite().all()), bool(y[1].isnan().all())


def test_nan_stays_in_its_row(interpret: Interpret) -> None:
    assert interpret(not_a_number) == (True, True)


def test_no_rows(interpret: Interpret) -> None:
    assert interpret(empty) == (0, 40)


def empty() -> tuple[int, ...]:
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, x = build(Case(Packing(4, 128)))
    return tuple(TritonMatmul(stored, Chip((9, 0), 1))(x[:0]).shape)


def test_wrong_activations_are_refused() -> None:
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, x = build(Case(Packing(4, 128)))
    matmul = TritonMatmul(stored, Chip((9, 0), 1))
    for wrong in (x.float(), x[:, :-1], x.t().contiguous().t().expand(2, -1)[:, ::2], x[0]):
        with pytest.raises(ValueError, match="activations"):
            matmul(wrong)


def test_holds_no_second_copy() -> None:
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul

    stored, _ = build(Case(Packing(4, 128), n=128))
    assert TritonMatmul(stored, Chip((9, 0), 1)).nbytes == stored.packed.nbytes + stored.scales.nbytes


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", torch.bfloat16, "cpu"), ("meta", torch.bfloat16, "meta")],
)
def test_declines_with_a_reason(device: str, dtype: torch.dtype, reason: str) -> None:
    declined = TritonKernel().decline(Packing(4, 128), 64, 128, torch.device(device), dtype)
    assert declined == Declined("not-on-cuda", {"device": reason})


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 5), torch.float16, "compute-capability"),
        ((9, 0), torch.float32, "activation-dtype"),
        ((9, 0), torch.bfloat16, None),
        ((12, 0), torch.float16, None),
    ],
    ids=str,
)
def test_on_a_gpu(
    capability: tuple[int, int], dtype: torch.dtype, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton_packed, "self_check", lambda device, packing: None)
    declined = TritonKernel().decline(Packing(4, 128), 64, 128, torch.device("cuda"), dtype)
    assert (declined is None) if reason is None else (declined is not None and reason == declined.code)


@pytest.mark.parametrize(
    ("packing", "reason"),
    [
        (Packing(4, 8, codes="e2m1"), "packing-group-not-multiple"),
        (Packing(6, 24), "packing-group-not-multiple"),
        (Packing(5, 32, "gguf", offsets=True, scale_dtype="float16"), None),
        (Packing(4, 128, "gptq", offsets=True, permuted=True), None),
        (Packing(8, None, codes="e4m3"), None),
    ],
    ids=str,
)
def test_foreign_layouts_but_groups_of_16_are_taken(
    packing: Packing, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accepted layouts are checked in the packing that the kernel multiplies."""
    checked: list[Packing] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_packed, "self_check", lambda device, packing: checked.append(packing))
    declined = TritonKernel().decline(packing, 64, 96, torch.device("cuda"), torch.bfloat16)
    assert (declined is None) if reason is None else (declined is not None and reason == declined.code)
    assert all(one.bits in BITS and one.group_size in (*GROUP_SIZES, None) and not one.permuted for one in checked)
    assert len(checked) == (reason is None)


def test_codes_that_are_no_number_are_the_references() -> None:
    stored = weight(Packing(8, None, codes="e4m3"), 4, 64, 0)
    kernel = TritonKernel()
    stored.packed.view(torch.uint8)[2, 5] = 0x7F
    prepared = kernel.prepare(stored, torch.bfloat16)
    assert isinstance(prepared, DequantizeMatmul) and prepared.dequantize()[2, 5].isnan()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(1e-3, None), (0.2, "'error': 0.2"), (math.nan, "product-check-failed"), (None, "RuntimeError: no image")],
)
def test_is_not_used_where_it_fails_or_is_wrong(
    error: float | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(*_: object) -> float:
        if error is None:
            raise RuntimeError("no image\nmore")
        return error

    monkeypatch.setattr(triton_packed, "small_product", product)
    monkeypatch.setattr(triton_packed, "chip_of", lambda device: None)
    found = triton_packed._checked.__wrapped__(torch.device("cuda"), Packing(4, 128))
    assert found is None if reason is None else reason in str(found)


def test_is_checked_once_however_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compiles and launches a kernel, and several threads load layers."""
    rows_tried: list[int] = []

    def product(device: object, packing: object, chip: object, rows: int) -> float:
        rows_tried.append(rows)
        time.sleep(0.05)
        return 1e-3

    monkeypatch.setattr(triton_packed, "small_product", product)
    monkeypatch.setattr(triton_packed, "chip_of", lambda device: None)
    monkeypatch.setattr(triton_packed, "_checked", cache(triton_packed._checked.__wrapped__))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(triton_packed.self_check, torch.device("cuda"), Packing(4, 128)) for _ in range(4)]
        assert [one.result() for one in asked] == [None] * 4
    assert rows_tried == [1, 12]


def test_declines_where_this_thread_launches_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_packed, "self_check", lambda device, packing: None)
    asked = [
        TritonKernel().decline(Packing(4, 128), 64, 128, torch.device("cuda", index), torch.bfloat16)
        for index in range(2)
    ]
    assert asked[0] is None and "other-cuda-device" in str(asked[1])


def product_in_interpreter(packing: Packing) -> float:
    return max(small_product(torch.device("cpu"), packing, Chip((9, 0), 1), rows) for rows in (1, 12))


def test_the_check_passes_where_the_kernels_work(interpret: Interpret) -> None:
    error = interpret(product_in_interpreter, Packing(4, 128))
    assert isinstance(error, float) and 0 < error < 5e-3


@pytest.mark.parametrize(
    ("capability", "driver", "pdl"), [((9, 0), 12030, True), ((8, 9), 13000, False), ((9, 0), 12020, False)]
)
def test_pdl_where_chip_and_driver_can(
    capability: tuple[int, int], driver: int, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(matmul, "_driver", lambda: driver)
    assert matmul.chip_of(torch.device("cuda", 0)) == Chip(capability, 132, pdl)
