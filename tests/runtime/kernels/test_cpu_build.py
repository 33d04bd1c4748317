"""Test building the native library: compiled once across processes, or an error; its threads, and memory bandwidth."""

import errno
import itertools
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from mycli.cli.reasons import reason
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build, compiler
from mycli.runtime.kernels.cpu.library.build import BuildError, compile_library, find_compiler, native, torch_openmp
from mycli.runtime.kernels.cpu.matmul import CpuKernel, dense_product, memory_bandwidth
from mycli.runtime.kernels.registry import select_kernel
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.memory import huge_empty
from tests.support.compilers import copying_compiler, fake_compiler
from tests.support.grids import chosen

CPU = torch.device("cpu")
SOURCES = sorted(name for name in compiler.read_sources() if name.endswith(".cpp"))

pytestmark = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86-64")
@pytest.mark.parametrize("source", chosen(SOURCES, quick=["packed_cpu.cpp", "attention_cpu.cpp"]))
def test_sources_are_valid_for_processors_without_avx2(source: str) -> None:
    program, _ = find_compiler()
    folder = Path(compiler.__file__).parents[1] / "native"
    command = [program, *compiler.FLAGS, "-O0", "-march=x86-64", "-fsyntax-only", source]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_huge_empty_is_a_tensor_like_any_other() -> None:
    for shape in ((3, 5), (1025, 2048)):
        tensor = huge_empty(shape, torch.bfloat16)
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
        tensor.fill_(1)
        assert float(tensor.float().mean()) == 1


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages here")
def test_huge_empty_begins_at_a_huge_page_from_the_size_of_one_on() -> None:
    for size, huge in ((1 << 21, True), ((1 << 21) - 2, False), (5 << 20, True)):
        tensors = [huge_empty((size // 2,), torch.bfloat16) for _ in range(3)]
        assert all(tensor.data_ptr() % (1 << 21) == 0 for tensor in tensors) is huge


def test_memory_bandwidth() -> None:
    found = memory_bandwidth(1 << 24, 2)
    assert found is not None and 1e8 < found < 1e14


def test_memory_bandwidth_is_that_of_the_best_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings of a MiB take 9, 2 and 5 ms: the first and last are slowed by other programs."""
    moments = itertools.accumulate([0, 9e-3, 1, 2e-3, 1, 5e-3])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    assert memory_bandwidth(1 << 20, 3) == pytest.approx((1 << 20) / 2e-3)


def test_memory_bandwidth_fills_memory_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is one that an interrupt waits for: filling a GiB takes seconds on a busy machine."""
    filled: list[int] = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: filled.append(tensor.nbytes))
    memory_bandwidth(200 << 20, 1)
    assert sum(filled) == 200 << 20 and max(filled) <= 64 << 20


@pytest.mark.usefixtures("library")
def test_threads_are_torchs() -> None:
    """The reason: two OpenMP libraries in a process would keep their threads spinning against each other."""
    loaded = set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", Path("/proc/self/maps").read_text()))
    assert len(loaded) == 1, loaded


def test_processes_may_race(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": str(copying_compiler(tmp_path))}
    cache = tmp_path / "cache"
    program = (
        "import sys, pathlib; from mycli.runtime.kernels.cpu.library.build import compile_library, load_library;"
        "print(load_library(compile_library(pathlib.Path(sys.argv[1]))).isa)"
    )
    command = [sys.executable, "-c", program, str(cache)]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    assert len(list(cache.iterdir())) == 1, "one library, nothing left over"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder with the compiled library; further builds are counted in `tmp_path / "builds"`."""
    compiler = copying_compiler(tmp_path)
    compiler.write_text(compiler.read_text().replace("sleep 0.25", f"echo >> '{tmp_path}/builds'"))
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "cache"
    compile_library(folder)
    (tmp_path / "builds").unlink()
    return folder


def _truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def _zero(library: Path) -> None:
    with library.open("r+b") as file:
        file.seek(library.stat().st_size // 2)
        file.write(bytes(4096))


def _link(library: Path) -> None:
    library.rename(library.with_suffix(".other"))
    library.symlink_to(library.with_suffix(".other"))


DAMAGES = {
    "truncated": (_truncate, "is damaged"),
    "zeroed": (_zero, "is damaged"),
    "empty": (lambda library: library.write_bytes(b""), "is damaged"),
    "not sealed": (lambda library: library.write_bytes(library.read_bytes()[:-32]), "is damaged"),
    "writable": (lambda library: library.chmod(0o777), "can be written by other users"),
    "folder writable": (lambda library: library.parent.chmod(0o777), "can be written by other users"),
    "a link": (_link, "is not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_doubtful_library_is_built_again_once(damage: str, cache: Path, tmp_path: Path) -> None:
    (library,) = cache.iterdir()
    change, problem = DAMAGES[damage]
    change(library)
    assert build._cache_problem(library) == problem
    path = compile_library(cache)
    assert (tmp_path / "builds").exists() and not build._cache_problem(path)
    assert build.load_library(path).isa and cache.stat().st_mode & 0o077 == 0
    (tmp_path / "builds").unlink()
    compile_library(cache)
    assert not (tmp_path / "builds").exists()


def test_a_library_of_another_user_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(BuildError, match=f"untrusted-library-folder.*belongs to user {owner}"):
        compile_library(cache)


def test_a_library_without_a_function_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int packed_repack;")
    subprocess.run(["gcc", "-shared", "-o", str(tmp_path / "x.so"), str(tmp_path / "empty.c")], check=True)
    with pytest.raises(OSError, match="lacks the function packed_dequantize"):
        build.load_library(tmp_path / "x.so")


def test_openmp_is_found_in_a_folder_with_a_space(tmp_path: Path) -> None:
    path = "/home/a user/my env/lib/libgomp-98b21ff3.so.1.0.0"
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 fe:00 260386                     /usr/lib/libc.so.6\n"
        "7f01-7f02 rw-p 00000000 00:00 0 \n"
        f"7f02-7f03 r-xp 00000000 fe:00 260387                     {path}\n"
    )
    assert torch_openmp(maps) == path


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'x.cpp:1: error: no such luck' >&2; exit 1")))
    with pytest.raises(BuildError, match="compiler-failed.*no such luck"):
        compile_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("full", ["XDG_CACHE_HOME", "TMPDIR"])
def test_a_full_disk_is_named_with_its_free_space(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler names the files that it reads: its assembler code, and objects, which may be on two disks."""
    script = "echo \"x.s: Fatal error: can't write 1060 bytes to x.o: 'No space left on device'\" >&2; exit 1"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    folders = {"XDG_CACHE_HOME": tmp_path / "cache", "TMPDIR": tmp_path / "temporary"}
    folders["TMPDIR"].mkdir()
    monkeypatch.setenv("TMPDIR", str(folders["TMPDIR"]))
    free = {str(folder): 5 << 10 if variable == full else 7 << 20 for variable, folder in folders.items()}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[str(folder)]))
    with pytest.raises(BuildError) as raised:
        compile_library(folders["XDG_CACHE_HOME"])
    assert reason(raised.value.declined) == (
        f"no space left in {folders[full]}: 5 KiB free (free some space, or set {full} to a folder on another disk)"
    )


def test_a_disk_that_is_full_before_the_compiler_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(BuildError) as raised:
        compile_library(tmp_path / "cache")
    assert raised.value.declined.code == "no-space-for-library"


def test_a_compiler_has_a_path_where_the_environment_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, 'echo "error: $(env | grep ^PATH=)" >&2; exit 1')))
    monkeypatch.delenv("PATH")
    with pytest.raises(BuildError, match=f"PATH={os.defpath}"):
        compile_library(tmp_path / "cache")
    monkeypatch.setenv("PATH", "/elsewhere:/bin")
    with pytest.raises(BuildError, match="PATH=/elsewhere:/bin"):
        compile_library(tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError) as raised:
        compile_library(tmp_path / "file" / "kernels")
    folder = str(tmp_path / "file" / "kernels")
    assert raised.value.declined == Declined(
        "unwritable-library-folder", {"folder": folder, "error": "Not a directory"}
    )


def sleeping_compiler(folder: Path) -> tuple[Path, Path, Path]:
    """Return a compiler, the file of its processes' numbers, and the file that it leaves if it is not ended."""
    pids, ended = folder / "pids", folder / "ended"
    script = f"(sleep 60; touch {ended}) & echo $! >> {pids}; wait; touch {ended}"
    return fake_compiler(folder, script), pids, ended


def test_an_interrupt_ends_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal reaches this process alone, as from a service manager; g++ starts a process of its own."""
    program, pids, ended = sleeping_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(program))

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_library(tmp_path / "cache")
    thread.join()
    assert list((tmp_path / "cache").iterdir()) == []
    check_ended(pids, ended)


def test_an_interrupt_while_compilers_are_started_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, pids, ended = sleeping_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(program))

    class InterruptedPool(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **keywords: Any) -> NoReturn:
            super().submit(*arguments, **keywords)
            while not pids.exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    monkeypatch.setattr(compiler, "ThreadPoolExecutor", InterruptedPool)
    with pytest.raises(KeyboardInterrupt):
        compile_library(tmp_path / "cache")
    check_ended(pids, ended)


def check_ended(pids: Path, ended: Path) -> None:
    for pid in map(int, pids.read_text().split()):
        while _runs(pid):  # a killed process takes a moment to end; one that was not killed ends by itself
            time.sleep(0.01)
    assert not ended.exists(), "a compiler ran to its end"


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # nothing has reaped it yet


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no-compiler"):
        find_compiler()
    missing = Declined("no-compiler")
    monkeypatch.setattr(build, "native", lambda: missing)
    assert CpuKernel().decline(Packing(4, 128), 64, 256, CPU, torch.bfloat16) == missing
    assert select_kernel(Packing(4, 128), 64, 256, CPU, torch.bfloat16).name == "torch-int4"
    assert select_kernel(Packing(3, 128), 64, 256, CPU, torch.bfloat16).name == "dequantize"
    assert dense_product(torch.ones(1, 64, dtype=torch.bfloat16), torch.zeros(4, 64, dtype=torch.bfloat16)) == missing
    assert memory_bandwidth(1 << 20, 1) is None


def test_clang_is_not_taken(tmp_path: Path) -> None:
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\necho clang version 19\n")
    clang.chmod(0o755)
    path, version = find_compiler({**os.environ, "CXX": str(clang)})
    assert path != str(clang) and "Free Software Foundation" in version
