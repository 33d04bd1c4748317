"""Packed products on the CPU against fp64: every width, group, type and instruction set; the same bits every time."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.runtime.kernels.cpu import matmul as cpu
from mycli.runtime.kernels.cpu.build import BuildError, Native, compile_library, find_compiler, native
from mycli.runtime.kernels.cpu.matmul import CpuKernel, TorchInt4Kernel, dense_rows, huge_empty, memory_bandwidth
from mycli.runtime.kernels.registry import choose, kernels
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import BITS, Packing

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
            matmul, wanted = CpuKernel(library).prepare(weight, dtype), exact(weight)
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
def test_shuffled_weight_is_the_reference_bit_for_bit(
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
        assert torch.equal(CpuKernel(library).prepare(weight, dtype).dequantize(), dequantize(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_same_bits_whatever_the_threads_and_the_neighbours(bits: int, dtype: torch.dtype) -> None:
    """A second run, another number of threads, and up to 40 rows at once: the reply of a row does not change."""
    matmul = CpuKernel().prepare(packed_weight(bits, (300, 512), 128), dtype)
    threads = torch.get_num_threads()
    for rows in (1, 8, 40, 64):
        x = activations(rows, 512, dtype)
        y = matmul(x)
        assert torch.equal(matmul(x), y)
        try:
            torch.set_num_threads(1)
            assert torch.equal(matmul(x), y)
        finally:
            torch.set_num_threads(threads)
        if rows <= 40 and dtype == torch.bfloat16:
            assert torch.equal(torch.cat([matmul(x[i : i + 1]) for i in range(rows)]), y)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_activations_of_any_size(library: Native, size: float) -> None:
    """One in a hundred is 1000 times the others, as in real models; some segments are all zero."""
    weight = packed_weight(4, (64, 1024), 128)
    x = activations(4, 1024, torch.float32) * size
    x[:, ::100] *= 1000
    x[:, 256:384] = 0
    x = x.to(torch.bfloat16)
    assert relative(CpuKernel(library).prepare(weight, torch.bfloat16)(x), x.double() @ exact(weight).T) < 0.0022


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_what_is_not_finite_is_not_hidden(library: Native, value: float, rows: int) -> None:
    x = activations(rows, 256, torch.bfloat16)
    x[0, 200] = value
    weight = packed_weight(4, (32, 256), 128)
    y = CpuKernel(library).prepare(weight, torch.bfloat16)(x)
    hit = exact(weight)[:, 200] != 0
    assert not y[0][hit].isfinite().any()
    assert y[1:].isfinite().all()


def test_exact_where_integers_suffice(library: Native) -> None:
    """Small whole numbers and scales of one: nothing may be rounded, on any path."""
    codes = torch.randint(0, 16, (48, 256), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    weight = PackedWeight(pack(codes, 4), torch.ones(48, 2, dtype=torch.bfloat16), Packing(4, 128), 256)
    matmul = CpuKernel(library).prepare(weight, torch.bfloat16)
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
    assert relative(CpuKernel(library).prepare(weight, torch.float32)(x), x.double() @ exact(weight).T) < 1e-6


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


def test_first_in_the_list() -> None:
    assert [kernel.name for kernel in kernels()][:2] == ["cpu", "torch-int4"]
    assert choose(Packing(3, 64), 64, 128, CPU, torch.bfloat16).name == "cpu"


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


def test_dense_rows() -> None:
    weight = (torch.randn(77, 352, generator=torch.Generator().manual_seed(0)) * 0.05).to(torch.bfloat16)
    for rows in (1, 2, 3, 4):
        x = activations(rows, 352, torch.bfloat16)
        y = dense_rows(x, weight)
        if y is None:
            pytest.skip("no bf16 dot products here")
        assert relative(y, x.double() @ weight.double().T) < 0.0022
    assert dense_rows(activations(5, 352, torch.bfloat16), weight) is None
    assert dense_rows(activations(1, 352, torch.float32), weight.float()) is None


def test_huge_empty_is_a_tensor_like_any_other() -> None:
    for shape in ((3, 5), (1025, 2048)):
        tensor = huge_empty(shape, torch.bfloat16)
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
        tensor.fill_(1)
        assert float(tensor.float().mean()) == 1


def test_memory_bandwidth() -> None:
    found = memory_bandwidth(1 << 24, 2)
    assert found is not None and 1e8 < found < 1e14


def test_threads_are_torchs(library: Native) -> None:
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
    monkeypatch.setattr(cpu, "native", lambda: "no GNU C++ compiler found")
    assert CpuKernel().decline(Packing(4, 128), 64, 256, CPU, torch.bfloat16) == "no GNU C++ compiler found"
    assert choose(Packing(4, 128), 64, 256, CPU, torch.bfloat16).name == "torch-int4"
    assert choose(Packing(3, 128), 64, 256, CPU, torch.bfloat16).name == "dequantize"
    assert dense_rows(activations(1, 64, torch.bfloat16), torch.zeros(4, 64, dtype=torch.bfloat16)) is None
    assert memory_bandwidth(1 << 20, 1) is None


def test_clang_is_not_taken(tmp_path: Path) -> None:
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho clang version 19\n")
    clang.chmod(0o755)
    path, version = find_compiler({**os.environ, "CXX": str(clang)})
    assert path != str(clang) and "Free Software Foundation" in version
