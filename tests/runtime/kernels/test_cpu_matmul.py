"""Packed products on the CPU against fp64: every width, group, type and instruction set; the same bits every time."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.runtime.errors import ModelError
from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu import matmul as cpu
from mycli.runtime.kernels.cpu.build import BuildError, Native, compile_library, find_compiler, native
from mycli.runtime.kernels.cpu.matmul import CpuKernel, TorchInt4Kernel, dense_product, memory_bandwidth
from mycli.runtime.kernels.registry import Operation, kernels, select_kernel
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import BITS, Packing
from mycli.runtime.utils.huge_pages import huge_empty

CPU = torch.device("cpu")
ERROR = {torch.bfloat16: 0.0028, torch.float16: 0.0004, torch.float32: 1e-6}
ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 40, 48, 70)

pytestmark = pytest.mark.skipif(isinstance(native(), str), reason=f"no native code here: {native()}")


def packed_weight(
    bits: int, shape: tuple[int, int], group: int | None, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PackedWeight:
    """Random codes; scales of both signs, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    scales = torch.randn(shape[0], shape[1] // (group or shape[1]), generator=generator) * 0.02
    scales[scales.abs() < 0.001] = 0
    return PackedWeight(pack(codes, bits), scales.to(dtype), Packing(bits, group), shape[1])


def exact(weight: PackedWeight) -> Tensor:
    """The weight in fp64: codes times scales, nothing rounded."""
    return dequantize(PackedWeight(weight.packed, weight.scales.double(), weight.packing, weight.in_features))


def activations(rows: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("bits", BITS)
def test_product(library: Native, bits: int, group: int | None, dtype: torch.dtype) -> None:
    """Odd numbers of outputs, 1 to 70 rows, scales in the type of the activations and in the others."""
    for shape in ((37, 384), (16, 128), (100, 640)):
        for scale_type in (torch.bfloat16, torch.float16, torch.float32):
            weight = packed_weight(bits, shape, group, scale_type)
            matmul, wanted = CpuKernel().prepare(weight, dtype), exact(weight)
            for rows in ROWS if scale_type == torch.bfloat16 else (2, 20):
                x = activations(rows, shape[1], dtype)
                y = matmul(x)
                assert y.dtype == dtype and y.shape == (rows, shape[0])
                assert relative(y, x.double() @ wanted.T) < ERROR[dtype], (shape, scale_type, rows)


@given(
    bits=st.sampled_from(BITS),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 12),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@settings(max_examples=40, deadline=None)
def test_repacked_weight_is_the_reference_bit_for_bit(
    bits: int, outputs: int, blocks: int, seed: int, dtype: torch.dtype
) -> None:
    inputs = 32 * blocks
    group = next(size for size in (128, 64, 32) if inputs % size == 0) if seed % 2 else None
    weight = packed_weight(bits, (outputs, inputs), group, dtype, seed)
    assert torch.equal(CpuKernel().prepare(weight, dtype).dequantize(), dequantize(weight))


@pytest.mark.parametrize("bits", BITS)
def test_every_variant_unpacks_the_reference(library: Native, bits: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = packed_weight(bits, (45, 384), 128, dtype)
        assert torch.equal(CpuKernel().prepare(weight, dtype).dequantize(), dequantize(weight))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(
    library: Native, bits: int, dtype: torch.dtype
) -> None:
    """Below 16 rows on every machine. From there on where AMX multiplies them, up to 47; else torch does, nearly so."""
    matmul = CpuKernel().prepare(packed_weight(bits, (300, 512), 128), dtype)
    x = activations(64, 512, dtype)
    alone = torch.cat([matmul(row[None]) for row in x])
    for rows in (1, 8, 15, 16, 40, 47, 64):
        found = []
        for count in (1, 1, 2, 3):
            with threads(count):
                found.append(matmul(x[:rows]))
        assert torch.equal(found[0], found[1]), "a second run"
        native = library.amx and dtype == torch.bfloat16
        if rows < 16 or native:
            assert all(torch.equal(one, found[0]) for one in found)
        if rows < 16 or (native and rows < 48):
            assert torch.equal(found[0], alone[:rows])
        assert all(relative(one, alone[:rows].double()) < 1.5 * ERROR[dtype] for one in found)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_activations_of_any_size(library: Native, size: float) -> None:
    """One in a hundred is 1000 times the others, as in real models; some segments are all zero."""
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
    """Small whole numbers and scales of one: nothing may be rounded, on any path."""
    codes = torch.randint(0, 16, (48, 256), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    weight = PackedWeight(pack(codes, 4), torch.ones(48, 2, dtype=torch.bfloat16), Packing(4, 128), 256)
    matmul = CpuKernel().prepare(weight, torch.bfloat16)
    for rows in (1, 3, 12, 64):
        x = (torch.arange(rows * 256).view(rows, 256) % 3 - 1).to(torch.bfloat16)
        wanted = (x.double() @ (codes.double() - 8).T).to(torch.bfloat16)
        assert torch.equal(matmul(x), wanted)


def test_no_second_copy() -> None:
    weight = packed_weight(3, (64, 256), 64)
    assert CpuKernel().prepare(weight, torch.bfloat16).nbytes == weight.packed.nbytes + weight.scales.nbytes


def test_parts_of_a_dense_product(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many rows go through torch, parts of the weight end where they should."""
    monkeypatch.setattr(cpu, "_PART", 48 * 128)
    weight, x = packed_weight(4, (131, 128), 64), activations(50, 128, torch.float32)
    assert relative(CpuKernel().prepare(weight, torch.float32)(x), x.double() @ exact(weight).T) < 1e-6


@pytest.mark.parametrize(
    "packing, inputs, device, dtype, reason",
    [
        (Packing(4, 128), 256, torch.device("cuda"), torch.bfloat16, "CPU only"),
        (Packing(4, None), 100, CPU, torch.bfloat16, "100 inputs are no multiple of 32"),
        (Packing(4, 128), 256, CPU, torch.float64, "float64 activations"),
    ],
    ids=["cuda", "inputs", "float64"],
)
def test_declines(packing: Packing, inputs: int, device: torch.device, dtype: torch.dtype, reason: str) -> None:
    found = CpuKernel().decline(packing, 64, inputs, device, dtype)
    assert found is not None and reason in found


def test_no_match_explains_itself() -> None:
    operation = Operation("nothing", (dense_product,))
    with pytest.raises(ModelError, match=r"nothing of \(1, 32\) torch.float32, \(4, 32\) torch.float32") as error:
        operation(torch.zeros(1, 32), torch.zeros(4, 32))
    assert "dense_product: takes bf16 on the CPU only" in str(error.value.hint)


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
    for rows in (1, 7, 40):
        x = activations(rows, 256, torch.bfloat16)
        assert relative(matmul(x), x.double() @ exact(weight).T) < 0.004
    assert kernel.decline(Packing(8, 128), 96, 256, CPU, torch.bfloat16)
    assert kernel.decline(Packing(4, 128), 90, 256, CPU, torch.bfloat16)
    assert kernel.decline(Packing(4, 128), 96, 256, CPU, torch.float32)


def test_dense_product(library: Native) -> None:
    weight = (torch.randn(77, 352, generator=torch.Generator().manual_seed(0)) * 0.05).to(torch.bfloat16)
    for rows in (1, 2, 3, 4):
        x = activations(rows, 352, torch.bfloat16)
        y = dense_product(x, weight)
        if isinstance(y, str):
            assert not library.dense_bf16
            continue
        assert library.dense_bf16 and relative(y, x.double() @ weight.double().T) < 0.0022
    assert "up to 4 rows" in str(dense_product(activations(5, 352, torch.bfloat16), weight))
    assert "bf16" in str(dense_product(activations(1, 352, torch.float32), weight.float()))


def test_huge_empty_is_a_tensor_like_any_other() -> None:
    for shape in ((3, 5), (1025, 2048)):
        tensor = huge_empty(shape, torch.bfloat16)
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
        tensor.fill_(1)
        assert float(tensor.float().mean()) == 1


def test_memory_bandwidth() -> None:
    found = memory_bandwidth(1 << 24, 2)
    assert found is not None and 1e8 < found < 1e14


@pytest.mark.usefixtures("library")
def test_threads_are_torchs() -> None:
    """One OpenMP library in the process: two would keep their threads spinning against each other."""
    loaded = set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", Path("/proc/self/maps").read_text()))
    assert len(loaded) == 1, loaded


def test_processes_may_race(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from mycli.runtime.kernels.cpu.build import compile_library, load_library;"
        "print(load_library(compile_library(pathlib.Path(sys.argv[1]), ['-O0'])).bf16)"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1, "one library, nothing left over"


def fake_compiler(folder: Path, body: str) -> Path:
    path = folder / "g++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Free Software Foundation"; exit; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'x.cpp:1: error: no such luck' >&2; exit 1")))
    with pytest.raises(BuildError, match="no such luck"):
        compile_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"install g\+\+"):
        find_compiler()
    missing = "no GNU C++ compiler found"
    monkeypatch.setattr(build, "native", lambda: missing)
    assert CpuKernel().decline(Packing(4, 128), 64, 256, CPU, torch.bfloat16) == missing
    assert select_kernel(Packing(4, 128), 64, 256, CPU, torch.bfloat16).name == "torch-int4"
    assert select_kernel(Packing(3, 128), 64, 256, CPU, torch.bfloat16).name == "dequantize"
    assert dense_product(activations(1, 64, torch.bfloat16), torch.zeros(4, 64, dtype=torch.bfloat16)) == missing
    assert memory_bandwidth(1 << 20, 1) is None


def test_clang_is_not_taken(tmp_path: Path) -> None:
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho clang version 19\n")
    clang.chmod(0o755)
    path, version = find_compiler({**os.environ, "CXX": str(clang)})
    assert path != str(clang) and "Free Software Foundation" in version
