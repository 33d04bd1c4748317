"""Test prebuilt libraries in a wheel: which one is selected, and that its identity is checked."""

import shutil
from functools import cache
from pathlib import Path

import pytest

from mycli.runtime.device.system import Cpu, cpu
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build, isa, prebuilt
from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.kernels.cpu.library.compiler import BuildError
from tests.runtime.kernels.test_cpu_isa import BEST, HASWELL, SAPPHIRE_RAPIDS, ZEN_4
from tests.support.platform_wheel import complaints, headers


def empty(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / prebuilt._file_name(name)
    path.touch()
    return path


@pytest.mark.parametrize("name", isa.SETS)
def test_each_processor_takes_its_own(name: str, tmp_path: Path) -> None:
    files = {each: empty(tmp_path, each) for each in isa.portable_flags()}
    assert len(set(files.values())) == len(isa.SETS) + 2
    processor = Cpu("Some processor", 1, BEST[name])
    assert prebuilt.find(isa.portable_name(None, processor), tmp_path) == files[name]


def test_processors_on_which_dot_products_of_bf16_are_fast() -> None:
    assert isa.portable_name(None, Cpu("AMD EPYC 9654", 1, ZEN_4)) == "avx512vnni-bf16"
    assert isa.portable_name("avx512vnni", Cpu("AMD EPYC 9654", 1, ZEN_4)) == "avx512vnni-bf16"
    assert isa.portable_name(None, Cpu("AMD EPYC 9755", 1, ZEN_4 | {"avx_vnni"})) == "avx512vnni-bf16-avxvnni"
    assert isa.portable_name("avx2", Cpu("AMD EPYC 9654", 1, ZEN_4)) == "avx2"
    assert isa.portable_name(None, Cpu("Intel(R) Xeon(R)", 1, ZEN_4)) == "avx512vnni"


@pytest.mark.parametrize("name", isa.SETS)
def test_a_library_uses_nothing_its_processors_lack(name: str) -> None:
    """The compiler flags match the features that `InstructionSet.on` checks."""
    allowed = {flag.removeprefix("-m").replace("-", "").replace("_", "") for flag in isa.portable_flags()[name]}
    assert allowed == {need.replace("_", "") for need in isa.SETS[name].needs}
    assert isa.SETS[name].on(BEST[name])


def test_there_is_a_reason_where_there_is_none(tmp_path: Path) -> None:
    assert prebuilt.find("avx2", tmp_path / "missing") == Declined("no-prebuilt-library")
    expected = empty(tmp_path, "avx2")
    expected.rename(tmp_path / "packed_cpu-avx2-0123.so")
    assert prebuilt.find("avx2", tmp_path) == Declined("prebuilt-from-other-sources", {"file": expected.name})
    plain = isa.portable_name(None, Cpu("Some processor", 1, frozenset(("sse2",))))
    assert prebuilt.find(plain, tmp_path) == Declined("no-prebuilt-for-processor", {"instructions": "plain"})


def test_a_library_that_cannot_be_loaded_is_built_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load fails if the C library is older or the file is truncated."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt.find, "__defaults__", (tmp_path,))
    monkeypatch.setattr(build, "cpu", lambda: Cpu("Some processor", 1, HASWELL))
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    path = empty(tmp_path, "avx2")
    assert build.build_reason() == ""

    def no_compiler(*_: object) -> Path:
        raise BuildError(Declined("no-compiler"))

    monkeypatch.setattr(build, "compile_library", no_compiler)
    found = native.__wrapped__()
    assert isinstance(found, Declined) and found.data["compile"] == Declined("no-compiler")
    assert path.name in str(found.data["prebuilt"])


@cache
def _compiled(folder: Path) -> Path:
    name = isa.best_set(cpu().flags)
    path = folder / prebuilt._file_name(name)
    return path if path.is_file() else prebuilt.compile_portable(name, folder)


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Path:
    if shutil.which("g++") is None or isa.best_set(cpu().flags) == "plain":
        pytest.skip("no compiler, or no instructions to compile for")
    return _compiled(request.config.cache.mkdir("portable_cpu"))  # type: ignore[union-attr]  # the plugin always exists


@pytest.mark.slow
def test_the_one_that_was_carried_is_used(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt.find, "__defaults__", (compiled.parent,))
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = native.__wrapped__()
    assert isinstance(found, Native) and found.compiled is None
    assert list(isa.SETS).index(found.isa) >= list(isa.SETS).index(isa.best_set(cpu().flags))
    loaded = Path("/proc/self/maps").read_text()
    assert str(compiled) in loaded
    assert len({line.split()[-1] for line in loaded.splitlines() if "libgomp" in line or "libomp" in line}) == 1


@pytest.mark.slow
def test_it_travels(compiled: Path) -> None:
    assert complaints(headers(compiled)) == []


def test_what_does_not_travel_is_noticed() -> None:
    symbol = "0000000000000000      DF *UND*\t0000000000000000 "
    fine = ["  NEEDED               libc.so.6", f"{symbol}(GLIBC_2.14) memcpy", f"{symbol} Base        GOMP_parallel"]
    assert complaints("\n".join(fine)) == []
    for line, problem in {
        "  NEEDED               libgomp.so.1": "wants libgomp.so.1",
        f"{symbol}(GLIBC_2.36) arc4random": "arc4random is of GLIBC 2.36",
        f"{symbol} Base        cblas_sgemm": "cblas_sgemm is in no library",
    }.items():
        assert complaints("\n".join([*fine, line])) == [problem]


def test_sapphire_rapids_has_all_that_its_library_uses() -> None:
    assert isa.best_set(SAPPHIRE_RAPIDS) == "amx"
    assert isa.best_set(SAPPHIRE_RAPIDS - {"avx512_bf16"}) == "avx512vnni"
