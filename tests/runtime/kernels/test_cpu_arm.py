"""Test the native code compiled for ARM, under emulation: the bits equal this machine's."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.int4 import pack_int4
from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import attend_paged
from mycli.runtime.kernels.cpu.latent import native_latent_attention
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, multiply_dense
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import ActivationBits, Packing
from tests.runtime.kernels import test_cpu_table
from tests.support.emulated_arm import MISSING, SETS, EmulatedArm
from tests.support.packed_weights import byte_scale_weight, super_block_weight

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} (g++-aarch64-linux-gnu, qemu-user)")

ROWS = (1, 2, 3, 4, 5, 9)
WEIGHTS = [
    *(pytest.param(Packing(bits, 32), id=f"int{bits}-g32") for bits in (8, 4, 3, 2)),
    *(pytest.param(Packing(bits, 128), id=f"int{bits}-g128", marks=pytest.mark.slow) for bits in (8, 4, 3, 2)),
    pytest.param(Packing(6, 16), id="int6-g16"),
    pytest.param(Packing(4, 64, offsets=True), id="int4-g64-offset"),
    pytest.param(Packing(8, None), id="int8-channel"),
    pytest.param(Packing(4, 32, codes="e2m1"), id="e2m1-g32"),
    pytest.param(Packing(4, 32, codes="iq4"), id="iq4-g32"),
    pytest.param(Packing(4, 32, offsets=True, byte_scales="super_blocks"), id="Q4_K"),
    pytest.param(Packing(6, 16, byte_scales="super_blocks"), id="Q6_K"),
    pytest.param(Packing(4, 16, codes="e2m1", byte_scales="e4m3"), id="NVFP4"),
    pytest.param(Packing(4, 32, codes="e2m1", byte_scales="e8m0"), id="MXFP4"),
]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "dotprod")) for name in SETS]
)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Native:
    return cast(Native, EmulatedArm(tmp_path_factory.mktemp("arm"), request.param))


def weight(packing: Packing, rows: int = 40, inputs: int = 512) -> PackedWeight:
    if packing.byte_scales == "super_blocks":
        return super_block_weight(packing.bits, (rows, inputs), packing.group_size or 0, offsets=packing.offsets)
    if packing.byte_scales is not None:
        return byte_scale_weight(packing.byte_scales, (rows, inputs), packing.group_size or 0)
    draw = torch.Generator().manual_seed(packing.bits)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, packing.words(inputs)), generator=draw).to(torch.int32)
    scales = (torch.randn(rows, packing.groups(inputs), generator=draw) * 0.02).bfloat16()
    offsets = torch.randn(scales.shape, generator=draw) * 0.02 if packing.offsets else None
    return PackedWeight(words, scales, packing, inputs, offsets)


@pytest.fixture(scope="module")
def here() -> Native:
    found = build.native()
    if isinstance(found, Declined):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("bits", [16, 8], ids="activations-{}".format)
@pytest.mark.parametrize("packing", WEIGHTS)
def test_products_have_the_bits_of_this_machine(
    arm: Native, here: Native, packing: Packing, bits: ActivationBits
) -> None:
    """The products have few rows and many, in bf16, whose sums use integers."""
    given = weight(packing)
    given = replace(given, packing=replace(given.packing, activations=bits))
    ours, theirs = CpuMatmul(here, given), CpuMatmul(arm, given)
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    draw = torch.Generator().manual_seed(1)
    x = (torch.randn(max(ROWS), given.in_features, generator=draw) * 8).bfloat16()
    x[0, :40], x[1, 7] = 0, 3e38
    for rows in ROWS:
        assert torch.equal(ours(x[:rows]), theirs(x[:rows])), rows
    x = x[:5].float().clamp(-100, 100)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_products(arm: Native, here: Native, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    w, x = (torch.randn(rows, 96, generator=draw).to(dtype) for rows in (37, 9))
    for rows in (1, 9):
        ours, theirs = (multiply_dense(library, x[:rows], w) for library in (here, arm))
        torch.testing.assert_close(theirs, ours, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_portable_dense_products_have_the_bits_of_this_machine(arm: Native, here: Native, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    for inputs in (96, 200):
        w, x = (torch.randn(rows, inputs, generator=draw).to(dtype) for rows in (37, 9))
        for rows in (1, 2, 9):
            ours, theirs = (multiply_dense(library, x[:rows], w, portable=True) for library in (here, arm))
            assert torch.equal(ours, theirs), (inputs, rows)


@pytest.mark.parametrize("kind", ["e4m3", "nf4"])
def test_portable_tables_have_the_bits_of_this_machine(arm: Native, here: Native, kind: str) -> None:
    stored = test_cpu_table.weight(test_cpu_table.KINDS[kind], 32)
    x = torch.randn(17, test_cpu_table.COLUMNS, generator=torch.Generator().manual_seed(7)).bfloat16()
    ours, theirs = (TableMatmul(library, stored) for library in (here, arm))
    for matmul in (ours, theirs):
        matmul.make_portable()
    for rows in (1, 3, 17):
        assert torch.equal(ours(x[:rows]), theirs(x[:rows])), rows


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_portable_latent_attention_has_the_bits_of_this_machine(
    arm: Native, here: Native, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(6)
    query, rotated = (torch.randn(41, 4, size, generator=draw).bfloat16() for size in (64, 32))
    stored = [_stored(torch.randn(6, 1, 16, size, generator=draw), kind) for size in (64, 32)]
    numbers = ([0, 40, 41], [50, 9], [[3, 1, 0, 5], [4, 2, 2, 2]])
    ragged = Ragged(*(torch.tensor(each, dtype=torch.int32) for each in numbers), portable=True)
    found = []
    for library in (here, arm):
        monkeypatch.setattr(build, "native", lambda library=library: library)
        found.append(native_latent_attention(query, rotated, *stored, ragged, 0.2))
    assert not any(isinstance(one, Declined) for one in found)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_attention_has_the_bits_of_this_machine(
    arm: Native, here: Native, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases are a prompt with a cached prefix and a single token, over scattered blocks; few rows and many."""
    draw = torch.Generator().manual_seed(4)
    query = torch.randn(41, 4, 32, generator=draw)
    dense = torch.randn(2, 6, 2, 16, 32, generator=draw)  # keys and values [blocks, kv_heads, block_size, head_dim]
    stored = [_stored(one, kind) for one in dense]
    numbers = ([0, 40, 41], [50, 9], [[3, 1, 0, 5], [4, 2, 2, 2]])
    ragged = Ragged(*(torch.tensor(each, dtype=torch.int32) for each in numbers))
    found = []
    for library in (here, arm):
        monkeypatch.setattr(build, "native", lambda library=library: library)
        found.append(attend_paged(query, *stored, ragged, Scoring(0.2, 30)))
    assert not any(isinstance(one, Declined) for one in found)
    assert torch.equal(*found)


def _stored(values: Tensor, kind: str) -> Stored:
    if kind == "int4":
        return Stored(*pack_int4(values))
    if kind == "int8":
        scales = values.abs().amax(-1) / 127
        return Stored((values / scales[..., None]).round().to(torch.int8), scales)
    return Stored(values.to(torch.float32 if kind == "fp32" else torch.bfloat16))
