"""Test products with the same bits on every processor: dense and table weights equal a plain reference on every set."""

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.latent import native_head_product, native_latent_attention
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.kernels.cpu.matmul import PortableMatmul, multiply_dense
from mycli.runtime.kernels.cpu.portable import decline_portable, portable_product
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.paged import Ragged
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.registry import ROUTED_PRODUCT, prepare_product
from mycli.runtime.quantization.packed_weight import dequantize
from tests.runtime.kernels import test_cpu_table
from tests.support.native_code import instruction_set

LANES = 16
CPU = torch.device("cpu")


def coarse(*shape: int, seed: int, step: float = 2**-6) -> Tensor:
    """Return values of few bits, so that a product and a sum are exact in fp64 and are rounded once, as when fused."""
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (draw / step).round() * step


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def halved(lanes: Tensor) -> Tensor:
    """Add lane i + 8 to lane i, then i + 4, i + 2 and i + 1."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def reference_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [rows, K] by weight [N, K] in the order of portable_dense.h."""
    beside = 2 if x.dtype == torch.bfloat16 else 1  # neighbouring inputs that one sum takes
    missing = -x.shape[1] % (LANES * beside)
    steps, weights = (
        torch.nn.functional.pad(part.float(), (0, missing)).view(len(part), -1, LANES, beside) for part in (x, weight)
    )
    sums = torch.zeros(len(x), len(weight), LANES)
    for step in range(steps.shape[1]):
        for place in range(beside):
            sums = fused(steps[:, None, step, :, place], weights[None, :, step, :, place], sums)
    return halved(sums).to(x.dtype)


@pytest.fixture
def portable(library: Native) -> Native:
    return pytest.skip("no fused multiply-add") if library.isa == "plain" else library


@pytest.mark.parametrize("inputs", [32, 96, 128, 250, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_products_are_those_of_the_reference(portable: Native, dtype: torch.dtype, inputs: int) -> None:
    weight, x = (coarse(rows, inputs, seed=rows).to(dtype) for rows in (37, 75))
    expected = reference_product(x, weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 40, 75):
        assert torch.equal(multiply_dense(portable, x[:rows], weight, portable=True), expected[:rows]), rows


def test_products_of_experts_and_heads_are_those_of_the_reference(portable: Native) -> None:
    weights, x = coarse(4, 48, 96, seed=1).bfloat16(), coarse(9, 96, seed=2).bfloat16()
    starts = torch.tensor([0, 2, 2, 8, 9], dtype=torch.int32)
    found = ROUTED_PRODUCT([PortableMatmul(portable, weight) for weight in weights], x, starts, None)
    bounds = starts.tolist()
    parts = [reference_product(x[a:b], w) for w, a, b in zip(weights, bounds, bounds[1:], strict=False) if a < b]
    assert torch.equal(found, torch.cat(parts))
    heads = coarse(9, 4, 96, seed=3).bfloat16()
    by_head = native_head_product(heads, weights, portable=True)
    assert isinstance(by_head, Tensor)
    for head in range(4):
        assert torch.equal(by_head[:, head], reference_product(heads[:, head], weights[head]))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "nf4"])
def test_tables_are_multiplied_in_one_way_for_all_rows(portable: Native, kind: str) -> None:
    stored = test_cpu_table.weight(test_cpu_table.KINDS[kind], 32)
    scales = coarse(*stored.scales.shape, seed=4) + 2**-6
    stored = type(stored)(stored.packed, scales, stored.packing, stored.in_features)
    matmul = portable_product(prepare_product(stored, torch.bfloat16))
    assert isinstance(matmul, TableMatmul)
    ones = type(stored)(stored.packed, torch.ones_like(scales), stored.packing, stored.in_features)
    values = dequantize(ones).float().view(37, -1, 32 // LANES, LANES)
    x = coarse(40, test_cpu_table.COLUMNS, seed=5, step=2**-4).bfloat16()
    inputs, total = x.float().view(40, *values.shape[1:]), torch.zeros(40, 37, LANES)
    for group in range(values.shape[1]):
        part = torch.zeros_like(total)
        for step in range(values.shape[2]):
            part = fused(inputs[:, None, group, step], values[None, :, group, step], part)
        total = fused(part, scales[None, :, group, None], total)
    expected = torch.zeros(40, 37)
    for lane in range(LANES):
        expected = expected + total[..., lane]
    for rows in (1, 2, 3, 7, 15, 16, 40):
        assert torch.equal(matmul(x[:rows]), expected[:rows].bfloat16()), rows


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("variant", ["avx2", pytest.param("avx512", marks=pytest.mark.slow)])
def test_latent_attention_has_the_bits_of_this_machine(
    variant: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(6)
    query, rotated = (torch.randn(41, 4, size, generator=draw).bfloat16() for size in (64, 32))
    latents, keys = (torch.randn(6, 1, 16, size, generator=draw) for size in (64, 32))
    stored = [Stored.of(part, torch.int8 if kind == "int8" else torch.bfloat16) for part in (latents, keys)]
    numbers = ([0, 40, 41], [50, 9], [[3, 1, 0, 5], [4, 2, 2, 2]])
    ragged = Ragged(*(torch.tensor(part, dtype=torch.int32) for part in numbers), portable=True)
    if isinstance(build.native(), Declined):
        pytest.skip("no native code here")
    here = native_latent_attention(query, rotated, *stored, ragged, 0.2)
    instruction_set(variant, monkeypatch)
    there = native_latent_attention(query, rotated, *stored, ragged, 0.2)
    assert isinstance(here, Tensor) and isinstance(there, Tensor)
    assert torch.equal(here, there)


def test_what_has_no_portable_bits(library: Native) -> None:
    declined = decline_portable(CPU, torch.bfloat16)
    assert (None if declined is None else declined.code) == (
        "no-fused-multiply-add" if library.isa == "plain" else None
    )
    assert decline_portable(torch.device("meta"), torch.bfloat16) == Declined(
        "not-on-cpu", {"device": torch.device("meta")}
    )
    assert decline_portable(CPU, torch.float32) == Declined("activation-dtype", {"dtype": "float32"})
    assert isinstance(portable_product(DenseMatmul(torch.zeros(2, 32))), PortableMatmul)
